package gateway

import colibri "colibri/client/go"

// nativeScore are the fields of the protocol's SCORE by their own names.
func nativeScore(s *colibri.Score) fields {
	return fields{
		"tokens":      into((*[]uint32)(&s.Tokens), tokens),
		"top":         into(&s.Top, whole(0, maxLogprobs)),
		"from":        into(&s.Start, whole(1, most)),
		"priority":    into(&s.Priority, signed(-maxPriority, maxPriority)),
		"deadline_ms": into(&s.DeadlineMS, whole(1, maxDeadlineMS)),
		"cache":       cacheFields(&s.Cache).inside,
		"model":       into(&s.Model, optional(str)),
	}
}

// scoreLine has scores of consecutive tokens, from index on.
type scoreLine struct {
	Index       uint64      `json:"index"`
	Logprobs    []float32   `json:"logprobs"`
	TopIDs      [][]uint32  `json:"top_ids,omitempty"`
	TopLogprobs [][]float32 `json:"top_logprobs,omitempty"`
}

func score(d *deps, x *exchange) error {
	request := colibri.NewScore()
	if err := x.read(nativeScore(&request)); err != nil {
		return err
	}
	if err := x.direct(d, ofScore(&request), request.Tokens); err != nil {
		return err
	}
	result, err := d.client.Score(x.r.Context(), &request)
	if err != nil {
		return err
	}
	x.firstTokens()
	return sendScores(x, result)
}

// scoresPerLine bounds what is encoded at once.
const scoresPerLine = 1024

func sendScores(x *exchange, result *colibri.ScoreResult) error {
	e := newEvents(x, true)
	defer e.end()
	ids, top := rows(result.TopIDs, len(result.Logprobs)), rows(result.TopLogprobs, len(result.Logprobs))
	for start := 0; start < len(result.Logprobs); start += scoresPerLine {
		end := min(start+scoresPerLine, len(result.Logprobs))
		line := scoreLine{Index: result.From + uint64(start), Logprobs: result.Logprobs[start:end]}
		if ids != nil {
			line.TopIDs, line.TopLogprobs = ids[start:end], top[start:end]
		}
		if err := e.send(line); err != nil {
			return err
		}
	}
	x.count(result.Done.Usage)
	return e.send(nativeDone{result.Done})
}
