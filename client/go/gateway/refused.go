package gateway

import (
	"errors"
	"slices"

	"colibri/client/go/gateway/strictjson"
)

// Parameters that change what an answer may be and that do not exist here. To ignore them would be to answer another
// question, so they are refused by name, unless their value is one that asks for nothing.
var (
	refusedEverywhere = fields{
		"response_format":    onlyText,
		"structured_outputs": refuse("is not supported: output cannot be constrained"),
		"guided_json":        refuse("is not supported: output cannot be constrained"),
		"guided_regex":       refuse("is not supported: output cannot be constrained"),
		"guided_choice":      refuse("is not supported: output cannot be constrained"),
		"guided_grammar":     refuse("is not supported: output cannot be constrained"),
		"use_beam_search":    refuse("is not supported: output is sampled", `false`),
		"prompt_logprobs":    refuse("is not supported: use echo with logprobs in /v1/completions, or /v1/score"),
	}
	refusedInCompletions = fields{
		"suffix":  refuse("is not supported", `""`),
		"best_of": refuse("is not supported: ask for n answers and choose", `1`),
	}
	refusedInChat = fields{
		"tools":                  refuse("is not supported: no tools are called", `[]`),
		"tool_choice":            refuse("is not supported: no tools are called", `"none"`, `"auto"`),
		"functions":              refuse("is not supported: no functions are called", `[]`),
		"function_call":          refuse("is not supported: no functions are called", `"none"`, `"auto"`),
		"modalities":             refuse("is not supported: answers are text", `["text"]`),
		"audio":                  refuse("is not supported: answers are text"),
		"prediction":             refuse("is not supported"),
		"web_search_options":     refuse("is not supported"),
		"continue_final_message": refuse("is not supported", `false`),
		"add_generation_prompt":  refuse("is not supported", `true`),
	}
)

// refuse accepts the values that ask for nothing, as they are commonly written.
func refuse(reason string, harmless ...string) func(strictjson.Raw) error {
	return func(raw strictjson.Raw) error {
		if slices.Contains(harmless, string(raw)) {
			return nil
		}
		return &unsupportedError{reason}
	}
}

// unsupportedError makes bind say "unsupported" instead of "invalid".
type unsupportedError struct{ reason string }

func (e *unsupportedError) Error() string { return e.reason }

func onlyText(raw strictjson.Raw) error {
	var kind string
	if err := (fields{"type": into(&kind, str)}).inside(raw); err != nil {
		return err
	}
	switch kind {
	case "text":
		return nil
	case "":
		return inside(".type", errors.New("is missing"))
	}
	return inside(".type", &unsupportedError{"is not supported: only text is"})
}
