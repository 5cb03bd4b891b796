package unixsock

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	colibri "colibri/client/go"
)

func TestAStreamIsReadToItsEnd(t *testing.T) {
	c := quick(t, serve(t, greeting(func(p *peer) {
		g, id := expect[*colibri.Generate](p)
		want(t, []any{g.Tokens, g.MaxTokens, *g.Tenant}, []any{colibri.TokenIDs{1, 2}, uint64(5), "a"})
		p.tokens(id, 0, 7)
		p.tokens(id, 1, 8, 9)
		p.done(id, "stop")
		p.gone()
	})))
	tenant := "a"
	g := prompt(1, 2)
	g.MaxTokens, g.Tenant = 5, &tenant
	stream := begin(t, c, g)
	want(t, []any{stream.Done() == nil, stream.Prompt() == nil}, []any{true, true})
	want(t, outcome(stream), "[7 8 9] stop")
	_, err := stream.Next()
	want(t, err, io.EOF)
}

func TestFramesMayBeSplitAnywhere(t *testing.T) {
	c := quick(t, serve(t, func(p *peer) {
		expect[*colibri.Hello](p)
		w := colibri.NewWelcome()
		w.Proto, w.Server, w.Model, w.Limits.Frame, w.Limits.Requests = 1, "s", tiny, 1<<20, 1
		for _, b := range colibri.Encode(&w, 0) {
			p.conn.Write([]byte{b})
		}
		_, id := expect[*colibri.Generate](p)
		rest := colibri.Append(colibri.Encode(&colibri.TokensOut{IDs: colibri.TokenIDs{7, 8}}, id),
			&colibri.Done{FinishReason: "length"}, id)
		for _, b := range rest {
			p.conn.Write([]byte{b})
		}
		p.gone()
	}))
	want(t, outcome(begin(t, c, prompt(1))), "[7 8] length")
}

func TestPromptScoresComeFirst(t *testing.T) {
	c := quick(t, serve(t, greeting(func(p *peer) {
		_, id := expect[*colibri.Generate](p)
		p.send(&colibri.Scores{Index: 1, Logprobs: colibri.Floats{-1}, TopIDs: colibri.TokenIDs{4},
			TopLogprobs: colibri.Floats{-0.5}}, id)
		p.send(&colibri.Scores{Index: 2, Logprobs: colibri.Floats{-2}, TopIDs: colibri.TokenIDs{5},
			TopLogprobs: colibri.Floats{-0.25}}, id)
		p.tokens(id, 0, 7)
		p.done(id, "length")
		p.gone()
	})))
	top := uint64(1)
	g := prompt(1, 2, 3)
	g.PromptLogprobs = &top
	stream := begin(t, c, g)
	want(t, outcome(stream), "[7] length")
	want(t, *stream.Prompt(), colibri.ScoreResult{From: 1, Logprobs: colibri.Floats{-1, -2},
		TopIDs: colibri.TokenIDs{4, 5}, TopLogprobs: colibri.Floats{-0.5, -0.25}})
}

func TestCreditIsGrantedAsTheReaderReads(t *testing.T) {
	const window, total = 8, 40
	sent := make(chan int, total) // tokens that the daemon was allowed to send
	c := quick(t, serve(t, greeting(func(p *peer) {
		_, id := expect[*colibri.Generate](p)
		index := uint64(0)
		for allowed := uint64(window); index < total; {
			for ; index < min(allowed, total); index++ {
				p.tokens(id, index, uint32(index))
			}
			sent <- int(index)
			if index < total {
				more, _ := expect[*colibri.Credit](p)
				allowed += more.Tokens
			}
		}
		p.done(id, "length")
		for m, _ := p.next(); m != nil; m, _ = p.next() { // credit for what it read last
		}
	}, credit(window))))
	stream := begin(t, c, prompt(1))
	want(t, <-sent, window)
	ids := 0
	for chunk, err := range stream.All() {
		if err != nil {
			t.Fatal(err)
		}
		if ids += len(chunk.IDs); ids%(window/2) == 0 && ids < total-window {
			want(t, <-sent, ids+window) // half of the window was read, and only now comes more
		} else if len(sent) > 0 && ids < total-window {
			t.Errorf("%d tokens sent when %d were read", <-sent, ids)
		}
	}
	want(t, []any{ids, stream.Done().FinishReason}, []any{total, "length"})
}

// A daemon that is stuck holds up neither the end of a context nor that of the client.
func TestADaemonThatDoesNotRead(t *testing.T) {
	over := make(chan struct{})
	c := quick(t, serve(t, greeting(func(p *peer) { <-over })))
	ctx, cancel := context.WithCancel(t.Context())
	var streams []*colibri.Stream
	for range 8 { // more than a socket holds
		stream, err := c.Generate(ctx, prompt(make([]uint32, 200_000)...))
		want(t, err, nil)
		streams = append(streams, stream)
	}
	cancel()
	for _, stream := range streams {
		_, err := stream.Next()
		want(t, err, context.Canceled)
	}
	c.Close()
	close(over)
}

func TestPingsAreAnswered(t *testing.T) {
	c := quick(t, serve(t, greeting(func(p *peer) {
		_, id := expect[*colibri.Generate](p)
		p.send(&colibri.Ping{Data: []byte("abc")}, 0)
		pong, _ := expect[*colibri.Pong](p)
		want(t, string(pong.Data), "abc")
		p.done(id, "stop")
		p.gone()
	})))
	want(t, outcome(begin(t, c, prompt(1))), "[] stop")
}

// A daemon that owes an answer and says nothing is asked; one that does not even answer that is given up.
func TestASilentDaemonIsGivenUp(t *testing.T) {
	c := quick(t, serve(t, greeting(func(p *peer) {
		_, id := expect[*colibri.Generate](p)
		p.tokens(id, 0, 7)
		for range pingsUnanswered {
			expect[*colibri.Ping](p)
		}
		p.gone()
	}), greeting(func(p *peer) {
		_, id := expect[*colibri.Generate](p)
		for range 2 * pingsUnanswered { // this one answers
			ping, about := expect[*colibri.Ping](p)
			p.send(&colibri.Pong{Data: ping.Data}, about)
		}
		p.tokens(id, 1, 8)
		p.done(id, "length")
		p.gone()
	})), func(s *settings) { s.ping = 5 * time.Millisecond })
	want(t, outcome(begin(t, c, prompt(1))), "[7 8] length")
}

func TestWhatTheDaemonMayNotSend(t *testing.T) {
	rows := map[string]struct {
		send func(p *peer, id uint64)
		says string
	}{
		"a gap":        {func(p *peer, id uint64) { p.tokens(id, 1, 7) }, "TOKENS of index 1; 0 is next"},
		"a doubled":    {func(p *peer, id uint64) { p.tokens(id, 0, 7); p.tokens(id, 0, 7) }, "TOKENS of index 0; 1 is next"},
		"another id":   {func(p *peer, id uint64) { p.tokens(id+1, 0, 7) }, "request 2, which is not live"},
		"an answer":    {func(p *peer, id uint64) { p.send(&colibri.StatsReply{}, id) }, "StatsReply in answer to GENERATE"},
		"no request":   {func(p *peer, id uint64) { p.done(0, "stop") }, "Done without a request"},
		"a huge frame": {func(p *peer, id uint64) { p.conn.Write([]byte{0xff, 0xff, 0xff, 0xff}) }, "a frame of 4294967295"},
		"no message":   {func(p *peer, id uint64) { p.conn.Write([]byte{0, 0, 0, 1, 0xc1}) }, "0xc1"},
		"a bad field": {func(p *peer, id uint64) { p.conn.Write([]byte{0, 0, 0, 4, 0x93, 6, byte(id), 0x80}) },
			"finish_reason is missing"},
		"uneven alternatives": {func(p *peer, id uint64) {
			p.send(&colibri.TokensOut{IDs: colibri.TokenIDs{1, 2}, TopIDs: colibri.TokenIDs{1},
				TopLogprobs: colibri.Floats{0}}, id)
		}, "1 alternatives with 1 log probabilities for 2 tokens"},
		"scores of elsewhere": {func(p *peer, id uint64) { p.send(&colibri.Scores{Index: 5}, id) }, "position 5; 1 is next"},
	}
	for name, row := range rows {
		t.Run(name, func(t *testing.T) {
			c := quick(t, serve(t, greeting(func(p *peer) {
				_, id := expect[*colibri.Generate](p)
				row.send(p, id)
				p.gone()
			})))
			_, err := readAll(begin(t, c, prompt(1)))
			var problem *colibri.ProtocolError
			if !errors.As(err, &problem) {
				t.Fatalf("%v", err)
			}
			wantText(t, err, row.says)
		})
	}
}
