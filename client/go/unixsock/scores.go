package unixsock

import (
	"fmt"
	"time"

	colibri "colibri/client/go"
)

// scores gathers SCORES, which come in frames of consecutive positions.
type scores struct{ result colibri.ScoreResult }

// restart begins anew, at a position.
func (s *scores) restart(from uint64) { s.result = colibri.ScoreResult{From: from} }

// take adds a frame; an error says what is wrong with it.
func (s *scores) take(m *colibri.Scores) error {
	r := &s.result
	if next := r.From + uint64(len(r.Logprobs)); m.Index != next {
		return fmt.Errorf("SCORES of position %d; %d is next", m.Index, next)
	}
	if err := fit(len(m.Logprobs), m.TopIDs, m.TopLogprobs); err != nil {
		return fmt.Errorf("SCORES with %w", err)
	}
	r.Logprobs = append(r.Logprobs, m.Logprobs...)
	r.TopIDs = append(r.TopIDs, m.TopIDs...)
	r.TopLogprobs = append(r.TopLogprobs, m.TopLogprobs...)
	return nil
}

// fit checks that alternatives are as many for each of n tokens.
func fit(n int, ids colibri.TokenIDs, logprobs colibri.Floats) error {
	if len(ids) != len(logprobs) || len(ids) > 0 && (n == 0 || len(ids)%n != 0) {
		return fmt.Errorf("%d alternatives with %d log probabilities for %d tokens", len(ids), len(logprobs), n)
	}
	return nil
}

// scoring is one SCORE.
type scoring struct {
	*request
	score  colibri.Score
	scores scores
}

func (s *scoring) open(waited time.Duration) colibri.Message {
	s.scores.restart(s.score.Start)
	m := s.score
	m.DeadlineMS = within(m.DeadlineMS, waited)
	return &m
}

// run goes on to the end.
func (s *scoring) run() (*colibri.ScoreResult, error) {
	if err := s.begin(nil); err != nil {
		return nil, err
	}
	for {
		m, err := s.next()
		if err != nil {
			return nil, err
		}
		switch m := m.(type) {
		case *colibri.Scores:
			if err := s.scores.take(m); err != nil {
				return nil, s.violation("%v", err)
			}
		case *colibri.Done:
			s.scores.result.Done = m
			return &s.scores.result, nil
		default:
			return nil, s.violation("%s in answer to SCORE", name(m))
		}
	}
}
