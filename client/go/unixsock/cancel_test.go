package unixsock

import (
	"context"
	"testing"
	"time"

	colibri "colibri/client/go"
)

func TestAContextThatEndsCancelsAtOnce(t *testing.T) {
	cancelled := make(chan time.Time, 1)
	c := quick(t, serve(t, greeting(func(p *peer) {
		_, id := expect[*colibri.Generate](p)
		p.tokens(id, 0, 7)
		_, which := expect[*colibri.Cancel](p)
		cancelled <- time.Now()
		want(t, which, id)
		p.tokens(id, 1, 8) // crosses CANCEL; nobody reads it
		p.done(id, "abort")
		_, id = expect[*colibri.Generate](p)
		p.done(id, "stop")
		p.gone()
	}, requests(1))))
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := c.Generate(ctx, prompt(1))
	want(t, err, nil)
	_, err = stream.Next()
	want(t, err, nil)
	began := time.Now()
	cancel()
	_, err = stream.Next()
	want(t, err, context.Canceled)
	t.Logf("CANCEL came after %v", (<-cancelled).Sub(began))
	want(t, stream.Done() == nil, true)
	want(t, outcome(begin(t, c, prompt(1))), "[] stop")
}

// A reader that sees the end of its context before the watch has run ends the request, and the watch with it.
func TestAContextWhoseEndTheReaderSeesFirstCancelsToo(t *testing.T) {
	c := quick(t, serve(t, greeting(func(p *peer) {
		expect[*colibri.Generate](p)
		expect[*colibri.Cancel](p)
		p.gone()
	})))
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := c.Generate(ctx, prompt(1))
	want(t, err, nil)
	stream.Reader.(*output).unwatch()
	cancel()
	_, err = stream.Next()
	want(t, err, context.Canceled)
}

func TestCancelledBeforeItsFirstTokenAndUnread(t *testing.T) {
	heard := make(chan struct{})
	c := quick(t, serve(t, greeting(func(p *peer) {
		_, id := expect[*colibri.Generate](p)
		expect[*colibri.Cancel](p)
		p.done(id, "abort")
		close(heard)
		p.gone()
	})))
	ctx, cancel := context.WithCancel(t.Context())
	_, err := c.Generate(ctx, prompt(1))
	want(t, err, nil)
	cancel() // and nobody is in Next
	<-heard
}

func TestLeavingALoopCancels(t *testing.T) {
	heard := make(chan struct{})
	c := quick(t, serve(t, greeting(func(p *peer) {
		_, id := expect[*colibri.Generate](p)
		p.tokens(id, 0, 7, 8)
		expect[*colibri.Cancel](p)
		p.done(id, "abort")
		close(heard)
		p.gone()
	})))
	for chunk, err := range begin(t, c, prompt(1)).All() {
		want(t, []any{chunk.IDs, err}, []any{colibri.TokenIDs{7, 8}, nil})
		break
	}
	<-heard
}

func TestCancelledByItsReaderAStreamStillSaysHowItEnded(t *testing.T) {
	c := quick(t, serve(t, greeting(func(p *peer) {
		_, id := expect[*colibri.Generate](p)
		p.tokens(id, 0, 7)
		cancel, _ := expect[*colibri.Cancel](p)
		want(t, cancel.Reason, "stop string")
		p.tokens(id, 1, 8)
		p.send(&colibri.Done{FinishReason: "abort", Usage: colibri.Usage{Prompt: 1, Generated: 2}}, id)
		p.gone()
	})))
	stream := begin(t, c, prompt(1))
	_, err := stream.Next()
	want(t, err, nil)
	stream.Cancel("stop string")
	stream.Cancel("is sent once")
	want(t, outcome(stream), "[8] abort")
	want(t, stream.Done().Usage.Generated, uint64(2))
}

func TestCancelledByItsReaderAndLost(t *testing.T) {
	c := quick(t, serve(t, greeting(func(p *peer) {
		_, id := expect[*colibri.Generate](p)
		p.tokens(id, 0, 7, 8)
		expect[*colibri.Cancel](p)
	})))
	stream := begin(t, c, prompt(1, 2, 3))
	_, err := stream.Next()
	want(t, err, nil)
	stream.Cancel("")
	want(t, outcome(stream), "[] abort")
	want(t, stream.Done().Usage, colibri.Usage{Prompt: 3, Generated: 2})
}
