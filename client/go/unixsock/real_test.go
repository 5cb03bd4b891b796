package unixsock

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	colibri "colibri/client/go"
)

// These run against a daemon if COLIBRI_TEST_SOCKET names its socket; tests/integration/test_go_client.py does that.
func realSocket(t *testing.T) string {
	t.Helper()
	path := os.Getenv("COLIBRI_TEST_SOCKET")
	if path == "" {
		t.Skip("COLIBRI_TEST_SOCKET names no daemon's socket")
	}
	leaveNothing(t)
	return path
}

// realCase is a request, and what the engine alone makes of it.
type realCase struct {
	Request colibri.Generate
	Tokens  []uint32
}

// UnmarshalJSON leaves defaults where a field is absent.
func (c *realCase) UnmarshalJSON(data []byte) error {
	type plain realCase
	p := plain{Request: colibri.NewGenerate()}
	err := json.Unmarshal(data, &p)
	*c = realCase(p)
	return err
}

// realCases are in the file that COLIBRI_TEST_CASES names.
func realCases(t *testing.T) (cases []realCase) {
	t.Helper()
	data, err := os.ReadFile(os.Getenv("COLIBRI_TEST_CASES"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &cases); err != nil {
		t.Fatal(err)
	}
	return cases
}

// Readers go through the cases, over and over, until standard input ends. Meanwhile, processes of
// the daemon are killed: no stream may fail or differ.
func TestRealStreamsThroughKills(t *testing.T) {
	path, cases := realSocket(t), realCases(t)
	stop := make(chan struct{})
	go func() {
		io.Copy(io.Discard, os.Stdin)
		close(stop)
	}()
	c := New(path, WithConnections(3), WithReconnect(patience))
	defer c.Close()
	var next, finished atomic.Int64
	var readers sync.WaitGroup
	for range 8 {
		readers.Go(func() {
			for n := int(next.Add(1)); n <= len(cases) || !over(stop); n = int(next.Add(1)) {
				if err := cases[n%len(cases)].check(c); err != nil {
					t.Error(err)
				}
				finished.Add(1)
			}
		})
	}
	readers.Wait()
	t.Logf("%d streams", finished.Load())
}

func over(stop <-chan struct{}) bool {
	select {
	case <-stop:
		return true
	default:
		return false
	}
}

func (one *realCase) check(c *Client) error {
	stream, err := c.Generate(context.Background(), &one.Request)
	if err != nil {
		return err
	}
	ids, err := readAll(stream)
	switch {
	case err != nil:
		return fmt.Errorf("after %d tokens: %w", len(ids), err)
	case !slices.Equal(ids, one.Tokens):
		return fmt.Errorf("%d; not %d", ids, one.Tokens)
	case stream.Done().Usage.Generated != uint64(len(ids)):
		return fmt.Errorf("%d tokens; usage says %d", len(ids), stream.Done().Usage.Generated)
	}
	return nil
}

// The one case begins, and is read on when standard input ends. Meanwhile the daemon has reloaded and lost the stream.
func TestRealStreamOverReload(t *testing.T) {
	path, one := realSocket(t), realCases(t)[0]
	c := New(path, WithReconnect(patience))
	defer c.Close()
	stream := begin(t, c, &one.Request)
	first, err := stream.Next()
	if err != nil {
		t.Fatal(err)
	}
	fmt.Println("begun")
	io.Copy(io.Discard, os.Stdin)
	rest, err := readAll(stream)
	if ids := slices.Concat(first.IDs, rest); err != nil || !slices.Equal(ids, one.Tokens) {
		t.Errorf("%v, after %d; not %d", err, ids, one.Tokens)
	}
}

func TestRealVerbs(t *testing.T) {
	c := New(realSocket(t))
	defer c.Close()
	model, err := c.Model(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	health, err := c.Health(t.Context())
	want(t, []any{err, health.State}, []any{nil, "ready"})
	check := colibri.NewTokenCheck()
	check.Tokens = colibri.TokenIDs{5, 6, 7, 8}
	reply, err := c.Check(t.Context(), &check)
	want(t, []any{err, reply.PromptTokens}, []any{nil, uint64(4)})
	score := colibri.NewScore()
	score.Tokens, score.Top = check.Tokens, 2
	result, err := c.Score(t.Context(), &score)
	want(t, []any{err, len(result.Logprobs), len(result.TopIDs)}, []any{nil, 3, 6})
	_, err = readAll(begin(t, c, prompt(uint32(model.VocabSize))))
	want(t, codeOf(err), colibri.CodeTokenOutOfRange)
	g := prompt(5, 6, 7, 8)
	top := uint64(2)
	g.Logprobs, g.PromptLogprobs, g.MaxTokens = &top, &top, 3
	stream := begin(t, c, g)
	for chunk, err := range stream.All() {
		want(t, []any{err, len(chunk.Logprobs), len(chunk.TopIDs)}, []any{nil, len(chunk.IDs), 2 * len(chunk.IDs)})
	}
	want(t, *stream.Prompt(), colibri.ScoreResult{From: 1, Logprobs: result.Logprobs, TopIDs: result.TopIDs,
		TopLogprobs: result.TopLogprobs})
}

// A reader that leaves, at any time, frees the worker; one that does not read holds up nobody.
func TestRealReadersThatLeave(t *testing.T) {
	c := New(realSocket(t))
	defer c.Close()
	long := prompt(5, 6, 7, 8)
	long.MaxTokens, long.IgnoreEOS = 100_000, true
	for tokens := range 4 {
		ctx, cancel := context.WithCancel(t.Context())
		stream, err := c.Generate(ctx, long)
		want(t, err, nil)
		for range tokens {
			_, err = stream.Next()
			want(t, err, nil)
		}
		cancel()
	}
	idle := begin(t, c, long) // nobody reads it
	short := prompt(1, 2)
	short.MaxTokens, short.IgnoreEOS = 20, true
	ids, err := readAll(begin(t, c, short))
	want(t, []any{len(ids), err}, []any{20, nil})
	idle.Close()
	soon(t, "nothing runs any more", func() bool {
		stats, err := c.Stats(t.Context())
		return err == nil && stats.Running == 0
	})
}
