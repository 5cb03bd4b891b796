package unixsock

import (
	"context"
	"errors"
	"testing"
	"time"

	colibri "colibri/client/go"
)

// refuse answers so many requests with an error.
func refuse(n int, refusal colibri.Error) func(p *peer) {
	return func(p *peer) {
		for range n {
			_, id := expect[*colibri.Generate](p)
			p.send(&refusal, id)
		}
	}
}

func TestWhatMayPassIsTriedAgain(t *testing.T) {
	afterMS := uint64(30)
	c := quick(t, serve(t, greeting(func(p *peer) {
		refuse(3, colibri.Error{Code: uint64(colibri.CodeQueueFull), Retryable: true, RetryAfterMS: &afterMS})(p)
		_, id := expect[*colibri.Generate](p)
		p.tokens(id, 0, 7)
		p.done(id, "stop")
		p.gone()
	})))
	began := time.Now()
	want(t, outcome(begin(t, c, prompt(1))), "[7] stop")
	if took := time.Since(began); took < 90*time.Millisecond {
		t.Errorf("three times 30 ms were to be waited; it took %v", took)
	}
}

func TestWhatGoesOnIsTriedThreeTimes(t *testing.T) {
	c := quick(t, serve(t, greeting(func(p *peer) {
		refuse(4, colibri.Error{Code: uint64(colibri.CodeQueueFull), Message: "full", Retryable: true})(p)
		p.gone()
	})))
	_, err := readAll(begin(t, c, prompt(1)))
	want(t, codeOf(err), colibri.CodeQueueFull)
}

func TestWhatIsWrongIsNotTriedAgain(t *testing.T) {
	field, index := "tokens", uint64(1)
	c := quick(t, serve(t, greeting(func(p *peer) {
		refuse(1, colibri.Error{Code: uint64(colibri.CodeTokenOutOfRange), Message: "no", Field: &field, Index: &index})(p)
		p.gone()
	})))
	_, err := readAll(begin(t, c, prompt(1)))
	var refusal *colibri.Error
	if !errors.As(err, &refusal) {
		t.Fatal(err)
	}
	want(t, []any{refusal.Error(), *refusal.Field, *refusal.Index, refusal.RetryAfter()},
		[]any{"TOKEN_OUT_OF_RANGE: no", "tokens", uint64(1), time.Duration(0)})
}

// A refusal in mid-stream that may pass: on, with what has come.
func TestRefusedInMidStream(t *testing.T) {
	c := quick(t, serve(t, greeting(func(p *peer) {
		_, id := expect[*colibri.Generate](p)
		p.tokens(id, 0, 7)
		p.send(&colibri.Error{Code: uint64(colibri.CodeKVExhausted), Retryable: true, TokensSent: 1}, id)
		g, id := expect[*colibri.Generate](p)
		want(t, g.Resume.Tokens, colibri.TokenIDs{7})
		p.tokens(id, 1, 8)
		p.done(id, "stop")
		p.gone()
	})))
	want(t, outcome(begin(t, c, prompt(1))), "[7 8] stop")
}

// The daemon that drains does not say that it is retryable, but whoever takes its place may take the request.
func TestDrainingIsTriedElsewhere(t *testing.T) {
	draining := colibri.Error{Code: uint64(colibri.CodeDraining), Message: "bye"}
	c := quick(t, serve(t, greeting(func(p *peer) {
		refuse(1, draining)(p)
		expect[*colibri.Bye](p)
		p.gone()
	}), greeting(func(p *peer) {
		p.send(&colibri.GoAway{Reason: "drain"}, 0)
		for m, id := p.next(); m != nil; m, id = p.next() {
			if _, ok := m.(*colibri.Generate); ok { // it may have crossed
				p.send(&draining, id)
			}
		}
	}), greeting(func(p *peer) {
		_, id := expect[*colibri.Generate](p)
		p.done(id, "stop")
		p.gone()
	})))
	want(t, outcome(begin(t, c, prompt(1))), "[] stop")
}

func TestOnlyDaemonsThatDrain(t *testing.T) {
	c := quick(t, serve(t, greeting(func(p *peer) {
		p.send(&colibri.GoAway{Reason: "drain"}, 0)
		for m, id := p.next(); m != nil; m, id = p.next() {
			if _, ok := m.(*colibri.Generate); ok {
				p.send(&colibri.Error{Code: uint64(colibri.CodeDraining), Message: "bye"}, id)
			}
		}
	})))
	stream, err := c.Generate(t.Context(), prompt(1))
	if err == nil {
		_, err = readAll(stream)
	}
	want(t, codeOf(err), colibri.CodeDraining)
}

func TestTooManyTokensForAFrame(t *testing.T) {
	c := quick(t, serve(t, greeting((*peer).gone, func(w *colibri.Welcome) { w.Limits.Frame = 1000 })))
	_, err := c.Generate(t.Context(), prompt(make([]uint32, 300)...))
	want(t, codeOf(err), colibri.CodeInvalidArgument)
	wantText(t, err, "give fewer tokens")
}

// Requests beyond the daemon's limit wait for their turn, in order; one whose context ends leaves the queue.
func TestRequestsWaitForRoom(t *testing.T) {
	finish := make(chan struct{})
	c := quick(t, serve(t, greeting(func(p *peer) {
		for token := range uint32(3) {
			g, id := expect[*colibri.Generate](p)
			want(t, g.Tokens[0], token)
			<-finish
			p.done(id, "stop")
		}
		p.gone()
	}, requests(1))))
	first := begin(t, c, prompt(0))
	results := make(chan string, 2)
	for token := range uint32(2) {
		go func() {
			stream, err := c.Generate(context.Background(), prompt(1+token))
			if err != nil {
				results <- err.Error()
				return
			}
			results <- outcome(stream)
		}()
		soon(t, "it waits", func() bool { return c.waiting() == 1+int(token) })
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
	defer cancel()
	_, err := c.Generate(ctx, prompt(9))
	want(t, err, context.DeadlineExceeded)
	want(t, c.waiting(), 2)
	health := make(chan error)
	go func() { // questions need no room; this script does not answer
		ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
		defer cancel()
		_, err := c.Model(ctx)
		health <- err
	}()
	want(t, <-health, nil)
	close(finish)
	want(t, outcome(first), "[] stop")
	want(t, []string{<-results, <-results}, []string{"[] stop", "[] stop"})
}

func (c *Client) waiting() int {
	c.pool.mu.Lock()
	defer c.pool.mu.Unlock()
	return len(c.pool.waiting)
}

func (c *Client) connections() int {
	c.pool.mu.Lock()
	defer c.pool.mu.Unlock()
	return len(c.pool.links)
}

// echo answers every request with its prompt.
func echo(p *peer) {
	for m, id := p.next(); m != nil; m, id = p.next() {
		if g, ok := m.(*colibri.Generate); ok {
			p.tokens(id, 0, g.Tokens...)
			p.done(id, "stop")
		}
	}
}

// hold answers nothing.
func hold(p *peer) {
	for m, _ := p.next(); m != nil; m, _ = p.next() {
	}
}

func TestConnectionsAreMadeOnDemand(t *testing.T) {
	c := quick(t, serve(t, greeting(hold, requests(1<<20))), WithConnections(3))
	want(t, c.connections(), 0)
	begin(t, c, prompt(1))
	want(t, c.connections(), 1)
	soon(t, "there are three", func() bool {
		begin(t, c, prompt(1))
		return c.connections() == 3
	})
	begin(t, c, prompt(1))
	want(t, c.connections(), 3)
}

func TestASecondConnectionIsNotNeeded(t *testing.T) {
	c := quick(t, serve(t, greeting(echo), func(p *peer) {
		if hello, _ := p.next(); hello == nil { // the test is over
			return
		}
		p.send(&colibri.Error{Code: uint64(colibri.CodeTooManyConnections), Message: "no", Retryable: true}, 0)
		p.gone()
	}), WithConnections(2))
	for range 20 {
		first, second := begin(t, c, prompt(7)), begin(t, c, prompt(8))
		want(t, []string{outcome(first), outcome(second)}, []string{"[7] stop", "[8] stop"})
	}
	want(t, c.connections(), 1)
}
