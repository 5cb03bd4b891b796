package unixsock

import (
	"io"
	"math/rand/v2"
	"time"

	colibri "colibri/client/go"
)

// output is one GENERATE and what has come of it: a colibri.Reader.
type output struct {
	*request
	generate colibri.Generate
	given    int                // tokens the caller resumed from
	received colibri.TokenIDs   // those, and all that have been read
	maker    *colibri.ModelInfo // of the first that have been read; nil before
	read     uint64             // tokens read that the daemon has not been granted anew
	scores   scores
	done     *colibri.Done
	err      error // once it is over
}

// newOutput gives the request a seed whenever one can matter: who knows it can take up a broken stream.
func newOutput(r *request, generate *colibri.Generate) *output {
	o := &output{request: r, generate: *generate}
	r.opening = o.open
	r.within(generate.DeadlineMS)
	var seed uint64
	if resume := generate.Resume; resume != nil {
		o.received = append(o.received, resume.Tokens...)
		seed = resume.Seed
	} else {
		seed = rand.Uint64()
	}
	o.given = len(o.received)
	if o.generate.Seed == nil && o.generate.Temperature != 0 {
		o.generate.Seed = &seed
	}
	return o
}

// open makes GENERATE: as the caller gave it, or with the tokens that have come.
func (o *output) open(waited time.Duration) colibri.Message {
	m := o.generate
	m.DeadlineMS = within(m.DeadlineMS, waited)
	o.read = 0
	if len(o.received) == o.given {
		o.maker = nil
		o.scores.restart(1)
		return &m
	}
	m.Resume = &colibri.Resume{Tokens: o.received, Seed: o.seed(), Receipt: o.receipt()}
	m.PromptLogprobs = nil
	return &m
}

// receipt is what the tokens are a function of, besides the request: a daemon that cannot have made them refuses to go
// on. What the caller resumed with says it for the whole output.
func (o *output) receipt() *colibri.Receipt {
	if given := o.generate.Resume; given != nil && given.Receipt != nil {
		return given.Receipt
	}
	m := o.maker
	return &colibri.Receipt{ModelID: m.ID, Fingerprint: m.Fingerprint, Seed: o.seed(), Pinned: m.Pinned,
		Window: m.Window, Positions: m.Positions, KVFormat: m.KVFormat}
}

func (o *output) seed() uint64 {
	if o.generate.Seed == nil {
		return 0
	}
	return *o.generate.Seed
}

// Next is colibri.Reader's.
func (o *output) Next() (*colibri.TokensOut, error) {
	for o.err == nil {
		m, err := o.next()
		if err != nil {
			o.finish(o.failed(err))
			break
		}
		switch m := m.(type) {
		case *colibri.TokensOut:
			if err := o.take(m); err != nil {
				o.finish(err)
				break
			}
			return m, nil
		case *colibri.Scores:
			if err := o.scores.take(m); err != nil {
				o.finish(o.violation("%v", err))
			}
		case *colibri.Done:
			o.done = m
			o.finish(io.EOF)
		default:
			o.finish(o.violation("%s in answer to GENERATE", name(m)))
		}
	}
	return nil, o.err
}

// take adds tokens, and lets the daemon send as many again once half of its window is read.
func (o *output) take(m *colibri.TokensOut) error {
	if m.Index != uint64(len(o.received)) {
		return o.violation("TOKENS of index %d; %d is next", m.Index, len(o.received))
	}
	if err := fit(len(m.IDs), m.TopIDs, m.TopLogprobs); err != nil {
		return o.violation("TOKENS with %v", err)
	}
	if o.maker == nil {
		o.maker = o.ex.maker
	}
	o.received = append(o.received, m.IDs...)
	o.read += uint64(len(m.IDs))
	if l := o.ex.link; l.credit > 0 && o.read >= max(1, l.credit/2) {
		l.tell(&colibri.Credit{Tokens: o.read}, o.ex.id)
		o.read = 0
	}
	return nil
}

// failed: who has cancelled, and lost the connection before the daemon's word, is told what is known here.
func (o *output) failed(err error) error {
	if _, isLoss := err.(*colibri.ConnectionError); !isLoss || !o.cancelled {
		return err
	}
	usage := colibri.Usage{Prompt: uint64(len(o.generate.Tokens)), Generated: uint64(len(o.received))}
	o.done = &colibri.Done{FinishReason: "abort", Usage: usage, Seed: o.seed()}
	return io.EOF
}

func (o *output) finish(err error) {
	o.err = err
	o.settle()
}

// Prompt is colibri.Reader's.
func (o *output) Prompt() *colibri.ScoreResult {
	if o.generate.PromptLogprobs == nil {
		return nil
	}
	return &o.scores.result
}

// Done is colibri.Reader's.
func (o *output) Done() *colibri.Done { return o.done }

// Cancel is colibri.Reader's.
func (o *output) Cancel(reason string) {
	if o.err == nil && !o.cancelled {
		o.cancelled = true
		o.ex.link.cancel(o.ex, reason)
	}
}

// Close is colibri.Reader's.
func (o *output) Close() { o.cancel() }
