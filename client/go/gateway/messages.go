package gateway

import (
	"errors"
	"fmt"

	"colibri/client/go/gateway/strictjson"
	"colibri/client/go/text"
)

const maxMessages = 4096

// roles and what a template calls them: developer is OpenAI's newer word for system.
var roles = map[string]string{"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

func messageFields(m *text.Message) fields {
	return fields{
		"role":          into(&m.Role, role),
		"content":       into(&m.Content, content),
		"tool_calls":    refuse("is not supported: no tools are called", `[]`),
		"function_call": refuse("is not supported: no functions are called"),
		"audio":         refuse("is not supported: messages are text"),
	}
}

func message(raw strictjson.Raw) (text.Message, error) {
	var m text.Message
	err := messageFields(&m).inside(raw)
	if err == nil && m.Role == "" {
		err = inside(".role", errors.New("is missing"))
	}
	return m, err
}

func role(raw strictjson.Raw) (string, error) {
	spelled, err := str(raw)
	if err != nil {
		return "", err
	}
	known, ok := roles[spelled]
	if !ok {
		return "", fmt.Errorf("must be system, developer, user or assistant, not %.64q", spelled)
	}
	return known, nil
}

// content is text, or a list of parts that are text; they are joined.
func content(raw strictjson.Raw) (string, error) {
	if raw.Kind() == strictjson.String {
		return str(raw)
	}
	if raw.Kind() != strictjson.Array {
		return "", errors.New("must be a string or a list of parts")
	}
	parts, err := list(maxMessages, part)(raw)
	joined := ""
	for _, p := range parts {
		joined += p
	}
	return joined, err
}

func part(raw strictjson.Raw) (string, error) {
	var kind, spelled string
	if err := (fields{"type": into(&kind, str), "text": into(&spelled, str)}).inside(raw); err != nil {
		return "", err
	}
	if kind != "text" {
		return "", inside(".type", &unsupportedError{fmt.Sprintf("%.64q is not supported: messages are text", kind)})
	}
	return spelled, nil
}
