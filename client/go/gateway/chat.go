package gateway

import (
	"fmt"

	"colibri/client/go/text"
)

// chatAsk is the body of POST /v1/chat/completions.
type chatAsk struct {
	ask
	messages []text.Message
	scores   bool // logprobs
	top      *uint64
}

func newChatAsk() *chatAsk { return &chatAsk{ask: newAsk()} }

func (c *chatAsk) fields(maxChoices int) fields {
	return c.ask.fields(uint64(maxChoices)).with(refusedInChat).with(fields{
		"messages":              into(&c.messages, list(maxMessages, message)),
		"max_completion_tokens": into(&c.generate.MaxTokens, whole(0, most)),
		"logprobs":              into(&c.scores, boolean),
		"top_logprobs":          into(&c.top, optional(whole(0, maxLogprobs))),
	})
}

func chat(d *deps, x *exchange) error {
	x.names = map[string]string{"tokens": "messages", "stop_ids": "stop_token_ids"}
	c := newChatAsk()
	if err := x.read(c.fields(d.options.MaxChoices)); err != nil {
		return err
	}
	if len(c.messages) == 0 {
		return invalid("messages", "must have at least one message")
	}
	if err := c.chooseScores(); err != nil {
		return err
	}
	model, err := d.models.withText(x.r.Context(), c.model)
	if err != nil {
		return err
	}
	prompt, err := conversation(model, c.messages)
	if err != nil {
		return err
	}
	choices, err := c.choices(x, model, [][]uint32{prompt})
	if err != nil {
		return err
	}
	return answerChoices(d, x, &c.ask, model, choices, c.form(model))
}

// chooseScores: top_logprobs is for logprobs only.
func (c *chatAsk) chooseScores() error {
	if c.scores {
		c.generate.Logprobs = new(uint64)
		if c.top != nil {
			c.generate.Logprobs = c.top
		}
	} else if c.top != nil && *c.top > 0 {
		return invalid("top_logprobs", "needs logprobs: true")
	}
	return nil
}

// conversation is the prompt that the model's own template makes.
func conversation(model *served, messages []text.Message) ([]uint32, error) {
	if !model.text.HasChatTemplate() {
		e := invalid("messages", "cannot be used: the model has no chat template; use /v1/completions")
		e.code = "no_chat_template"
		return nil, e
	}
	ids, err := model.text.Chat(messages, text.ChatOptions{AddGenerationPrompt: true})
	if err != nil {
		return nil, invalid("messages", fmt.Sprintf("are refused by the model's chat template: %v", err))
	}
	return ids, checkLength(ids, model.info.MaxLen, "messages")
}

func (c *chatAsk) form(model *served) form[chatChoice] {
	scores := func(p piece) *chatLogprobs {
		if !c.scores {
			return nil
		}
		return forChat(model.text, p.tokens)
	}
	ids := func(p piece) []uint32 {
		if !c.tokenIDs {
			return nil
		}
		return idsOf(p.tokens)
	}
	return form[chatChoice]{
		prefix: "chatcmpl-", object: "chat.completion", chunk: "chat.completion.chunk",
		begin: func(i int) (chatChoice, bool) {
			return chatChoice{Index: i, Delta: &chatDelta{Role: "assistant", Content: new(string)}}, true
		},
		piece: func(i int, p piece) chatChoice {
			return chatChoice{Index: i, Delta: &chatDelta{Content: &p.text}, TokenIDs: ids(p), Logprobs: scores(p)}
		},
		end: func(i int, finish string) chatChoice {
			return chatChoice{Index: i, Delta: &chatDelta{}, Finish: &finish}
		},
		whole: func(i int, p piece, finish string) chatChoice {
			return chatChoice{Index: i, Message: &chatMessage{Role: "assistant", Content: p.text}, TokenIDs: ids(p),
				Logprobs: scores(p), Finish: &finish}
		},
	}
}
