package text

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"unicode/utf8"
)

// What one rendering may take. A step is an instruction of the template engine; a long conversation needs some hundreds
// for each message.
const (
	maxSteps  = 2_000_000
	maxOutput = 16 << 20 // bytes
)

// Message is one turn of a conversation.
type Message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// ChatOptions: the zero value renders the conversation as it is.
type ChatOptions struct {
	AddGenerationPrompt bool // end where the model's answer begins
}

// TemplateError is why a conversation cannot be rendered: the template refuses it (it may want another order of roles),
// or cannot be used at all. Message is fit for the sender of the conversation.
type TemplateError struct {
	Message string
}

func (e *TemplateError) Error() string { return e.Message }

// Chat gives the ids of a conversation in the model's chat template. Whatever stands in the messages is text. The error
// is a *TemplateError or ErrNotUTF8.
func (m *Model) Chat(messages []Message, o ChatOptions) ([]uint32, error) {
	template, err := m.template()
	if err != nil {
		return nil, err
	}
	if len(messages) == 0 {
		return nil, &TemplateError{"a conversation needs a message"}
	}
	prompt, err := template.prompt(m.shield, messages, o)
	if err != nil {
		return nil, err
	}
	return m.encoder.encode(prompt, false)
}

// chatTemplate is a template with what every rendering gets: bos_token and the like.
type chatTemplate struct {
	renderer  *renderer
	variables map[string]any
}

func noTemplate() (*chatTemplate, error) {
	return nil, &TemplateError{"the model has no chat template (chat_template.jinja, or chat_template in " +
		"tokenizer_config.json); send a plain prompt instead of messages"}
}

// loadTemplate takes chat_template.jinja, else chat_template of tokenizer_config.json.
func loadTemplate(folder string, c config) (*chatTemplate, error) {
	source, err := os.ReadFile(filepath.Join(folder, "chat_template.jinja"))
	switch {
	case err == nil:
		return newTemplate(string(source), c)
	case !errors.Is(err, os.ErrNotExist):
		return nil, &TemplateError{err.Error()}
	}
	if source, found := configured(c["chat_template"]); found {
		return newTemplate(source, c)
	}
	return noTemplate()
}

// configured: a text, or a list of named ones of which the default counts.
func configured(raw json.RawMessage) (source string, found bool) {
	if raw == nil || string(raw) == "null" {
		return "", false
	}
	if json.Unmarshal(raw, &source) == nil {
		return source, true
	}
	var named []struct{ Name, Template string }
	if json.Unmarshal(raw, &named) == nil {
		for _, entry := range named {
			if entry.Name == "default" {
				return entry.Template, true
			}
		}
	}
	return "", false
}

// generation marks what a model is to be trained on; here it has no meaning.
var generation = regexp.MustCompile(`\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}`)

// newlines are all alike to Jinja.
var newlines = strings.NewReplacer("\r\n", "\n", "\r", "\n")

func newTemplate(source string, c config) (*chatTemplate, error) {
	source = generation.ReplaceAllStringFunc(newlines.Replace(source), func(tag string) string {
		parts := generation.FindStringSubmatch(tag)
		statement := map[string]string{"": "if true", "end": "endif"}[parts[2]]
		return "{%" + parts[1] + " " + statement + " " + parts[3] + "%}"
	})
	renderer, err := newRenderer(source, maxSteps)
	if err != nil {
		return nil, &TemplateError{fmt.Sprintf("the model's chat template cannot be used: %s", err)}
	}
	variables := map[string]any{"tools": nil, "documents": nil}
	for key, raw := range c {
		if text, is := tokenText(raw); is && strings.HasSuffix(key, "_token") {
			variables[key] = text
		}
	}
	return &chatTemplate{renderer, variables}, nil
}

// tokenText: tokenizer_config.json has a token as text or as {"content": text}.
func tokenText(raw json.RawMessage) (text string, is bool) {
	var entry struct {
		Content *string `json:"content"`
	}
	if json.Unmarshal(raw, &entry) == nil && entry.Content != nil {
		return *entry.Content, true
	}
	var plain *string
	if json.Unmarshal(raw, &plain) == nil && plain != nil {
		return *plain, true
	}
	return "", false
}

// prompt renders a conversation to what the encoder takes.
func (t *chatTemplate) prompt(s shield, messages []Message, o ChatOptions) (string, error) {
	nonce := newNonce()
	shielded := make([]Message, len(messages))
	for i, message := range messages {
		if !utf8.ValidString(message.Role) || !utf8.ValidString(message.Content) {
			return "", ErrNotUTF8
		}
		shielded[i] = Message{s.escape(message.Role, nonce), s.escape(message.Content, nonce)}
	}
	rendered, err := t.render(shielded, o)
	if err != nil {
		return "", &TemplateError{"the model's chat template refuses these messages: " + unescape(err.Error(), nonce)}
	}
	return s.resolve(rendered, nonce), nil
}

func (t *chatTemplate) render(messages []Message, o ChatOptions) (string, error) {
	variables := map[string]any{"messages": messages, "add_generation_prompt": o.AddGenerationPrompt}
	for key, value := range t.variables {
		variables[key] = value
	}
	encodedVariables, err := json.Marshal(variables)
	if err != nil {
		return "", err
	}
	return t.renderer.render(string(encodedVariables), maxOutput)
}
