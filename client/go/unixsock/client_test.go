package unixsock

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	colibri "colibri/client/go"
)

func TestQuestions(t *testing.T) {
	c := quick(t, serve(t, greeting(func(p *peer) {
		_, id := expect[*colibri.Health](p)
		p.send(&colibri.HealthReply{Live: true, Ready: true, State: "ready"}, id)
		_, id = expect[*colibri.Stats](p)
		p.send(&colibri.StatsReply{Counters: map[string]float64{"a": 1}}, id)
		check, id := expect[*colibri.TokenCheck](p)
		want(t, check.Tokens, colibri.TokenIDs{1, 2})
		p.send(&colibri.TokenCheckReply{PromptTokens: 2, MaxTokens: 9, Slabs: 1}, id)
		p.gone()
	})))
	health, err := c.Health(t.Context())
	want(t, []any{err, health.State}, []any{nil, "ready"})
	stats, err := c.Stats(t.Context())
	want(t, []any{err, stats.Counters["a"]}, []any{nil, 1.0})
	check := colibri.NewTokenCheck()
	check.Tokens = colibri.TokenIDs{1, 2}
	reply, err := c.Check(t.Context(), &check)
	want(t, []any{err, reply.MaxTokens}, []any{nil, uint64(9)})
}

func TestAQuestionGetsAnotherAnswer(t *testing.T) {
	c := quick(t, serve(t, greeting(func(p *peer) {
		_, id := expect[*colibri.Health](p)
		p.send(&colibri.StatsReply{}, id)
		p.gone()
	})))
	_, err := c.Health(t.Context())
	wantText(t, err, "StatsReply in answer to Health")
}

// Frames of a lost connection do not count twice.
func TestScoresAreGathered(t *testing.T) {
	frame := func(p *peer, id, index uint64, logprob float32) {
		p.send(&colibri.Scores{Index: index, Logprobs: colibri.Floats{logprob}}, id)
	}
	c := quick(t, serve(t, greeting(func(p *peer) {
		_, id := expect[*colibri.Score](p)
		frame(p, id, 2, -1)
	}), greeting(func(p *peer) {
		score, id := expect[*colibri.Score](p)
		want(t, score.Start, uint64(2))
		frame(p, id, 2, -1)
		frame(p, id, 3, -2)
		p.send(&colibri.Done{FinishReason: "length", Usage: colibri.Usage{Prompt: 4}}, id)
		_, id = expect[*colibri.Score](p)
		frame(p, id, 1, -1)
		p.gone()
	})))
	score := colibri.NewScore()
	score.Tokens, score.Start = colibri.TokenIDs{1, 2, 3, 4}, 2
	result, err := c.Score(t.Context(), &score)
	if err != nil {
		t.Fatal(err)
	}
	want(t, []any{result.From, result.Logprobs}, []any{uint64(2), colibri.Floats{-1, -2}})
	want(t, result.Done.Usage.Prompt, uint64(4))
	_, err = c.Score(t.Context(), &score)
	wantText(t, err, "position 1; 2 is next")
}

func TestTheModelIsTheNewest(t *testing.T) {
	c := quick(t, serve(t, greeting(func(p *peer) {
		_, id := expect[*colibri.Health](p)
		second := colibri.NewModel()
		second.Model = tiny
		second.Model.ID = "second"
		p.send(&second, 0)
		p.send(&colibri.HealthReply{State: "ready"}, id)
		p.gone()
	})))
	model, err := c.Model(t.Context()) // connects
	want(t, []any{err, model.ID}, []any{nil, "id"})
	_, err = c.Health(t.Context())
	want(t, err, nil)
	model, err = c.Model(t.Context())
	want(t, []any{err, model.ID}, []any{nil, "second"})
}

func TestCloseEndsWhatIsLive(t *testing.T) {
	c := quick(t, serve(t, greeting(func(p *peer) {
		_, id := expect[*colibri.Generate](p)
		p.tokens(id, 0, 7)
		p.gone()
	}, requests(1))))
	stream := begin(t, c, prompt(1))
	_, err := stream.Next()
	want(t, err, nil)
	waits := make(chan error)
	go func() {
		_, err := c.Generate(context.Background(), prompt(2))
		waits <- err
	}()
	soon(t, "the second waits for room", func() bool { return c.waiting() == 1 })
	want(t, c.Close(), nil)
	_, err = stream.Next()
	want(t, []error{err, <-waits, c.Close()}, []error{colibri.ErrClosed, colibri.ErrClosed, nil})
	_, err = c.Health(t.Context())
	want(t, err, colibri.ErrClosed)
}

func TestClosedWhileItConnects(t *testing.T) {
	connected := make(chan struct{})
	c := quick(t, serve(t, func(p *peer) { // does not greet
		expect[*colibri.Hello](p)
		close(connected)
		p.gone()
	}))
	failed := make(chan error)
	go func() {
		_, err := c.Generate(context.Background(), prompt(1))
		failed <- err
	}()
	<-connected
	c.Close()
	want(t, <-failed, colibri.ErrClosed)
}

func TestWhyThereIsNoConnection(t *testing.T) {
	leaveNothing(t)
	folder := t.TempDir()
	file, stale := filepath.Join(folder, "file"), filepath.Join(folder, "stale")
	want(t, os.WriteFile(file, nil, 0o600), nil)
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale, Net: "unix"})
	want(t, err, nil)
	listener.SetUnlinkOnClose(false)
	listener.Close()
	for path, says := range map[string]string{
		filepath.Join(folder, "none"): "is the daemon running",
		filepath.Join(file, "none"):   "is the daemon running",
		file:                          "nobody listens here",
		stale:                         "nobody listens here",
	} {
		_, err := quick(t, path).Health(t.Context())
		var failed *colibri.ConnectionError
		want(t, errors.As(err, &failed), true)
		wantText(t, err, path+": ")
		wantText(t, err, says)
	}
}

func TestTheHandshakeFails(t *testing.T) {
	refusal := colibri.Error{Code: uint64(colibri.CodeVersion), Message: "too old"}
	for says, script := range map[string]script{
		"too old":              func(p *peer) { expect[*colibri.Hello](p); p.send(&refusal, 0); p.gone() },
		"before it said":       func(p *peer) { expect[*colibri.Hello](p) },
		"no answer within":     hold,
		"Done in answer to":    func(p *peer) { expect[*colibri.Hello](p); p.done(1, "stop"); p.gone() },
		"must be an integer":   func(p *peer) { expect[*colibri.Hello](p); p.conn.Write(badWelcome); p.gone() },
		"a frame of 926167328": func(p *peer) { p.conn.Write([]byte("741 0 HTTP/1.1")); hold(p) },
	} {
		c := quick(t, serve(t, script), WithConnectTimeout(100*time.Millisecond))
		_, err := c.Health(t.Context())
		wantText(t, err, says)
	}
}

var badWelcome = []byte{0, 0, 0, 11, 0x93, 2, 0, 0x81, 0xa5, 'p', 'r', 'o', 't', 'o', 0xc0}

// Refusals of a connection that may pass are waited for.
func TestTooManyConnections(t *testing.T) {
	full := func(p *peer) {
		expect[*colibri.Hello](p)
		p.send(&colibri.Error{Code: uint64(colibri.CodeTooManyConnections), Message: "full", Retryable: true}, 0)
		p.gone()
	}
	c := quick(t, serve(t, full, full, full, greeting(echo), full))
	want(t, outcome(begin(t, c, prompt(7))), "[7] stop")
	_, err := quick(t, c.pool.path).Generate(t.Context(), prompt(1))
	want(t, codeOf(err), colibri.CodeTooManyConnections)
}

// After a daemon that was there, one that is not is waited for, but not for ever, and then not again.
func TestADaemonThatComesBack(t *testing.T) {
	path := serve(t, greeting(func(p *peer) { expect[*colibri.Generate](p) }), greeting(echo))
	c := quick(t, path, WithReconnect(patience))
	aside := path + ".aside"
	want(t, os.Rename(path, aside), nil)
	_, err := c.Health(t.Context())
	wantText(t, err, "is the daemon running")
	want(t, os.Rename(aside, path), nil)
	stream := begin(t, c, prompt(7))
	want(t, os.Rename(path, aside), nil)
	result := make(chan string)
	go func() { result <- outcome(stream) }()
	soon(t, "the connection is lost", func() bool { return c.connections() == 0 })
	want(t, os.Rename(aside, path), nil)
	want(t, <-result, "[7] stop")
}

func TestADaemonThatDoesNotComeBack(t *testing.T) {
	path := serve(t, greeting(func(p *peer) { expect[*colibri.Generate](p) }))
	c := quick(t, path, WithReconnect(30*time.Millisecond))
	stream := begin(t, c, prompt(7))
	want(t, os.Remove(path), nil)
	_, err := readAll(stream)
	wantText(t, err, "and no new one could be made: "+path)
	began := time.Now()
	_, err = c.Health(t.Context())
	wantText(t, err, "is the daemon running")
	t.Logf("the next one failed after %v", time.Since(began))
}

func TestThePolicy(t *testing.T) {
	p := policy{retries: 3, reconnect: 10 * time.Second, base: 100 * time.Millisecond, most: 5 * time.Second,
		chance: func() float64 { return 1 }}
	for attempt, ms := range map[int]time.Duration{1: 100, 2: 200, 3: 400, 7: 5000, 100: 5000} {
		want(t, p.delay(attempt, 0), ms*time.Millisecond)
	}
	want(t, p.delay(1, time.Second), 1100*time.Millisecond)
	p.chance = func() float64 { return 0 }
	want(t, p.delay(1, 0), 50*time.Millisecond)
	for _, row := range []struct {
		losses  int
		lostFor time.Duration
		delay   time.Duration
		again   bool
	}{{1, 0, 0, true}, {2, 0, 50 * time.Millisecond, true}, {2, 9990 * time.Millisecond, 10 * time.Millisecond, true},
		{1, 11 * time.Second, 0, false}} {
		delay, again := p.reconnectAfter(row.losses, row.lostFor)
		want(t, []any{delay, again}, []any{row.delay, row.again})
	}
}

func TestWithinTheDeadline(t *testing.T) {
	rows := [][3]uint64{{300000, 200, 300000}, {300000, 400, 299600}, {100, 1, 99}, {100, 100, 1}, {100, 999, 1}}
	for _, row := range rows {
		want(t, within(row[0], time.Duration(row[1])*time.Millisecond), row[2])
	}
}
