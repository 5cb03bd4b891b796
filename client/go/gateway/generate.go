package gateway

import (
	"io"

	colibri "colibri/client/go"
	"colibri/client/go/gateway/strictjson"
)

// native are the fields of the protocol's GENERATE by their own names.
func native(g *colibri.Generate) fields {
	return sampling(g).with(fields{
		"tokens":      into((*[]uint32)(&g.Tokens), tokens),
		"stop_ids":    into((*[]uint32)(&g.StopIDs), list(maxStopIDs, token)),
		"stop_seqs":   into(&g.StopSeqs, list(16, stopSequence)),
		"logprobs":    into(&g.Logprobs, optional(whole(0, maxLogprobs))),
		"deadline_ms": into(&g.DeadlineMS, whole(1, maxDeadlineMS)),
		"cache":       cacheFields(&g.Cache).inside,
		"model":       into(&g.Model, optional(str)),
		"echo_usage":  into(&g.EchoUsage, boolean),
	})
}

func stopSequence(raw strictjson.Raw) (colibri.TokenIDs, error) {
	ids, err := list(32, token)(raw)
	return ids, err
}

func cacheFields(c *colibri.Cache) fields { return fields{"use": into(&c.Use, boolean)} }

// nativeTokens is a line of output: the protocol's TOKENS, with lists in the place of its binary fields.
type nativeTokens struct {
	Tokens      []uint32       `json:"tokens"`
	Index       uint64         `json:"index"`
	Logprobs    []float32      `json:"logprobs,omitempty"`
	TopIDs      [][]uint32     `json:"top_ids,omitempty"`
	TopLogprobs [][]float32    `json:"top_logprobs,omitempty"`
	Cached      *uint64        `json:"cached_tokens,omitempty"`
	Usage       *colibri.Usage `json:"usage,omitempty"`
}

// nativeDone is the last line.
type nativeDone struct {
	Done *colibri.Done `json:"done"`
}

// generate sends tokens as they come. A model without a tokenizer can be used, and nothing is done to the output.
func generate(d *deps, x *exchange) error {
	request := colibri.NewGenerate()
	if err := x.read(native(&request)); err != nil {
		return err
	}
	if err := x.direct(d, ofGenerate(&request), request.Tokens); err != nil {
		return err
	}
	stream, err := d.client.Generate(x.r.Context(), &request)
	if err != nil {
		return err
	}
	defer stream.Close()
	e := newEvents(x, true)
	defer e.end()
	for {
		chunk, err := stream.Next()
		if err == io.EOF {
			x.count(stream.Done().Usage)
			return e.send(nativeDone{stream.Done()})
		}
		if err != nil {
			return e.fail(err)
		}
		x.firstTokens()
		if err := e.send(nativeLine(chunk)); err != nil {
			return err
		}
	}
}

func value(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

func nativeLine(c *colibri.TokensOut) nativeTokens {
	n := len(c.IDs)
	return nativeTokens{c.IDs, c.Index, c.Logprobs, rows(c.TopIDs, n), rows(c.TopLogprobs, n), c.CachedTokens, c.Usage}
}

// rows cuts a matrix into n rows.
func rows[T any](matrix []T, n int) [][]T {
	if len(matrix) == 0 {
		return nil
	}
	width := len(matrix) / n
	cut := make([][]T, n)
	for i := range cut {
		cut[i] = matrix[i*width : (i+1)*width]
	}
	return cut
}
