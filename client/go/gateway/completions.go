package gateway

// completionAsk is the body of POST /v1/completions.
type completionAsk struct {
	ask
	prompts []prompt
	echo    bool
	scores  *uint64 // logprobs
}

// completionTokens is OpenAI's default of max_tokens here.
const completionTokens = 16

func newCompletionAsk() *completionAsk {
	c := &completionAsk{ask: newAsk()}
	c.generate.MaxTokens = completionTokens
	return c
}

func (c *completionAsk) fields(maxChoices int) fields {
	return c.ask.fields(uint64(maxChoices)).with(refusedInCompletions).with(fields{
		"prompt":   into(&c.prompts, prompts(maxChoices)),
		"echo":     into(&c.echo, boolean),
		"logprobs": into(&c.scores, optional(whole(0, maxLogprobs))),
	})
}

func completions(d *deps, x *exchange) error {
	x.names = map[string]string{"tokens": "prompt", "stop_ids": "stop_token_ids"}
	c := newCompletionAsk()
	if err := x.read(c.fields(d.options.MaxChoices)); err != nil {
		return err
	}
	if c.prompts == nil {
		return invalid("prompt", "is missing")
	}
	if len(c.prompts)*int(c.n) > d.options.MaxChoices {
		return tooManyChoices(d.options.MaxChoices)
	}
	model, err := d.models.withText(x.r.Context(), c.model)
	if err != nil {
		return err
	}
	c.generate.Logprobs = c.scores
	choices, err := c.choices(x, model)
	if err != nil {
		return err
	}
	return answerChoices(d, x, &c.ask, model, choices, c.form(model))
}

func (c *completionAsk) choices(x *exchange, model *served) ([]*choice, error) {
	encoded := make([][]uint32, len(c.prompts))
	for i, p := range c.prompts {
		var err error
		if encoded[i], err = p.encode(model.text, model.info.MaxLen, "prompt"); err != nil {
			return nil, err
		}
	}
	choices, err := c.ask.choices(x, model, encoded)
	for _, choice := range choices {
		choice.echo = c.echo
	}
	return choices, err
}

func (c *completionAsk) form(model *served) form[completionChoice] {
	write := func(i int, p piece) completionChoice {
		out := completionChoice{Index: i, Text: p.text}
		if c.scores != nil {
			out.Logprobs = forCompletion(model.text, p.tokens)
		}
		if c.tokenIDs {
			out.TokenIDs = idsOf(p.tokens)
		}
		return out
	}
	return form[completionChoice]{
		prefix: "cmpl-", object: "text_completion", chunk: "text_completion",
		begin: func(int) (none completionChoice, any bool) { return },
		piece: write,
		end:   func(i int, finish string) completionChoice { return completionChoice{Index: i, Finish: &finish} },
		whole: func(i int, p piece, finish string) completionChoice {
			out := write(i, p)
			out.Finish = &finish
			return out
		},
	}
}
