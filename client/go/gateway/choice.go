package gateway

import (
	"context"
	"io"
	"unicode/utf8"

	colibri "colibri/client/go"
	"colibri/client/go/text"
)

// choice is one continuation of one prompt, as text.
type choice struct {
	request *colibri.Generate
	text    *text.Model
	stops   []string

	// tokens: pieces have the tokens that they are made of. echo: the prompt comes first.
	tokens, echo bool
}

// piece is what comes at once. The text is whole characters.
type piece struct {
	text   string
	tokens []scored
}

// scored is a token; known says whether it has a log probability, and top the best alternatives then.
type scored struct {
	id      uint32
	known   bool
	logprob float32
	top     []alternative

	start, end int // place in the choice's text, in bytes
	offset     int // the same as start, in characters
}

type alternative struct {
	id      uint32
	logprob float32
}

// outcome is how a choice ended. finish is the daemon's finish_reason; a stop string makes it "stop".
type outcome struct {
	finish string
	usage  colibri.Usage
}

// run gives each piece to emit, which may block: then the daemon waits too, by the credits of the stream. When emit
// fails, when ctx ends or at a stop string, the daemon is told to stop.
func (c *choice) run(ctx context.Context, client colibri.Client, emit func(piece) error) (outcome, error) {
	out := output{choice: c, decoder: c.text.NewDecoder(), stops: stopStrings{stops: c.stops}}
	if c.echo {
		if err := c.echoPrompt(ctx, client, &out, emit); err != nil {
			return outcome{}, err
		}
	}
	stream, err := client.Generate(ctx, c.request)
	if err != nil {
		return outcome{}, err
	}
	defer stream.Close()
	for {
		chunk, err := stream.Next()
		if err == io.EOF {
			done := stream.Done()
			return outcome{done.FinishReason, done.Usage}, out.give(out.flush(), emit)
		}
		if err != nil {
			return outcome{}, err
		}
		if err := out.give(out.take(chunk), emit); err != nil {
			return outcome{}, err
		}
		if out.stops.hit {
			return outcome{"stop", out.usage}, nil
		}
	}
}

// echoPrompt emits the prompt, with its scores if any are wanted.
func (c *choice) echoPrompt(ctx context.Context, client colibri.Client, out *output, emit func(piece) error) error {
	prompt := c.request.Tokens
	scores := &colibri.ScoreResult{}
	if top := c.request.Logprobs; top != nil && len(prompt) > 1 {
		request := colibri.NewScore()
		request.Tokens, request.Top, request.Cache = prompt, *top, c.request.Cache
		request.Priority, request.DeadlineMS = c.request.Priority, c.request.DeadlineMS
		request.Model, request.Tenant = c.request.Model, c.request.Tenant
		request.Trace, request.RequestID = c.request.Trace, c.request.RequestID
		var err error
		if scores, err = client.Score(ctx, &request); err != nil {
			return err
		}
	}
	decoder, echoed := c.text.NewDecoder(), ""
	for i, id := range prompt {
		made := decoder.Push(id)
		out.remember(id, made, i-1, scores.Logprobs, scores.TopIDs, scores.TopLogprobs)
		echoed += made
	}
	rest := decoder.Flush()
	out.made += len(rest)
	out.characters += utf8.RuneCountInString(rest)
	return out.give(piece{echoed + rest, out.ripe(out.made)}, emit)
}

// output is what has come of a choice.
type output struct {
	choice  *choice
	decoder *text.Decoder
	stops   stopStrings
	usage   colibri.Usage // so far

	made, given int      // bytes of text that came from the decoder, and that were given out
	characters  int      // of what was made
	waiting     []scored // tokens whose text was not given out yet
}

// take adds tokens. At a stop string the rest of chunk is dropped and not counted.
func (o *output) take(chunk *colibri.TokensOut) piece {
	if o.usage.Generated == 0 {
		o.usage.Prompt = uint64(len(o.choice.request.Tokens))
		if chunk.CachedTokens != nil {
			o.usage.Cached = *chunk.CachedTokens
		}
	}
	shown := ""
	for i, id := range chunk.IDs {
		o.usage.Generated++
		made := o.decoder.Push(id)
		o.remember(id, made, i, chunk.Logprobs, chunk.TopIDs, chunk.TopLogprobs)
		if shown += o.stops.push(made); o.stops.hit {
			break
		}
	}
	given := o.given + len(shown)
	if o.stops.hit {
		return piece{shown, o.begun(given)}
	}
	if shown == "" {
		return piece{}
	}
	return piece{shown, o.ripe(given)}
}

// flush is what is left at the end of the output.
func (o *output) flush() piece {
	shown := o.stops.push(o.decoder.Flush())
	if !o.stops.hit {
		shown += o.stops.flush()
	}
	return piece{shown, o.ripe(o.made)}
}

func (o *output) give(p piece, emit func(piece) error) error {
	o.given += len(p.text)
	if p.text == "" && len(p.tokens) == 0 {
		return nil
	}
	return emit(p)
}

// remember notes a token and the text it made. Its scores are in row i, if that exists.
func (o *output) remember(id uint32, made string, i int, logprobs colibri.Floats, topIDs colibri.TokenIDs,
	top colibri.Floats) {
	t := scored{id: id, start: o.made, end: o.made + len(made), offset: o.characters}
	o.made = t.end
	if !o.choice.tokens {
		return
	}
	o.characters += utf8.RuneCountInString(made)
	if i >= 0 && i < len(logprobs) {
		t.known, t.logprob = true, logprobs[i]
		width := len(topIDs) / len(logprobs)
		for k := i * width; k < (i+1)*width && k < len(top); k++ {
			t.top = append(t.top, alternative{topIDs[k], top[k]})
		}
	}
	o.waiting = append(o.waiting, t)
}

// ripe takes out the tokens whose text ends within the first given bytes.
func (o *output) ripe(given int) []scored {
	n := 0
	for n < len(o.waiting) && o.waiting[n].end <= given {
		n++
	}
	return o.release(n)
}

// begun takes out the tokens of which anything is within the first given bytes: the last ones, at a stop string.
func (o *output) begun(given int) []scored {
	n := 0
	for n < len(o.waiting) && o.waiting[n].start < given {
		n++
	}
	return o.release(n)
}

func (o *output) release(n int) []scored {
	ready := o.waiting[:n:n]
	o.waiting = o.waiting[n:]
	return ready
}
