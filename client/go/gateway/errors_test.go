package gateway

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	colibri "colibri/client/go"
)

func refusal(code uint64) *colibri.Error {
	return &colibri.Error{Code: code, Message: "because"}
}

// TestTable: PROTOCOL's table of codes, as answers.
func TestTable(t *testing.T) {
	for code, want := range map[uint64]string{
		100: "400 invalid_request_error protocol", 101: "502 server_error version",
		102: "413 invalid_request_error frame_too_large",
		103: "408 invalid_request_error read_timeout", 104: "403 permission_error permission",
		105: "503 service_unavailable_error too_many_connections retry",
		106: "503 service_unavailable_error slow_reader",
		200: "400 invalid_request_error invalid_argument", 201: "400 invalid_request_error prompt_empty",
		202: "400 invalid_request_error context_length_exceeded", 203: "400 invalid_request_error token_out_of_range",
		204: "409 invalid_request_error duplicate_id", 205: "400 invalid_request_error never_fits",
		206: "400 invalid_request_error unsupported", 207: "404 invalid_request_error model_not_found",
		300: "429 rate_limit_error queue_full retry", 301: "429 rate_limit_error too_many_inflight retry",
		302: "503 service_unavailable_error kv_exhausted retry", 303: "503 service_unavailable_error not_ready retry",
		304: "503 service_unavailable_error draining retry", 400: "504 timeout_error deadline_exceeded",
		401: "503 service_unavailable_error cancelled", 500: "503 service_unavailable_error worker_lost retry",
		501: "500 server_error poisoned", 502: "504 timeout_error worker_hung", 503: "500 server_error non_finite",
		599: "500 server_error internal", 777: "500 server_error code_777",
	} {
		e := asAPIError(fmt.Errorf("wrapped: %w", refusal(code)))
		got := fmt.Sprintf("%d %s %s", e.status, e.kind, e.code)
		if e.retryAfter > 0 {
			got += " retry"
		}
		if got != want || e.message != "because" {
			t.Errorf("%d: %s, not %s", code, got, want)
		}
	}
}

func TestOtherErrors(t *testing.T) {
	for want, err := range map[string]error{
		"503 daemon_unreachable":  &colibri.ConnectionError{Message: "no socket"},
		"503 daemon_unreachable ": colibri.ErrClosed,
		"502 protocol":            &colibri.ProtocolError{Code: colibri.CodeProtocol},
		"500 internal":            errors.New("secret"),
	} {
		e := asAPIError(err)
		if got := fmt.Sprintf("%d %s", e.status, e.code); got != strings.TrimSpace(want) || strings.Contains(e.message,
			"secret") {
			t.Errorf("%v: %s %s", err, got, e.message)
		}
	}
}

func TestRetryAfterIsRoundedUp(t *testing.T) {
	for ms, want := range map[uint64]string{1: "1", 1000: "1", 1001: "2", 59_999: "60"} {
		u := &upstream{refusal: &colibri.Error{Code: 300, RetryAfterMS: &ms}}
		s, _ := server(t, u)
		response, _ := post(t, s, "/v1/generate", `{"tokens":[1]}`)
		if got := response.Header.Get("Retry-After"); response.StatusCode != 429 || got != want {
			t.Errorf("%d ms: %s %s", ms, response.Status, got)
		}
	}
}

// TestDaemonFieldNames: the daemon's fields are called as the client called them.
func TestDaemonFieldNames(t *testing.T) {
	field := "tokens"
	u := &upstream{refusal: &colibri.Error{Code: 203, Field: &field}}
	s, _ := server(t, u)
	for path, want := range map[string]string{"/v1/completions": "prompt", "/v1/chat/completions": "messages",
		"/v1/generate": "tokens"} {
		_, body := post(t, s, path, `{"prompt":"a","messages":[{"role":"user","content":"a"}],"tokens":[1]}`)
		if got := decode[errorBody](t, body); *got.Error.Param != want {
			t.Error(path, body)
		}
	}
}

// TestRefused has a bad request for each rule, and the parameter that the answer must name.
func TestRefused(t *testing.T) {
	s, _ := server(t, storyteller(t), func(o *Options) { o.MaxBody = 1 << 16 })
	const chat, text = "/v1/chat/completions", "/v1/completions"
	hello := `"messages":[{"role":"user","content":"a"}]`
	for _, c := range []struct{ path, body, want string }{
		{text, `{}`, "400 invalid_argument prompt"},
		{text, `{"prompt":""}`, "400 prompt_empty prompt"},
		{text, `{"prompt":[]}`, "400 prompt_empty prompt"},
		{text, `{"prompt":7}`, "400 invalid_argument prompt"},
		{text, `{"prompt":[1,"a"]}`, "400 invalid_argument prompt[1]"},
		{text, `{"prompt":["a",[1,-2]]}`, "400 invalid_argument prompt[1][1]"},
		{text, `{"prompt":[1.5]}`, "400 invalid_argument prompt[0]"},
		{text, `{"prompt":"a","n":0}`, "400 invalid_argument n"},
		{text, `{"prompt":"a","n":1000000000}`, "400 invalid_argument n"},
		{text, `{"prompt":["a","b"],"n":40}`, "400 invalid_argument n"},
		{text, `{"prompt":"a","max_tokens":-1}`, "400 invalid_argument max_tokens"},
		{text, `{"prompt":"a","max_tokens":"5"}`, "400 invalid_argument max_tokens"},
		{text, `{"prompt":"a","max_tokens":1e2}`, "400 invalid_argument max_tokens"},
		{text, `{"prompt":"a","temperature":-0.1}`, "400 invalid_argument temperature"},
		{text, `{"prompt":"a","temperature":1e999}`, "400 invalid_argument temperature"},
		{text, `{"prompt":"a","temperature":NaN}`, "400 invalid_json "},
		{text, `{"prompt":"a","top_p":0}`, "400 invalid_argument top_p"},
		{text, `{"prompt":"a","seed":1.5}`, "400 invalid_argument seed"},
		{text, `{"prompt":"a","seed":99999999999999999999}`, "400 invalid_argument seed"},
		{text, `{"prompt":"a","logit_bias":{"x":1}}`, "400 invalid_argument logit_bias"},
		{text, `{"prompt":"a","logit_bias":{"1":"x"}}`, "400 invalid_argument logit_bias.1"},
		{text, `{"prompt":"a","logit_bias":[1]}`, "400 invalid_argument logit_bias"},
		{text, `{"prompt":"a","logprobs":21}`, "400 invalid_argument logprobs"},
		{text, `{"prompt":"a","stop":""}`, "400 invalid_argument stop"},
		{text, `{"prompt":"a","stop":["a",""]}`, "400 invalid_argument stop[1]"},
		{text, `{"prompt":"a","stop":5}`, "400 invalid_argument stop"},
		{text, `{"prompt":"a","stream":"yes"}`, "400 invalid_argument stream"},
		{text, `{"prompt":"a","stream_options":{"include_usage":1}}`,
			"400 invalid_argument stream_options.include_usage"},
		{text, `{"prompt":"a","stream_options":1}`, "400 invalid_argument stream_options"},
		{text, `{"prompt":"a","suffix":"b"}`, "400 unsupported suffix"},
		{text, `{"prompt":"a","best_of":3}`, "400 unsupported best_of"},
		{text, `{"prompt":"a","guided_regex":"b"}`, "400 unsupported guided_regex"},
		{text, `{"prompt":"a","model":"other"}`, "404 model_not_found model"},
		{text, `{"prompt":"a","prompt":"b"}`, "400 invalid_json "},
		{text, `{"prompt":"a"} x`, "400 invalid_json "},
		{text, `{"prompt":"` + "\xff" + `"}`, "400 invalid_json "},
		{text, `[]`, "400 invalid_json "},
		{text, ``, "400 invalid_json "},
		{text, `{"x":` + strings.Repeat("[", 1000) + strings.Repeat("]", 1000) + `}`, "400 invalid_json "},
		{text, `{"prompt":"` + strings.Repeat("word ", 3000) + `"}`, "400 context_length_exceeded prompt"},
		{text, `{"prompt":"` + strings.Repeat("a", 1<<17) + `"}`, "413 body_too_large "},
		{chat, `{}`, "400 invalid_argument messages"},
		{chat, `{"messages":[]}`, "400 invalid_argument messages"},
		{chat, `{"messages":["hi"]}`, "400 invalid_argument messages[0]"},
		{chat, `{"messages":[{"content":"hi"}]}`, "400 invalid_argument messages[0].role"},
		{chat, `{"messages":[{"role":"tool","content":"hi"}]}`, "400 invalid_argument messages[0].role"},
		{chat, `{"messages":[{"role":"user","content":7}]}`, "400 invalid_argument messages[0].content"},
		{chat, `{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}`,
			"400 unsupported messages[0].content[0].type"},
		{chat, `{"messages":[{"role":"assistant","tool_calls":[{}]}]}`, "400 unsupported messages[0].tool_calls"},
		{chat, `{` + hello + `,"response_format":{"type":"json_object"}}`, "400 unsupported response_format.type"},
		{chat, `{` + hello + `,"tools":[{"type":"function"}]}`, "400 unsupported tools"},
		{chat, `{` + hello + `,"tool_choice":"required"}`, "400 unsupported tool_choice"},
		{chat, `{` + hello + `,"modalities":["audio"]}`, "400 unsupported modalities"},
		{chat, `{` + hello + `,"top_logprobs":2}`, "400 invalid_argument top_logprobs"},
		{chat, `{` + hello + `,"logprobs":5}`, "400 invalid_argument logprobs"},
		{"/v1/generate", `{}`, "400 prompt_empty tokens"},
		{"/v1/generate", `{"tokens":[1],"stop_seqs":[[1],2]}`, "400 invalid_argument stop_seqs[1]"},
		{"/v1/generate", `{"tokens":[1],"cache":{"use":1}}`, "400 invalid_argument cache.use"},
		{"/v1/score", `{"tokens":[1,2],"from":0}`, "400 invalid_argument from"},
		{"/tokenize", `{}`, "400 invalid_argument prompt"},
		{"/detokenize", `{"tokens":[2048]}`, "400 token_out_of_range tokens"},
		{"/nothing", `{}`, "404 not_found "},
	} {
		response, body := post(t, s, c.path, c.body)
		got := decode[errorBody](t, body).Error
		if s := fmt.Sprintf("%d %s %s", response.StatusCode, got.Code, value(got.Param)); s != c.want ||
			got.Message == "" {
			t.Errorf("%.80s\n  gives %s\n  not   %s", c.body, body, c.want)
		}
	}
}

// TestHarmless: what asks for nothing is accepted.
func TestHarmless(t *testing.T) {
	s, _ := server(t, storyteller(t))
	response, body := post(t, s, "/v1/chat/completions", `{"messages":[{"role":"user","content":"a","name":"b"}],
		"response_format":{"type":"text"},"tools":[],"tool_choice":"none","modalities":["text"],"audio":null,
		"functions":null,"user":"me","service_tier":"auto","unknown_field":{"x":[1]},"stream_options":null,
		"parallel_tool_calls":true,"store":false}`)
	if response.StatusCode != http.StatusOK {
		t.Error(body)
	}
}

func TestHeadersOfErrors(t *testing.T) {
	s, _ := server(t, storyteller(t))
	request, _ := http.NewRequest("DELETE", s.URL+"/v1/models/x", nil)
	response, _ := read(t, request)
	if response.StatusCode != http.StatusMethodNotAllowed || response.Header.Get("Allow") != "GET" {
		t.Error(response.Status, response.Header)
	}
	for _, header := range [][]string{{"Content-Type", "text/plain"}, {"Content-Encoding", "gzip"}} {
		if response, _ := post(t, s, "/v1/completions", `{}`,
			header...); response.StatusCode != http.StatusUnsupportedMediaType {
			t.Error(header, response.Status)
		}
	}
	for _, value := range []string{"0", "-1", "1e3", "x", "3600001"} {
		response, body := post(t, s, "/v1/completions", `{"prompt":"a"}`, "X-Deadline-Ms", value)
		if response.StatusCode != http.StatusBadRequest || !strings.Contains(body, `"param":"X-Deadline-Ms"`) {
			t.Error(value, body)
		}
	}
	response, _ = post(t, s, "/v1/completions", `{}`, "X-Request-Id", "a b\"c")
	if id := response.Header.Get("X-Request-Id"); !validID(id) || len(id) != 32 {
		t.Error(id)
	}
}

func TestSlowBody(t *testing.T) {
	s, _ := server(t, storyteller(t), func(o *Options) { o.BodyTime = 20 * time.Millisecond })
	reader, writer := newPipe(t)
	request, _ := http.NewRequest("POST", s.URL+"/v1/completions", reader)
	request.Header.Set("Content-Type", "application/json")
	go writer.Write([]byte(`{"prompt":`))
	response, body := read(t, request)
	if response.StatusCode != http.StatusRequestTimeout || !strings.Contains(body, "body_timeout") {
		t.Error(response.Status, body)
	}
}
