package gateway

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"colibri/client/go/text"
)

// What is sent, as OpenAI's reference has it. Field names are documented in openapi.json.

type usage struct {
	PromptTokens     uint64       `json:"prompt_tokens"`
	CompletionTokens uint64       `json:"completion_tokens"`
	TotalTokens      uint64       `json:"total_tokens"`
	Details          usageDetails `json:"prompt_tokens_details"`
}

type usageDetails struct {
	CachedTokens uint64 `json:"cached_tokens"`
}

// answer is a whole answer or a chunk of a stream.
type answer[Choice any] struct {
	ID          string   `json:"id"`
	Object      string   `json:"object"`
	Created     int64    `json:"created"`
	Model       string   `json:"model"`
	Fingerprint string   `json:"system_fingerprint"`
	Choices     []Choice `json:"choices"`
	Usage       *usage   `json:"usage,omitempty"`
}

type completionChoice struct {
	Index    int                 `json:"index"`
	Text     string              `json:"text"`
	TokenIDs []uint32            `json:"token_ids,omitempty"`
	Logprobs *completionLogprobs `json:"logprobs"`
	Finish   *string             `json:"finish_reason"`
}

// completionLogprobs: lists of one length. A token without a log probability (the first of an echoed prompt) has null.
type completionLogprobs struct {
	Tokens        []string             `json:"tokens"`
	TokenLogprobs []*float32           `json:"token_logprobs"`
	TopLogprobs   []map[string]float32 `json:"top_logprobs"`
	TextOffset    []int                `json:"text_offset"`
}

type chatChoice struct {
	Index    int           `json:"index"`
	Message  *chatMessage  `json:"message,omitempty"`
	Delta    *chatDelta    `json:"delta,omitempty"`
	TokenIDs []uint32      `json:"token_ids,omitempty"`
	Logprobs *chatLogprobs `json:"logprobs"`
	Finish   *string       `json:"finish_reason"`
}

type chatMessage struct {
	Role    string  `json:"role"`
	Content string  `json:"content"`
	Refusal *string `json:"refusal"`
}

type chatDelta struct {
	Role    string  `json:"role,omitempty"`
	Content *string `json:"content,omitempty"`
}

type chatLogprobs struct {
	Content []chatLogprob `json:"content"`
	Refusal []chatLogprob `json:"refusal"`
}

type chatLogprob struct {
	chatAlternative
	Top []chatAlternative `json:"top_logprobs"`
}

type chatAlternative struct {
	Token   string  `json:"token"`
	Logprob float32 `json:"logprob"`
	Bytes   []int   `json:"bytes"`
}

func forCompletion(m *text.Model, tokens []scored) *completionLogprobs {
	out := &completionLogprobs{Tokens: []string{}, TokenLogprobs: []*float32{}, TopLogprobs: []map[string]float32{},
		TextOffset: []int{}}
	for _, t := range tokens {
		out.Tokens = append(out.Tokens, tokenName(m, t.id))
		out.TextOffset = append(out.TextOffset, t.offset)
		if !t.known {
			out.TokenLogprobs = append(out.TokenLogprobs, nil)
			out.TopLogprobs = append(out.TopLogprobs, nil)
			continue
		}
		best := make(map[string]float32, len(t.top))
		for _, a := range t.top {
			best[tokenName(m, a.id)] = a.logprob
		}
		out.TokenLogprobs = append(out.TokenLogprobs, &t.logprob)
		out.TopLogprobs = append(out.TopLogprobs, best)
	}
	return out
}

func forChat(m *text.Model, tokens []scored) *chatLogprobs {
	out := &chatLogprobs{Content: make([]chatLogprob, 0, len(tokens))}
	for _, t := range tokens {
		entry := chatLogprob{chatAlternative: forAlternative(m, t.id, t.logprob), Top: []chatAlternative{}}
		for _, a := range t.top {
			entry.Top = append(entry.Top, forAlternative(m, a.id, a.logprob))
		}
		out.Content = append(out.Content, entry)
	}
	return out
}

func forAlternative(m *text.Model, id uint32, logprob float32) chatAlternative {
	spelled := m.TokenText(id)
	a := chatAlternative{Token: tokenName(m, id), Logprob: logprob, Bytes: make([]int, len(spelled))}
	for i, b := range spelled {
		a.Bytes[i] = int(b)
	}
	return a
}

// tokenName is a token's text, or bytes:\xe2\x80 if it is not text by itself.
func tokenName(m *text.Model, id uint32) string {
	spelled := m.TokenText(id)
	if utf8.Valid(spelled) {
		return string(spelled)
	}
	var name strings.Builder
	name.WriteString("bytes:")
	for _, b := range spelled {
		fmt.Fprintf(&name, `\x%02x`, b)
	}
	return name.String()
}

func idsOf(tokens []scored) []uint32 {
	ids := make([]uint32, len(tokens))
	for i, t := range tokens {
		ids[i] = t.id
	}
	return ids
}
