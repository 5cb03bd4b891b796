// Package openaitest uses the official OpenAI package for Go against a running gateway, whose address is in
// COLIBRI_GATEWAY_URL; without it the test is skipped. tests/integration/test_gateway_openai.py starts one.
package openaitest

import (
	"context"
	"errors"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// gateway is a client of it and the model it serves.
func gateway(t *testing.T) (openai.Client, string) {
	t.Helper()
	url := os.Getenv("COLIBRI_GATEWAY_URL")
	if url == "" {
		t.Skip("COLIBRI_GATEWAY_URL names no gateway")
	}
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	client := openai.NewClient(option.WithBaseURL(url+"/v1"), option.WithAPIKey("none"), option.WithMaxRetries(0),
		option.WithHTTPClient(&http.Client{Transport: transport}))
	models, err := client.Models.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return client, models.Data[0].ID
}

func chat(model string) openai.ChatCompletionNewParams {
	return openai.ChatCompletionNewParams{
		Model:       model,
		Messages:    []openai.ChatCompletionMessageParamUnion{openai.UserMessage("Tell me of a bird.")},
		MaxTokens:   openai.Int(12),
		Temperature: openai.Float(0),
	}
}

func completion(model string) openai.CompletionNewParams {
	return openai.CompletionNewParams{
		Model:       openai.CompletionNewParamsModel(model),
		Prompt:      openai.CompletionNewParamsPromptUnion{OfString: openai.String("Once upon a time")},
		MaxTokens:   openai.Int(12),
		Temperature: openai.Float(0),
	}
}

func TestOpenAIPackageCompletion(t *testing.T) {
	client, model := gateway(t)
	params := completion(model)
	params.Logprobs = openai.Int(2)
	whole, err := client.Completions.New(t.Context(), params)
	if err != nil {
		t.Fatal(err)
	}
	choice := whole.Choices[0]
	if len(choice.Logprobs.Tokens) != 12 || strings.Join(choice.Logprobs.Tokens, "") != choice.Text ||
		choice.FinishReason != "length" {
		t.Errorf("%+v", choice)
	}
	params.StreamOptions.IncludeUsage = openai.Bool(true)
	stream := client.Completions.NewStreaming(t.Context(), params)
	defer stream.Close()
	text, used := "", int64(0)
	for stream.Next() {
		chunk := stream.Current()
		for _, choice := range chunk.Choices {
			text += choice.Text
		}
		used = max(used, chunk.Usage.CompletionTokens)
	}
	if stream.Err() != nil || text != choice.Text || used != 12 {
		t.Error(stream.Err(), text, used)
	}
}

func TestOpenAIPackageChat(t *testing.T) {
	client, model := gateway(t)
	params := chat(model)
	params.Logprobs, params.TopLogprobs = openai.Bool(true), openai.Int(3)
	whole, err := client.Chat.Completions.New(t.Context(), params)
	if err != nil {
		t.Fatal(err)
	}
	if content := whole.Choices[0].Logprobs.Content; len(content) != 12 || len(content[0].TopLogprobs) != 3 {
		t.Errorf("%+v", content)
	}
	stream := client.Chat.Completions.NewStreaming(t.Context(), params)
	defer stream.Close()
	var joined openai.ChatCompletionAccumulator
	for stream.Next() {
		if !joined.AddChunk(stream.Current()) {
			t.Error("a chunk does not fit the others")
		}
	}
	if stream.Err() != nil || joined.Choices[0].Message.Content != whole.Choices[0].Message.Content {
		t.Error(stream.Err(), joined.Choices[0].Message.Content)
	}
	params.Stop = openai.ChatCompletionNewParamsStopUnion{OfString: openai.String(whole.Choices[0].Message.Content[5:])}
	stopped, err := client.Chat.Completions.New(t.Context(), params)
	if err != nil || stopped.Choices[0].FinishReason != "stop" || len(stopped.Choices[0].Message.Content) > 5 {
		t.Error(err, stopped.Choices)
	}
}

func TestOpenAIPackageErrors(t *testing.T) {
	client, model := gateway(t)
	params := chat(model)
	params.Temperature = openai.Float(-1)
	_, err := client.Chat.Completions.New(t.Context(), params)
	var refused *openai.Error
	if !errors.As(err, &refused) || refused.StatusCode != 400 || refused.Param != "temperature" ||
		refused.Code != "invalid_argument" {
		t.Error(err)
	}
	if _, err = client.Chat.Completions.New(t.Context(), chat("other")); !errors.As(err, &refused) ||
		refused.StatusCode != 404 {
		t.Error(err)
	}
}

func TestOpenAIPackageCancel(t *testing.T) {
	client, model := gateway(t)
	params := chat(model)
	params.MaxTokens = openai.Int(100_000)
	endless := option.WithJSONSet("ignore_eos", true)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := client.Chat.Completions.New(ctx, params, endless); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	ctx, cancel = context.WithCancel(t.Context())
	defer cancel()
	stream := client.Chat.Completions.NewStreaming(ctx, params, endless)
	defer stream.Close()
	for range 3 {
		stream.Next()
	}
	cancel()
	for stream.Next() {
	}
	if !errors.Is(stream.Err(), context.Canceled) {
		t.Error(stream.Err())
	}
}
