package colibri

import (
	"context"
	"io"
	"iter"
)

// Client asks a daemon. A transport implements it (package unixsock); what stands in front of a daemon depends on this
// interface only. All methods may be called by any number of goroutines.
//
// A context that ends cancels its request at the daemon at once, waiting or running, and the method or the stream then
// fails with the context's error. Other errors are an *Error (the daemon refused the request or failed), a
// *ConnectionError (no connection, or lost and not to be taken up again), a *ProtocolError (the daemon and this package
// do not understand one another) or ErrClosed. What may pass has been tried again already.
type Client interface {
	// Generate sends a request and returns. Start it from NewGenerate, which has the protocol's defaults; the request
	// and its slices must not be changed until the stream has ended. The stream must be read to its end or closed.
	Generate(ctx context.Context, request *Generate) (*Stream, error)

	// Score gives the log probability of each token of a text. Start from NewScore.
	Score(ctx context.Context, request *Score) (*ScoreResult, error)

	// Check asks whether Generate would take a request, and how much of it is cached. Start from NewTokenCheck.
	Check(ctx context.Context, request *TokenCheck) (*TokenCheckReply, error)

	// Health is the daemon's state.
	Health(ctx context.Context) (*HealthReply, error)

	// Stats has the daemon's counters.
	Stats(ctx context.Context) (*StatsReply, error)

	// Model is what is served, as last told by the daemon; it connects if there is no connection. Not to be changed.
	Model(ctx context.Context) (*ModelInfo, error)

	// Close cancels what is live, closes every connection and waits until nothing of the client runs.
	Close() error
}

// Stream is one output, read by one goroutine:
//
//	for chunk, err := range stream.All() { ... }
type Stream struct{ Reader }

// Reader is what a transport puts into a Stream.
type Reader interface {
	// Next waits for the next tokens, one or more. io.EOF: the output is complete and Done has its end. After an error
	// the stream is over, and every call gives the same one.
	Next() (*TokensOut, error)

	// Prompt has the scores of the prompt if prompt_logprobs was asked for; whole from the first tokens on.
	Prompt() *ScoreResult

	// Done is how the output ended, or nil as long as Next has not given io.EOF.
	Done() *Done

	// Cancel asks for the end of the output. What is on its way is still to be read; then Done says "abort", with the
	// usage. To be called by the goroutine that reads.
	Cancel(reason string)

	// Close ends the reading, and the output if it goes on. Idempotent; any goroutine may call it.
	Close()
}

// All goes through the rest of the output; an error is the last thing it gives. Leaving the loop closes the stream.
func (s *Stream) All() iter.Seq2[*TokensOut, error] {
	return func(yield func(*TokensOut, error) bool) {
		defer s.Close()
		for {
			chunk, err := s.Next()
			if err == io.EOF || !yield(chunk, err) || err != nil {
				return
			}
		}
	}
}

// ScoreResult has log probabilities of consecutive tokens of a text. -9999 stands for minus infinity.
type ScoreResult struct {
	From        uint64   // position of the first
	Logprobs    Floats   // [n]
	TopIDs      TokenIDs // [n, top] the best alternatives, best first
	TopLogprobs Floats   // [n, top]
	Done        *Done    // usage and times; of Score only
}
