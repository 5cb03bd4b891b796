package unixsock

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	colibri "colibri/client/go"
)

// tokenAt is what the little daemon generates: a function of prompt, seed and place, as the real one's.
func tokenAt(g *colibri.Generate, index uint64) uint32 {
	seed := uint64(0)
	if g.Seed != nil {
		seed = *g.Seed
	}
	return rand.New(rand.NewPCG(seed^uint64(g.Tokens[0]), index)).Uint32()
}

// littleDaemon serves GENERATE with credit and resume. After a random number of its messages it breaks the connection,
// in the middle of a frame too, or sends it away.
func littleDaemon() script {
	return greeting(func(p *peer) {
		d := &served{peer: p, left: rand.IntN(200), credit: map[uint64]uint64{}}
		d.changed = sync.NewCond(&d.mu)
		var streams sync.WaitGroup
		defer streams.Wait()
		defer d.close()
		for m, id := p.next(); m != nil; m, id = p.next() {
			switch m := m.(type) {
			case *colibri.Generate:
				d.allow(id, 16)
				streams.Go(func() { d.stream(m, id) })
			case *colibri.Credit:
				d.allow(id, m.Tokens)
			}
		}
	}, requests(1<<20), credit(16))
}

type served struct {
	*peer

	mu      sync.Mutex
	changed *sync.Cond
	credit  map[uint64]uint64 // by request
	left    int               // messages until the break
	closed  bool
}

func (d *served) allow(id, tokens uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.credit[id] += tokens
	d.changed.Broadcast()
}

func (d *served) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	d.changed.Broadcast()
}

func (d *served) stream(g *colibri.Generate, id uint64) {
	index := uint64(0)
	if g.Resume != nil {
		index = uint64(len(g.Resume.Tokens))
	}
	for ; index < g.MaxTokens; index++ {
		if !d.emit(&colibri.TokensOut{IDs: colibri.TokenIDs{tokenAt(g, index)}, Index: index}, id, 1) {
			return
		}
	}
	d.emit(&colibri.Done{FinishReason: "length"}, id, 0)
}

// emit sends a message when there is credit for it; false: the connection is gone.
func (d *served) emit(m colibri.Message, id, tokens uint64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	for !d.closed && d.credit[id] < tokens {
		d.changed.Wait()
	}
	if d.closed {
		return false
	}
	d.credit[id] -= tokens
	frame := colibri.Encode(m, id)
	if d.left--; d.left == 0 {
		if rand.IntN(2) == 0 {
			d.send(&colibri.GoAway{Reason: "drain"}, 0)
		} else {
			d.conn.Write(frame[:rand.IntN(len(frame))])
			d.conn.Close()
		}
	}
	d.conn.Write(frame)
	return true
}

// check reads a stream and compares it with what it must be.
func check(ctx context.Context, c *Client, g *colibri.Generate) error {
	stream, err := c.Generate(ctx, g)
	if err != nil {
		return err
	}
	index := uint64(0)
	for chunk, err := range stream.All() {
		if err != nil {
			return fmt.Errorf("after %d tokens: %w", index, err)
		}
		for _, id := range chunk.IDs {
			if id != tokenAt(g, index) {
				return fmt.Errorf("token %d is %d; not %d", index, id, tokenAt(g, index))
			}
			index++
		}
	}
	if index != g.MaxTokens {
		return fmt.Errorf("%d tokens of %d", index, g.MaxTokens)
	}
	return nil
}

// Whatever happens to connections, each stream is what it would have been without; some readers leave early.
func TestNoStreamFailsOrChanges(t *testing.T) {
	c := quick(t, serve(t, littleDaemon()), WithConnections(3), WithReconnect(patience))
	var readers sync.WaitGroup
	for n := range 40 {
		readers.Go(func() {
			seed := uint64(n)
			g := prompt(uint32(n))
			g.MaxTokens, g.Seed = 100, &seed
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			if n%4 == 0 {
				time.AfterFunc(time.Duration(rand.IntN(5000))*time.Microsecond, cancel)
			}
			if err := check(ctx, c, g); err != nil && ctx.Err() == nil {
				t.Error(err)
			}
		})
	}
	readers.Wait()
}

// BenchmarkStreamTokens: 32 streams of one token a frame; client and stub daemon share the cores.
func BenchmarkStreamTokens(b *testing.B) {
	const streams, tokens = 32, 2000
	frames := func(id uint64) []byte {
		var out []byte
		for index := range uint64(tokens) {
			out = colibri.Append(out, &colibri.TokensOut{IDs: colibri.TokenIDs{415}, Index: index, Step: 1 << 20}, id)
		}
		return colibri.Append(out, &colibri.Done{FinishReason: "length"}, id)
	}
	c := quick(b, serve(b, greeting(func(p *peer) {
		p.conn.SetReadDeadline(time.Time{})
		for m, id := p.next(); m != nil; m, id = p.next() {
			if _, ok := m.(*colibri.Generate); ok {
				p.conn.Write(frames(id))
			}
		}
	}, func(w *colibri.Welcome) { w.Features = nil })))
	b.ReportAllocs()
	for b.Loop() {
		var readers sync.WaitGroup
		for range streams {
			readers.Go(func() {
				stream, err := c.Generate(context.Background(), prompt(1))
				if err != nil {
					b.Error(err)
					return
				}
				if ids, err := readAll(stream); err != nil || len(ids) != tokens {
					b.Error(len(ids), err)
				}
			})
		}
		readers.Wait()
	}
	b.ReportMetric(float64(b.N)*streams*tokens/b.Elapsed().Seconds(), "tokens/s")
}
