package gateway

import (
	"errors"
	"fmt"
	"math"
	"strconv"

	colibri "colibri/client/go"
	"colibri/client/go/gateway/strictjson"
)

// Ranges of the protocol; what is within them is for the daemon to judge.
const (
	most          = math.MaxInt32
	maxLogprobs   = 20
	maxStopIDs    = 64
	maxBias       = 256
	maxPriority   = 100
	maxDeadlineMS = 3_600_000
)

// sampling are the parameters that mean the same in every request that generates.
func sampling(g *colibri.Generate) fields {
	return fields{
		"max_tokens":         into(&g.MaxTokens, whole(0, most)),
		"min_tokens":         into(&g.MinTokens, whole(0, most)),
		"temperature":        into(&g.Temperature, number(0, 100)),
		"top_k":              topK(&g.TopK),
		"top_p":              into(&g.TopP, share(1)),
		"min_p":              into(&g.MinP, number(0, 1)),
		"repetition_penalty": into(&g.RepetitionPenalty, share(100)),
		"presence_penalty":   into(&g.PresencePenalty, number(-100, 100)),
		"frequency_penalty":  into(&g.FrequencyPenalty, number(-100, 100)),
		"logit_bias":         into(&g.LogitBias, logitBias),
		"seed":               into(&g.Seed, optional(seed)),
		"ignore_eos":         into(&g.IgnoreEOS, boolean),
		"priority":           into(&g.Priority, signed(-maxPriority, maxPriority)),
	}
}

// with is f and more; more wins.
func (f fields) with(more fields) fields {
	for name, read := range more {
		f[name] = read
	}
	return f
}

// topK: −1 means "all" to some servers; 0 does here.
func topK(place *uint64) func(strictjson.Raw) error {
	return func(raw strictjson.Raw) error {
		value, err := signed(-1, most)(raw)
		*place = uint64(max(value, 0))
		return err
	}
}

func logitBias(raw strictjson.Raw) (map[uint32]float64, error) {
	if raw.Kind() != strictjson.Object {
		return nil, errors.New("must be an object of token ids to numbers")
	}
	bias := make(map[uint32]float64)
	for key, value := range raw.Fields() {
		id, err := strconv.ParseUint(key, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("has the key %.64q, which is not a token id", key)
		}
		amount, ok := value.Float()
		if !ok {
			return nil, inside("."+key, errors.New("must be a number"))
		}
		if bias[uint32(id)] = amount; len(bias) > maxBias {
			return nil, fmt.Errorf("has more than %d entries", maxBias)
		}
	}
	return bias, nil
}
