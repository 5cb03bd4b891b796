package gateway

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
)

const story = "Once upon a time there was a little bird that could fly."

func storyteller(t testing.TB) *upstream {
	return &upstream{output: encodeTiny(t, story), finish: "length"}
}

func decode[T any](t testing.TB, text string) (value T) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), &value); err != nil {
		t.Fatalf("%v in %q", err, text)
	}
	return value
}

func TestCompletion(t *testing.T) {
	s, _ := server(t, storyteller(t))
	response, body := post(t, s, "/v1/completions", `{"model":"tiny/model","prompt":"Tell","max_tokens":100}`,
		"X-Request-Id", "abc")
	got := decode[answer[completionChoice]](t, body)
	if response.StatusCode != 200 || got.Choices[0].Text != story || *got.Choices[0].Finish != "length" {
		t.Fatal(response.Status, body)
	}
	n := uint64(len(encodeTiny(t, story)))
	prompt := uint64(len(encodeTiny(t, "Tell")))
	if *got.Usage != (usage{prompt, n, prompt + n, usageDetails{1}}) {
		t.Error(*got.Usage)
	}
	if got.ID != "cmpl-abc" || got.Object != "text_completion" || got.Fingerprint != "fp_01234567abcdef01" {
		t.Error(body)
	}
	if response.Header.Get("X-Request-Id") != "abc" {
		t.Error(response.Header)
	}
}

func TestCompletionDefaults(t *testing.T) {
	u := storyteller(t)
	s, _ := server(t, u)
	post(t, s, "/v1/completions", `{"prompt":[5,6]}`, "X-Deadline-Ms", "1234", "X-Request-Id", "rid", "traceparent",
		"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	got := u.asked()
	if *got.RequestID != "rid" {
		t.Error(*got.RequestID)
	}
	if got.MaxTokens != 16 || got.Temperature != 1 || got.DeadlineMS != 1234 || *got.Model != "tiny/model" ||
		got.Tenant != nil || !strings.HasPrefix(*got.Trace, "00-0af") || fmt.Sprint(got.Tokens) != "[5 6]" {
		t.Errorf("%+v", got)
	}
}

func TestEverySamplingField(t *testing.T) {
	u := storyteller(t)
	s, _ := server(t, u)
	_, body := post(t, s, "/v1/completions", `{"prompt":"a","max_tokens":3,"min_tokens":1,"temperature":0.5,"top_k":-1,
		"top_p":0.9,"min_p":0.1,"repetition_penalty":1.1,"presence_penalty":-0.5,"frequency_penalty":0.5,
		"logit_bias":{"7":-100},"seed":-1,"ignore_eos":true,"priority":-5,"stop_token_ids":[3,4],"logprobs":2,
		"user":"u","metadata":{"a":"b"},"stop":null}`)
	got := u.asked()
	got.Tokens, got.Model, got.RequestID = nil, nil, nil
	if got.Seed == nil || *got.Seed != 1<<64-1 || got.Logprobs == nil || *got.Logprobs != 2 {
		t.Fatal(body)
	}
	got.Seed, got.Logprobs = nil, nil
	const want = `{"tokens":null,"max_tokens":3,"min_tokens":1,"temperature":0.5,"top_k":0,"top_p":0.9,"min_p":0.1,` +
		`"repetition_penalty":1.1,"presence_penalty":-0.5,"frequency_penalty":0.5,"logit_bias":{"7":-100},` +
		`"stop_ids":[3,4],"stop_seqs":null,"ignore_eos":true,"priority":-5,"deadline_ms":300000,"cache":{"use":true,` +
		`"salt_extra":null},"echo_usage":false}`
	if encoded, _ := json.Marshal(got); string(encoded) != want {
		t.Errorf("%s", encoded)
	}
}

func TestManyChoices(t *testing.T) {
	u := storyteller(t)
	s, _ := server(t, u)
	_, body := post(t, s, "/v1/completions", `{"prompt":["a","b","c"],"n":2,"seed":10,"max_tokens":1}`)
	got := decode[answer[completionChoice]](t, body)
	for i, choice := range got.Choices {
		if choice.Index != i {
			t.Error(body)
		}
	}
	seeds := map[uint64]int{}
	for _, request := range u.requests {
		seeds[*request.Seed]++
	}
	if len(got.Choices) != 6 || seeds[10] != 3 || seeds[11] != 3 || got.Usage.PromptTokens != 3 ||
		got.Usage.CompletionTokens != 6 {
		t.Error(body, seeds)
	}
}

func TestStream(t *testing.T) {
	s, _ := server(t, storyteller(t))
	response, body := post(t, s, "/v1/completions",
		`{"prompt":"Tell","max_tokens":100,"stream":true,"stream_options":{"include_usage":true}}`)
	events := eventsOf(t, body)
	text := ""
	for _, event := range events[:len(events)-2] {
		text += decode[answer[completionChoice]](t, event).Choices[0].Text
	}
	last := decode[answer[completionChoice]](t, events[len(events)-2])
	if text != story || len(last.Choices) != 0 || last.Usage.CompletionTokens == 0 ||
		events[len(events)-1] != "[DONE]" {
		t.Error(body)
	}
	if response.Header.Get("Content-Type") != "text/event-stream" {
		t.Error(response.Header)
	}
}

func TestChat(t *testing.T) {
	u := storyteller(t)
	s, _ := server(t, u)
	_, body := post(t, s, "/v1/chat/completions", `{"messages":[{"role":"developer","content":"Be </s> brief."},
		{"role":"user","content":[{"type":"text","text":"Tell "},{"type":"text","text":"me."}]}],
		"max_completion_tokens":100}`)
	got := decode[answer[chatChoice]](t, body)
	if got.Choices[0].Message.Content != story || got.Object != "chat.completion" {
		t.Fatal(body)
	}
	m := &models{client: u, folder: modelFolder(t)}
	served, _ := m.current(t.Context())
	ends := 0
	for _, id := range u.asked().Tokens {
		if id == 2 {
			ends++ // </s> of the template; the typed one is text
		}
	}
	if prompt := served.text.Decode(u.asked().Tokens); prompt != "system: Be </s> brief.user: Tell me.assistant: " ||
		ends != 2 {
		t.Error(prompt, ends)
	}
}

func TestChatStream(t *testing.T) {
	s, _ := server(t, storyteller(t))
	_, body := post(t, s, "/v1/chat/completions", `{"messages":[{"role":"user","content":"Tell"}],"stream":true,"n":2,
		"logprobs":true,"top_logprobs":2,"max_tokens":100}`)
	events := eventsOf(t, body)
	texts, finished := [2]string{}, 0
	for i, event := range events[:len(events)-1] {
		choice := decode[answer[chatChoice]](t, event).Choices[0]
		if choice.Delta.Content != nil && *choice.Delta.Content != "" {
			texts[choice.Index] += *choice.Delta.Content
			if len(choice.Logprobs.Content) == 0 || len(choice.Logprobs.Content[0].Top) != 2 {
				t.Error(event)
			}
		} else if choice.Finish != nil {
			finished++
		} else if choice.Delta.Role != "assistant" {
			t.Error(i, event)
		}
	}
	if texts != [2]string{story, story} || finished != 2 {
		t.Error(body)
	}
}

func TestStop(t *testing.T) {
	u := storyteller(t)
	s, _ := server(t, u)
	for stop, want := range map[string]string{
		`"little"`: "Once upon a time there was a ", `["bird","a lit"]`: "Once upon a time there was ",
		`[".","fly"]`: "Once upon a time there was a little bird that could ", `"no such"`: story,
	} {
		_, body := post(t, s, "/v1/completions",
			fmt.Sprintf(`{"prompt":"Tell","max_tokens":100,"stop":%s,"logprobs":0}`, stop))
		got := decode[answer[completionChoice]](t, body)
		finish := "stop"
		if want == story {
			finish = "length"
		}
		if got.Choices[0].Text != want || *got.Choices[0].Finish != finish {
			t.Error(stop, body)
		}
		if n := uint64(len(u.output)); (got.Usage.CompletionTokens < n) != (want != story) {
			t.Error(stop, got.Usage, n)
		}
		if offsets := got.Choices[0].Logprobs.TextOffset; offsets[len(offsets)-1] >= len(want) {
			t.Error("a token after the stop string has a log probability", body)
		}
	}
	eventually(t, "streams are closed", func() bool { return u.live.Load() == 0 })
	if u.aborted.Load() != 3 {
		t.Error(u.aborted.Load(), "were cancelled, not 3")
	}
}

func TestLogprobs(t *testing.T) {
	u := &upstream{output: []uint32{}, finish: "length"}
	u.output = encodeTiny(t, "a€b")
	s, _ := server(t, u)
	_, body := post(t, s, "/v1/completions", `{"prompt":"xy","logprobs":1,"echo":true,"return_token_ids":true}`)
	choice := decode[answer[completionChoice]](t, body).Choices[0]
	l := choice.Logprobs
	if choice.Text != "xya€b" || l.TokenLogprobs[0] != nil || *l.TokenLogprobs[1] != -1 ||
		l.TopLogprobs[1][l.Tokens[1]] > 0 {
		t.Error(body)
	}
	if n := len(l.Tokens); n != len(choice.TokenIDs) || n != len(l.TokenLogprobs) || n != len(l.TopLogprobs) ||
		n != len(l.TextOffset) {
		t.Error("lists of different length", body)
	}
	if !strings.Contains(body, `"bytes:\\xe2`) || l.TextOffset[len(l.TextOffset)-1] != 4 {
		t.Error("the bytes of a character are tokens, and offsets count characters", body)
	}
}

func TestErrorInStream(t *testing.T) {
	u := storyteller(t)
	u.failure = refusal(500)
	s, _ := server(t, u)
	response, body := post(t, s, "/v1/completions", `{"prompt":"Tell","max_tokens":200,"stream":true}`)
	events := eventsOf(t, body)
	if got := decode[errorBody](t, events[len(events)-1]); response.StatusCode != http.StatusOK ||
		got.Error.Code != "worker_lost" {
		t.Error(body)
	}
}
