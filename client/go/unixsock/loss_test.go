package unixsock

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	colibri "colibri/client/go"
)

func wantText(t testing.TB, err error, part string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), part) {
		t.Errorf("%v; it does not say %q", err, part)
	}
}

// lose sends tokens of the first request and breaks the connection, in the middle of a frame if that is asked for.
func lose(cut int, index uint64, ids ...uint32) script {
	return greeting(func(p *peer) {
		_, id := expect[*colibri.Generate](p)
		p.tokens(id, index, ids...)
		p.conn.Write(colibri.Encode(&colibri.TokensOut{IDs: colibri.TokenIDs{99}}, id)[:cut])
	})
}

func TestALostStreamGoesOnWhereItStopped(t *testing.T) {
	for _, cut := range []int{0, 2, 4, 9} {
		c := quick(t, serve(t, lose(cut, 0, 7, 8), lose(cut, 2, 9), greeting(func(p *peer) {
			g, id := expect[*colibri.Generate](p)
			want(t, g.Resume.Tokens, colibri.TokenIDs{7, 8, 9})
			want(t, []any{g.Resume.Seed, *g.Seed}, []any{uint64(5), uint64(5)})
			want(t, g.Resume.Receipt, made(tiny, 5))
			want(t, []any{g.MaxTokens, g.PromptLogprobs == nil}, []any{uint64(256), true})
			p.tokens(id, 3, 10)
			p.done(id, "stop")
			p.gone()
		})))
		g, seed, scored := prompt(1), uint64(5), uint64(0)
		g.Seed, g.Temperature, g.PromptLogprobs = &seed, 1, &scored
		want(t, outcome(begin(t, c, g)), "[7 8 9 10] stop")
	}
}

func TestASeedIsDrawnWhereOneMatters(t *testing.T) {
	seeds := make(chan uint64, 2)
	collect := func(more bool) script {
		return greeting(func(p *peer) {
			g, id := expect[*colibri.Generate](p)
			seeds <- *g.Seed
			if more {
				p.tokens(id, 0, 7)
				return
			}
			want(t, g.Resume.Seed, *g.Seed)
			p.done(id, "stop")
			p.gone()
		})
	}
	c := quick(t, serve(t, collect(true), collect(false)))
	g := prompt(1)
	g.Temperature = 1
	want(t, outcome(begin(t, c, g)), "[7] stop")
	first, second := <-seeds, <-seeds
	want(t, []any{first == second, g.Seed == nil}, []any{true, true})
}

// What the caller resumed from is not given again, and is part of what a second loss resumes from.
func TestResumedByTheCallerAndLost(t *testing.T) {
	c := quick(t, serve(t, lose(0, 2, 9), greeting(func(p *peer) {
		g, id := expect[*colibri.Generate](p)
		want(t, []any{g.Resume.Tokens, g.Resume.Seed, *g.Seed}, []any{colibri.TokenIDs{7, 8, 9}, uint64(5), uint64(5)})
		p.tokens(id, 3, 10)
		p.done(id, "stop")
		p.gone()
	})))
	g := prompt(1)
	g.Temperature, g.Resume = 1, &colibri.Resume{Tokens: colibri.TokenIDs{7, 8}, Seed: 5}
	want(t, outcome(begin(t, c, g)), "[9 10] stop")
}

// made is what a resume says of its tokens.
func made(by colibri.ModelInfo, seed uint64) *colibri.Receipt {
	return &colibri.Receipt{ModelID: by.ID, Fingerprint: by.Fingerprint, Seed: seed, Pinned: by.Pinned, Window: by.Window,
		Positions: by.Positions, KVFormat: by.KVFormat}
}

// other is a model that differs from tiny in all that a receipt has.
var other = colibri.ModelInfo{Name: "other", ID: "id2", Fingerprint: "fp2", VocabSize: 256, MaxLen: 1 << 20, Block: 64,
	Pinned: 4, Window: 8, Positions: "absolute", KVFormat: "f32"}

func third(w *colibri.Welcome) { w.Model.ID, w.Generation = "id3", 3 }

// Models change after GENERATE, after the first tokens, and before the stream can go on; the daemon may refuse that.
func TestWhoGoesOnSaysWhatMadeTheTokens(t *testing.T) {
	first, second, unknown := uint64(1), uint64(2), uint64(9)
	for name, row := range map[string]struct {
		generation *uint64
		maker      colibri.ModelInfo
	}{"the old": {&first, tiny}, "the new": {&second, other}, "unknown": {&unknown, other}, "not told": {nil, other}} {
		t.Run(name, func(t *testing.T) {
			c := quick(t, serve(t, greeting(func(p *peer) {
				_, id := expect[*colibri.Generate](p)
				p.send(&colibri.Model{Generation: 2, Model: other}, 0)
				p.send(&colibri.TokensOut{IDs: colibri.TokenIDs{7}, Generation: row.generation}, id)
				p.send(&colibri.Model{Generation: 3, Model: tiny}, 0)
				p.tokens(id, 1, 8)
			}, func(w *colibri.Welcome) { w.Generation = 1 }), greeting(func(p *peer) { // goes on, and is lost too
				g, id := expect[*colibri.Generate](p)
				want(t, g.Resume.Receipt, made(row.maker, 5))
				p.tokens(id, 2, 9)
			}, third), greeting(func(p *peer) {
				g, id := expect[*colibri.Generate](p)
				want(t, []any{g.Resume.Tokens, g.Resume.Receipt, g.Model == nil},
					[]any{colibri.TokenIDs{7, 8, 9}, made(row.maker, 5), true})
				p.send(&colibri.Error{Code: uint64(colibri.CodeModelMismatch), Message: "another"}, id)
				p.gone()
			}, third)))
			g, seed := prompt(1), uint64(5)
			g.Seed = &seed
			ids, err := readAll(begin(t, c, g))
			want(t, []any{ids, codeOf(err)}, []any{[]uint32{7, 8, 9}, colibri.CodeModelMismatch})
		})
	}
}

func TestAReceiptGivenByTheCallerIsKept(t *testing.T) {
	receipt := made(other, 5)
	receipt.MaxTokens = 100
	takes := func(token uint32, whole bool) script {
		return greeting(func(p *peer) {
			g, id := expect[*colibri.Generate](p)
			want(t, g.Resume.Receipt, receipt)
			p.tokens(id, uint64(len(g.Resume.Tokens)), token)
			if whole {
				p.done(id, "stop")
				p.gone()
			}
		})
	}
	c := quick(t, serve(t, takes(8, false), takes(9, true)))
	g := prompt(1)
	g.Resume = &colibri.Resume{Tokens: colibri.TokenIDs{7}, Seed: 5, Receipt: receipt}
	want(t, outcome(begin(t, c, g)), "[8 9] stop")
}

// Without tokens there is nothing to go on from: the request is sent as it was, to whatever is served.
func TestLostBeforeItsFirstToken(t *testing.T) {
	c := quick(t, serve(t, greeting(func(p *peer) { expect[*colibri.Generate](p) }), greeting(func(p *peer) {
		g, id := expect[*colibri.Generate](p)
		want(t, []any{g.Resume == nil, g.Model == nil}, []any{true, true})
		p.done(id, "stop")
		p.gone()
	}, third)))
	want(t, outcome(begin(t, c, prompt(1))), "[] stop")
}

func TestALossIsAnErrorIfThatIsAskedFor(t *testing.T) {
	c := quick(t, serve(t, lose(0, 0, 7)), WithReconnect(0))
	ids, err := readAll(begin(t, c, prompt(1)))
	var lost *colibri.ConnectionError
	want(t, []any{ids, errors.As(err, &lost)}, []any{[]uint32{7}, true})
	wantText(t, err, "the daemon closed the connection")
}

// A daemon that loses every connection is given up, after the time for that.
func TestLossesWithoutEnd(t *testing.T) {
	c := quick(t, serve(t, lose(0, 0, 7), greeting(func(p *peer) { expect[*colibri.Generate](p) })),
		WithReconnect(50*time.Millisecond))
	began := time.Now()
	_, err := readAll(begin(t, c, prompt(1)))
	wantText(t, err, "the daemon closed the connection")
	want(t, time.Since(began) >= 50*time.Millisecond, true)
}

func TestTheDeadlineRunsOnOverAttempts(t *testing.T) {
	const pause = 20 * time.Millisecond
	first := make(chan uint64, 1)
	c := quick(t, serve(t, greeting(func(p *peer) {
		g, _ := expect[*colibri.Generate](p)
		first <- g.DeadlineMS
		time.Sleep(pause)
	}), greeting(func(p *peer) {
		g, id := expect[*colibri.Generate](p)
		want(t, g.DeadlineMS <= <-first-uint64(pause.Milliseconds()), true)
		p.done(id, "stop")
		p.gone()
	})))
	g := prompt(1)
	g.DeadlineMS = 1000
	want(t, outcome(begin(t, c, g)), "[] stop")
}

// A daemon that is away is not waited for beyond the deadline, however long it may take to come back.
func TestTheDeadlineBoundsReconnecting(t *testing.T) {
	var path string
	path = serve(t, greeting(func(p *peer) {
		_, id := expect[*colibri.Generate](p)
		p.tokens(id, 0, 7)
		os.Remove(path)
	}))
	c := quick(t, path, WithReconnect(time.Hour))
	g := prompt(1)
	g.DeadlineMS = 100
	ids, err := readAll(begin(t, c, g))
	want(t, ids, []uint32{7})
	want(t, codeOf(err), colibri.CodeDeadlineExceeded)
	wantText(t, err, "; and no connection to the daemon within the request's deadline")
	score := colibri.NewScore()
	score.Tokens, score.DeadlineMS = colibri.TokenIDs{1, 2}, 100
	_, err = c.Score(t.Context(), &score)
	want(t, codeOf(err), colibri.CodeDeadlineExceeded)
}

func TestGoAwayInMidStream(t *testing.T) {
	second := make(chan struct{})
	c := quick(t, serve(t, greeting(func(p *peer) {
		_, id := expect[*colibri.Generate](p)
		p.tokens(id, 0, 7)
		p.send(&colibri.GoAway{Reason: "drain"}, 0)
		p.send(&colibri.Ping{}, 0) // its PONG says that GOAWAY was read
		expect[*colibri.Pong](p)
		close(second)
		p.tokens(id, 1, 8)
		p.done(id, "length")
		expect[*colibri.Bye](p) // it was the last one here
		p.gone()
	}), greeting(func(p *peer) {
		_, id := expect[*colibri.Generate](p)
		p.done(id, "stop")
		p.gone()
	})))
	first := begin(t, c, prompt(1))
	<-second
	want(t, outcome(begin(t, c, prompt(1))), "[] stop")
	want(t, outcome(first), "[7 8] length")
}

func TestAConnectionFailsByARetryableError(t *testing.T) {
	c := quick(t, serve(t, greeting(func(p *peer) {
		_, id := expect[*colibri.Generate](p)
		p.tokens(id, 0, 7)
		p.send(&colibri.Error{Code: uint64(colibri.CodeReadTimeout), Message: "slow", Retryable: true}, 0)
		p.gone()
	}), greeting(func(p *peer) {
		_, id := expect[*colibri.Generate](p)
		p.tokens(id, 1, 8)
		p.send(&colibri.Error{Code: uint64(colibri.CodeSlowReader), Message: "too slow"}, 0)
		p.gone()
	})))
	ids, err := readAll(begin(t, c, prompt(1)))
	want(t, ids, []uint32{7, 8})
	want(t, codeOf(err), colibri.CodeSlowReader)
}

func codeOf(err error) colibri.Code {
	var refusal *colibri.Error
	if !errors.As(err, &refusal) {
		return 0
	}
	return colibri.Code(refusal.Code)
}
