// Package text turns text into a model's token ids and back: encoding, chat templates, decoding of streams.
//
// What a user writes is text, even if it looks like one of the model's special tokens: "<|im_end|>" in a question
// cannot end the user's turn. Special tokens come from the model's files only: from its chat template and from what its
// tokenizer adds by itself. Special is what tokenizer.json flags so; tokens that are added without the flag (some
// models' <tool_call>, runs of spaces) are ordinary vocabulary and can be typed.
//
// The results are those of the Python client's module of the same name, which rests on the same tokenizers. The work is
// done by libcolibri_text, a Rust library in native/: build it before this package.
package text

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"unicode/utf8"
)

// ErrNoTokenizer: the folder has no tokenizer.json, so the model speaks token ids only.
var ErrNoTokenizer = errors.New("the model folder has no tokenizer.json")

// ErrNotUTF8: the caller's text is not valid UTF-8.
var ErrNotUTF8 = errors.New("the text is not valid UTF-8")

// Model is a model folder's tokenizer and chat template. It does not change; all methods may be called by any number of
// goroutines.
type Model struct {
	encoder  *encoder
	specials specials
	shield   shield
	pieces   pieces
	template func() (*chatTemplate, error) // compiled when it is first needed
}

// Open reads tokenizer.json, tokenizer_config.json and chat_template.jinja of a Colibri model folder; all but the first
// may be absent. ErrNoTokenizer, or what is wrong with which file.
func Open(folder string) (*Model, error) {
	path := filepath.Join(folder, "tokenizer.json")
	data, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w", folder, ErrNoTokenizer)
	}
	if err != nil {
		return nil, err
	}
	config, err := readConfig(folder)
	if err != nil {
		return nil, err
	}
	m, err := fromJSON(data)
	if err != nil {
		return nil, fmt.Errorf("%s cannot be used: %w", path, err)
	}
	m.template = sync.OnceValues(func() (*chatTemplate, error) { return loadTemplate(folder, config) })
	return m, nil
}

// fromJSON is a model without a chat template.
func fromJSON(tokenizerJSON []byte) (*Model, error) {
	hidden, found, err := hide(tokenizerJSON, newNonce())
	if err != nil {
		return nil, err
	}
	encoder, err := newEncoder(hidden)
	if err != nil {
		return nil, blame(tokenizerJSON, err)
	}
	if err := found.check(encoder); err != nil {
		return nil, err
	}
	reader, err := newPieces(tokenizerJSON)
	if err != nil {
		return nil, err
	}
	return &Model{encoder, found, newShield(found), reader, noTemplate}, nil
}

// EncodeOptions: the zero value encodes just the text.
type EncodeOptions struct {
	AddSpecial bool // also what the tokenizer puts around a text, such as a begin-of-text token
}

// Encode gives the ids of plain text. Nothing in text becomes special. The error is ErrNotUTF8, or a failure of the
// tokenizer on this text.
func (m *Model) Encode(text string, o EncodeOptions) ([]uint32, error) {
	if !utf8.ValidString(text) {
		return nil, ErrNotUTF8
	}
	return m.encoder.encode(text, o.AddSpecial)
}

// Decode gives the text of ids without special tokens; ids that are no token's are left out. Bytes that are not UTF-8
// come as U+FFFD.
func (m *Model) Decode(ids []uint32) string {
	text, err := m.encoder.decode(ids)
	if err != nil { // a decoder that refuses its own vocabulary's pieces; their text is all there is
		for _, id := range ids {
			text += string(m.TokenText(id))
		}
	}
	return text
}

// TokenText gives the bytes that a token stands for, which need not be UTF-8 by themselves; a special token's are its
// name. nil: there is no such token.
func (m *Model) TokenText(id uint32) []byte {
	if name, special := m.specials.names[id]; special {
		return []byte(name)
	}
	piece, known := m.encoder.token(id)
	if !known {
		return nil
	}
	return m.pieces.bytes(piece)
}

// HasChatTemplate says whether Chat can be used: there is a template and it compiles.
func (m *Model) HasChatTemplate() bool {
	_, err := m.template()
	return err == nil
}

// config is what is used of tokenizer_config.json: the chat template and whatever ends in _token.
type config map[string]json.RawMessage

func readConfig(folder string) (config, error) {
	path := filepath.Join(folder, "tokenizer_config.json")
	data, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var c config
	if err := json.Unmarshal(data, &c); err != nil {
		return nil, fmt.Errorf("%s cannot be used: %w", path, err)
	}
	return c, nil
}
