package gateway

import (
	"errors"
	"fmt"

	"colibri/client/go/gateway/strictjson"
	"colibri/client/go/text"
)

// prompt is text or, if that is nil, token ids.
type prompt struct {
	text *string
	ids  []uint32
}

// prompts reads OpenAI's four forms: text, a list of texts, token ids, a list of lists of token ids. A list of texts
// and lists of ids in any mixture is fine too.
func prompts(limit int) reader[[]prompt] {
	return func(raw strictjson.Raw) ([]prompt, error) {
		switch raw.Kind() {
		case strictjson.String:
			one, err := onePrompt(raw)
			return []prompt{one}, err
		case strictjson.Array:
			if first, any := firstItem(raw); !any || first.Kind() == strictjson.Number {
				one, err := onePrompt(raw)
				return []prompt{one}, err
			}
			return list(limit, onePrompt)(raw)
		}
		return nil, errors.New("must be a string, a list of strings, a list of token ids or a list of such lists")
	}
}

func firstItem(raw strictjson.Raw) (first strictjson.Raw, any bool) {
	for _, item := range raw.Items() {
		return item, true
	}
	return nil, false
}

func onePrompt(raw strictjson.Raw) (prompt, error) {
	switch raw.Kind() {
	case strictjson.String:
		spelled, err := str(raw)
		return prompt{text: &spelled}, err
	case strictjson.Array:
		ids, err := tokens(raw)
		return prompt{ids: ids}, err
	}
	return prompt{}, errors.New("must be a string or a list of token ids")
}

// encode is the prompt's tokens. param names it in errors.
func (p prompt) encode(m *text.Model, maxLen uint64, param string) ([]uint32, error) {
	ids := p.ids
	if p.text != nil {
		var err error
		if ids, err = encodeText(m, *p.text, true, param); err != nil {
			return nil, err
		}
	}
	return ids, checkLength(ids, maxLen, param)
}

// encodeText: special says whether the tokenizer adds what it puts around a text.
func encodeText(m *text.Model, spelled string, special bool, param string) ([]uint32, error) {
	ids, err := m.Encode(spelled, text.EncodeOptions{AddSpecial: special})
	if err != nil {
		return nil, invalid(param, fmt.Sprintf("cannot be encoded: %v", err))
	}
	return ids, nil
}

// outOfVocabulary is the daemon's TOKEN_OUT_OF_RANGE for ids that it does not see.
func outOfVocabulary(i int, id uint32, size uint64) error {
	e := invalid("tokens", fmt.Sprintf("has the id %d at index %d; ids are below %d", id, i, size))
	e.code = "token_out_of_range"
	return e
}

// checkLength refuses what the daemon would refuse, in its words, before much of it is sent.
func checkLength(ids []uint32, maxLen uint64, param string) error {
	if len(ids) == 0 {
		e := invalid(param, "has no tokens")
		e.code = "prompt_empty"
		return e
	}
	if uint64(len(ids)) > maxLen {
		e := invalid(param, fmt.Sprintf("has %d tokens; this model's limit for prompt and output together is %d",
			len(ids), maxLen))
		e.code = "context_length_exceeded"
		return e
	}
	return nil
}
