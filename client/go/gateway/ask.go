package gateway

import (
	"errors"
	"fmt"

	colibri "colibri/client/go"
	"colibri/client/go/gateway/strictjson"
)

const (
	maxStops      = 16
	maxStopLength = 512 // bytes; so much text may be held back
)

// ask is what a completion and a chat have in common.
type ask struct {
	generate colibri.Generate
	model    string
	n        uint64
	stops    []string
	stream   bool
	usage    bool // stream_options.include_usage
	tokenIDs bool // return_token_ids
}

// newAsk has OpenAI's defaults where it has any; the rest is the protocol's.
func newAsk() ask {
	a := ask{generate: colibri.NewGenerate(), n: 1}
	a.generate.Temperature = 1
	return a
}

func (a *ask) fields(maxChoices uint64) fields {
	return sampling(&a.generate).with(refusedEverywhere).with(fields{
		"model":            into(&a.model, str),
		"n":                into(&a.n, whole(1, maxChoices)),
		"stop":             into(&a.stops, stopList),
		"stop_token_ids":   into((*[]uint32)(&a.generate.StopIDs), list(maxStopIDs, token)),
		"stream":           into(&a.stream, boolean),
		"stream_options":   fields{"include_usage": into(&a.usage, boolean)}.inside,
		"return_token_ids": into(&a.tokenIDs, boolean),
	})
}

// inside reads an object that is a parameter itself.
func (f fields) inside(raw strictjson.Raw) error {
	if raw.Kind() != strictjson.Object {
		return errors.New("must be an object")
	}
	for name, value := range raw.Fields() {
		if read, known := f[name]; known && !value.IsNull() {
			if err := read(value); err != nil {
				return inside("."+name, err)
			}
		}
	}
	return nil
}

// stopList is a string or a list of strings.
func stopList(raw strictjson.Raw) ([]string, error) {
	if raw.Kind() == strictjson.String {
		stop, err := stopString(raw)
		return []string{stop}, err
	}
	if raw.Kind() != strictjson.Array {
		return nil, errors.New("must be a string or a list of strings")
	}
	return list(maxStops, stopString)(raw)
}

func stopString(raw strictjson.Raw) (string, error) {
	stop, err := str(raw)
	if err == nil && (stop == "" || len(stop) > maxStopLength) {
		err = fmt.Errorf("must have 1 to %d bytes", maxStopLength)
	}
	return stop, err
}

// choices of every prompt, prompt by prompt. Choice j of a prompt has seed + j: so n answers differ, and each can be
// had again by itself.
func (a *ask) choices(x *exchange, model *served, prompts [][]uint32) ([]*choice, error) {
	if err := x.stamp(ofGenerate(&a.generate), model); err != nil {
		return nil, err
	}
	var choices []*choice
	for _, prompt := range prompts {
		for j := range a.n {
			request := a.generate
			request.Tokens = prompt
			if a.generate.Seed != nil {
				seed := *a.generate.Seed + j
				request.Seed = &seed
			}
			choices = append(choices, &choice{request: &request, text: model.text, stops: a.stops,
				tokens: a.tokenIDs || a.generate.Logprobs != nil})
		}
	}
	return choices, nil
}

func tooManyChoices(limit int) error {
	return invalid("n", fmt.Sprintf("times the number of prompts is more than %d", limit))
}
