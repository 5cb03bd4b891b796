package text

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
)

// specials are a tokenizer's special tokens. Inside the encoder they carry names that nobody can guess, with the ids
// they always had; a template's special tokens are translated to these names. So nothing that is encoded, by whatever
// model or normalizer tokenizer.json asks for, can become a special token by itself, and all of a prompt is still
// encoded in one piece, which gives the ids that the model was trained with.
type specials struct {
	hidden map[string]string // the name that everybody knows -> the encoder's
	names  map[uint32]string // id -> the name that everybody knows
}

// addedToken is one of tokenizer.json's; the rest of it is kept as it is.
type addedToken struct {
	ID      uint32 `json:"id"`
	Content string `json:"content"`
	Special bool   `json:"special"`
}

// object is a JSON object of which some members are replaced.
type object map[string]json.RawMessage

// hide gives special tokens other names, and takes limits on length away.
func hide(tokenizerJSON []byte, nonce string) (string, specials, error) {
	found := specials{hidden: map[string]string{}, names: map[uint32]string{}}
	var whole object
	if err := json.Unmarshal(tokenizerJSON, &whole); err != nil {
		return "", found, err
	}
	if err := found.read(whole["added_tokens"], nonce); err != nil {
		return "", found, fmt.Errorf("added_tokens: %w", err)
	}
	for key, change := range map[string]func(json.RawMessage) (json.RawMessage, error){
		"added_tokens": found.renameAdded,
		"model":        found.renameModel,
	} {
		changed, err := change(whole[key])
		if err != nil {
			return "", found, fmt.Errorf("%s: %w", key, err)
		}
		whole[key] = changed
	}
	whole["truncation"], whole["padding"] = nil, nil
	result, err := json.Marshal(whole)
	return string(result), found, err
}

func (s *specials) read(added json.RawMessage, nonce string) error {
	var tokens []addedToken
	if err := unmarshalIfAny(added, &tokens); err != nil {
		return err
	}
	for i, token := range tokens {
		if token.Special && token.Content != "" {
			s.hidden[token.Content] = fmt.Sprintf("<%s:%d>", nonce, i)
			s.names[token.ID] = token.Content
		}
	}
	return nil
}

// check that the encoder has every special token under its id.
func (s *specials) check(e *encoder) error {
	for id, name := range s.names {
		if piece, _ := e.token(id); piece != s.hidden[name] {
			return fmt.Errorf("added_tokens: %q has the id %d, and another one in the vocabulary", name, id)
		}
	}
	return nil
}

func (s *specials) rename(piece string) string {
	if hidden, special := s.hidden[piece]; special {
		return hidden
	}
	return piece
}

func (s *specials) renameAdded(raw json.RawMessage) (json.RawMessage, error) {
	var tokens []object
	if err := unmarshalIfAny(raw, &tokens); err != nil {
		return nil, err
	}
	for _, token := range tokens {
		var content string
		if err := json.Unmarshal(token["content"], &content); err != nil {
			return nil, err
		}
		token["content"] = encoded(s.rename(content))
	}
	return json.Marshal(tokens)
}

func (s *specials) renameModel(raw json.RawMessage) (json.RawMessage, error) {
	var model object
	if err := json.Unmarshal(raw, &model); err != nil {
		return nil, err
	}
	for key, change := range map[string]func(json.RawMessage) (any, error){
		"vocab": s.renameVocab, "merges": s.withoutMerges, "unk_token": s.renameUnknown,
	} {
		if model[key] == nil {
			continue
		}
		changed, err := change(model[key])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", key, err)
		}
		if model[key], err = json.Marshal(changed); err != nil {
			return nil, err
		}
	}
	return json.Marshal(model)
}

// renameVocab: pieces with their ids, or a list of [piece, score].
func (s *specials) renameVocab(raw json.RawMessage) (any, error) {
	if strings.HasPrefix(string(raw), "[") {
		var scored [][]json.RawMessage
		if err := json.Unmarshal(raw, &scored); err != nil {
			return nil, err
		}
		for _, entry := range scored {
			var piece string
			if len(entry) == 0 || json.Unmarshal(entry[0], &piece) != nil {
				return nil, fmt.Errorf("an entry is not [piece, score]")
			}
			entry[0] = encoded(s.rename(piece))
		}
		return scored, nil
	}
	var vocab map[string]json.RawMessage
	if err := json.Unmarshal(raw, &vocab); err != nil {
		return nil, err
	}
	for known, hidden := range s.hidden {
		if id, in := vocab[known]; in {
			delete(vocab, known)
			vocab[hidden] = id
		}
	}
	return vocab, nil
}

func (s *specials) renameUnknown(raw json.RawMessage) (any, error) {
	var piece *string
	if err := json.Unmarshal(raw, &piece); err != nil || piece == nil {
		return piece, err
	}
	return s.rename(*piece), nil
}

// withoutMerges leaves out rules that make or use a special token: they could only serve typed ones.
func (s *specials) withoutMerges(raw json.RawMessage) (any, error) {
	var merges []json.RawMessage
	if err := json.Unmarshal(raw, &merges); err != nil {
		return nil, err
	}
	kept := make([]json.RawMessage, 0, len(merges))
	for _, merge := range merges {
		left, right, err := pair(merge)
		if err != nil {
			return nil, err
		}
		if s.hidden[left] == "" && s.hidden[right] == "" && s.hidden[left+right] == "" {
			kept = append(kept, merge)
		}
	}
	return kept, nil
}

// pair: "left right" in older files, ["left", "right"] in newer ones.
func pair(merge json.RawMessage) (left, right string, err error) {
	var both []string
	if json.Unmarshal(merge, &both) == nil && len(both) == 2 {
		return both[0], both[1], nil
	}
	var text string
	if err := json.Unmarshal(merge, &text); err != nil {
		return "", "", err
	}
	left, right, _ = strings.Cut(text, " ")
	return left, right, nil
}

func unmarshalIfAny(raw json.RawMessage, into any) error {
	if raw == nil {
		return nil
	}
	return json.Unmarshal(raw, into)
}

func encoded(text string) json.RawMessage {
	raw, err := json.Marshal(text)
	if err != nil {
		panic(err) // a string always can be
	}
	return raw
}

func newNonce() string {
	var random [8]byte
	_, _ = rand.Read(random[:]) // never fails: it ends the program instead
	return hex.EncodeToString(random[:])
}
