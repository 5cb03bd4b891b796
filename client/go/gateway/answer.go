package gateway

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	colibri "colibri/client/go"
)

// form is how an endpoint writes what choices give. Choice is the entry in "choices".
type form[Choice any] struct {
	prefix string // of ids
	object string // of a whole answer
	chunk  string // of a chunk
	begin  func(i int) (Choice, bool)
	piece  func(i int, p piece) Choice
	end    func(i int, finish string) Choice
	whole  func(i int, p piece, finish string) Choice
}

// answerChoices runs the choices of a request, all at once, and sends what they give in one of two ways.
func answerChoices[Choice any](d *deps, x *exchange, a *ask, model *served, choices []*choice, f form[Choice]) error {
	head := answer[Choice]{ID: f.prefix + x.id, Object: f.object, Created: time.Now().Unix(), Model: model.info.Name,
		Fingerprint: model.fingerprint()}
	if a.stream {
		head.Object = f.chunk
		return streamChoices(d, x, a, head, choices, f)
	}
	pieces := make([]collected, len(choices))
	outcomes, err := runAll(d, x, choices, func(i int, p piece) error {
		pieces[i].add(p)
		return nil
	}, func(int, outcome) error { return nil })
	if err != nil {
		return err
	}
	head.Choices = make([]Choice, len(choices))
	for i := range choices {
		head.Choices[i] = f.whole(i, pieces[i].whole(), outcomes[i].finish)
	}
	head.Usage = sum(x, outcomes, int(a.n))
	return x.json(http.StatusOK, head)
}

func streamChoices[Choice any](d *deps, x *exchange, a *ask, head answer[Choice], choices []*choice,
	f form[Choice]) error {
	e := newEvents(x, false)
	defer e.end()
	send := func(choice Choice) error {
		chunk := head
		chunk.Choices = []Choice{choice}
		return e.send(chunk)
	}
	begun := make([]bool, len(choices)) // each by its choice's goroutine only
	begin := func(i int) error {
		first, any := f.begin(i)
		if !any || begun[i] {
			return nil
		}
		begun[i] = true
		return send(first)
	}
	outcomes, err := runAll(d, x, choices, func(i int, p piece) error {
		if err := begin(i); err != nil {
			return err
		}
		return send(f.piece(i, p))
	}, func(i int, o outcome) error {
		if err := begin(i); err != nil {
			return err
		}
		return send(f.end(i, o.finish))
	})
	if err != nil {
		return e.fail(err)
	}
	total := sum(x, outcomes, int(a.n))
	if a.usage {
		head.Choices, head.Usage = []Choice{}, total
		if err := e.send(head); err != nil {
			return err
		}
	}
	return e.finish()
}

// runAll runs choices side by side until all have ended; the first error ends the others. What a choice gives goes to
// emit, and its outcome to ended, on the choice's goroutine.
func runAll(d *deps, x *exchange, choices []*choice, emit func(int, piece) error,
	ended func(int, outcome) error) ([]outcome, error) {
	ctx, cancel := context.WithCancel(x.r.Context())
	defer cancel()
	outcomes := make([]outcome, len(choices))
	var first, failed sync.Once
	var failure error
	run := func(i int) {
		var err error
		outcomes[i], err = choices[i].run(ctx, d.client, func(p piece) error {
			first.Do(func() { x.first = time.Since(x.start) })
			return emit(i, p)
		})
		if err == nil {
			err = ended(i, outcomes[i])
		}
		if err != nil {
			failed.Do(func() { failure = err }) // what follows from it is not the reason
			cancel()
		}
	}
	var others sync.WaitGroup
	for i := 1; i < len(choices); i++ {
		others.Go(func() { run(i) })
	}
	run(0)
	others.Wait()
	return outcomes, failure
}

// sum is the usage of a request: a prompt counts once, however many choices it has.
func sum(x *exchange, outcomes []outcome, n int) *usage {
	var total colibri.Usage
	finish := make([]string, len(outcomes))
	for i, o := range outcomes {
		if i%n == 0 {
			total.Prompt += o.usage.Prompt
			total.Cached += o.usage.Cached
		}
		total.Generated += o.usage.Generated
		finish[i] = o.finish
	}
	x.count(total)
	x.note(slog.String("finish", strings.Join(finish, ",")))
	return &usage{total.Prompt, total.Generated, total.Prompt + total.Generated, usageDetails{total.Cached}}
}

// collected joins pieces.
type collected struct {
	text   strings.Builder
	tokens []scored
}

func (c *collected) add(p piece) {
	c.text.WriteString(p.text)
	c.tokens = append(c.tokens, p.tokens...)
}

func (c *collected) whole() piece { return piece{c.text.String(), c.tokens} }
