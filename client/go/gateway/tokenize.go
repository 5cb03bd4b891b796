package gateway

import (
	"net/http"

	"colibri/client/go/text"
)

type tokenized struct {
	Tokens []uint32 `json:"tokens"`
	Count  int      `json:"count"`
	MaxLen uint64   `json:"max_model_len"`
}

// tokenizeAsk is the body of POST /tokenize: text, or a conversation.
type tokenizeAsk struct {
	model    string
	prompt   *string
	messages []text.Message
	special  bool
}

func (a *tokenizeAsk) fields() fields {
	return fields{
		"model":              into(&a.model, str),
		"prompt":             into(&a.prompt, optional(str)),
		"messages":           into(&a.messages, list(maxMessages, message)),
		"add_special_tokens": into(&a.special, boolean),
	}
}

func tokenize(d *deps, x *exchange) error {
	a := &tokenizeAsk{special: true}
	if err := x.read(a.fields()); err != nil {
		return err
	}
	if (a.prompt == nil) == (len(a.messages) == 0) {
		return invalid("prompt", "or messages must be there, and not both")
	}
	served, err := d.models.withText(x.r.Context(), a.model)
	if err != nil {
		return err
	}
	var ids []uint32
	if a.prompt == nil {
		ids, err = conversation(served, a.messages)
	} else {
		ids, err = encodeText(served.text, *a.prompt, a.special, "prompt")
	}
	if err != nil {
		return err
	}
	if ids == nil {
		ids = []uint32{} // an empty list, not null
	}
	return x.json(http.StatusOK, tokenized{ids, len(ids), served.info.MaxLen})
}

// detokenizeAsk is the body of POST /detokenize.
type detokenizeAsk struct {
	model string
	ids   []uint32
}

func (a *detokenizeAsk) fields() fields {
	return fields{"model": into(&a.model, str), "tokens": into(&a.ids, tokens)}
}

// detokenize gives the text without special tokens, as completions do.
func detokenize(d *deps, x *exchange) error {
	a := &detokenizeAsk{}
	if err := x.read(a.fields()); err != nil {
		return err
	}
	served, err := d.models.withText(x.r.Context(), a.model)
	if err != nil {
		return err
	}
	for i, id := range a.ids {
		if uint64(id) >= served.info.VocabSize {
			return outOfVocabulary(i, id, served.info.VocabSize)
		}
	}
	return x.json(http.StatusOK, map[string]string{"prompt": served.text.Decode(a.ids)})
}
