package gateway

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	colibri "colibri/client/go"
	"colibri/client/go/gateway/apikeys"
)

const ask1 = `{"prompt":"Tell","max_tokens":100}`

func withKeys(t *testing.T, lines ...string) func(*Options) {
	path := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	keys, err := apikeys.Open(path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return func(o *Options) { o.Keys = keys }
}

func TestKeys(t *testing.T) {
	u := storyteller(t)
	s, _ := server(t, u, withKeys(t, apikeys.Hash("secret")+" alice tenant=lab"))
	for header, want := range map[string]int{"": 401, "Bearer": 401, "Bearer wrong": 401, "Basic secret": 401,
		"Bearer secret": 200,
		"bearer secret": 200} {
		response, body := post(t, s, "/v1/completions", ask1, "Authorization", header)
		if response.StatusCode != want || want == 401 && response.Header.Get("WWW-Authenticate") == "" {
			t.Error(header, response.Status, body)
		}
	}
	if tenant := u.asked().Tenant; tenant == nil || *tenant != "lab" {
		t.Error(tenant)
	}
	for _, path := range []string{"/health/live", "/openapi.json", "/metrics"} {
		request, _ := http.NewRequest("GET", s.URL+path, nil)
		if response, _ := read(t, request); response.StatusCode != http.StatusOK {
			t.Error(path, response.Status)
		}
	}
}

func TestKeyLimits(t *testing.T) {
	u := storyteller(t)
	u.hold = make(chan struct{})
	s, _ := server(t, u, withKeys(t, apikeys.Hash("a")+" rate rps=0.01", apikeys.Hash("b")+" few concurrency=1"))
	first := make(chan string, 2)
	for _, key := range []string{"a", "b"} {
		go func() {
			_, body := post(t, s, "/v1/completions", ask1, "Authorization", "Bearer "+key)
			first <- body
		}()
	}
	eventually(t, "both run", func() bool { return u.live.Load() == 2 })
	for key, want := range map[string]string{"a": "100", "b": "1"} {
		response, body := post(t, s, "/v1/completions", ask1, "Authorization", "Bearer "+key)
		if got := response.Header.Get("Retry-After"); response.StatusCode != 429 || got != want {
			t.Error(key, response.Status, got, body)
		}
	}
	close(u.hold)
	for range 2 {
		if body := <-first; !strings.Contains(body, "little bird") {
			t.Error(body)
		}
	}
	if response, _ := post(t, s, "/v1/completions", ask1, "Authorization",
		"Bearer b"); response.StatusCode != http.StatusOK {
		t.Error("the share of an ended request was not given back")
	}
}

func TestMaxRequests(t *testing.T) {
	u := storyteller(t)
	u.hold = make(chan struct{})
	s, _ := server(t, u, func(o *Options) { o.MaxRequests = 1 })
	var first sync.WaitGroup
	first.Go(func() { post(t, s, "/v1/completions", ask1) })
	eventually(t, "the first runs", func() bool { return u.live.Load() == 1 })
	response, body := post(t, s, "/v1/completions", ask1)
	if response.StatusCode != 429 || response.Header.Get("Retry-After") != "1" || !strings.Contains(body,
		"gateway_busy") {
		t.Error(response.Status, body)
	}
	close(u.hold)
	first.Wait()
}

func TestHealth(t *testing.T) {
	u := &upstream{finish: "length"}
	s, g := server(t, u)
	ask := func(path string) (int, string) {
		request, _ := http.NewRequest("GET", s.URL+path, nil)
		response, body := read(t, request)
		return response.StatusCode, strings.TrimSpace(body)
	}
	check := func(wantStatus int, want string) {
		t.Helper()
		if status, body := ask("/health/ready"); status != wantStatus || body != want {
			t.Error(status, body)
		}
		if status, _ := ask("/health/live"); status != http.StatusOK {
			t.Error("not live")
		}
	}
	share := 0.5
	u.health = colibri.HealthReply{State: "starting", Progress: &share}
	check(503, `{"ready":false,"state":"starting","progress":0.5}`)
	u.health = colibri.HealthReply{State: "ready", Ready: true}
	check(200, `{"ready":true,"state":"ready"}`)
	u.lost = &colibri.ConnectionError{Message: "gone"}
	check(503, `{"ready":false,"state":"unreachable","reason":"the daemon does not answer"}`)
	u.lost = nil
	g.Drain()
	check(503, `{"ready":false,"state":"draining","reason":"the gateway is stopping"}`)
	if response, _ := post(t, s, "/v1/completions",
		`{"prompt":"a","max_tokens":0}`); response.StatusCode != http.StatusOK {
		t.Error("a draining gateway does not answer")
	}
}

func TestModels(t *testing.T) {
	s, _ := server(t, &upstream{})
	for path, want := range map[string]string{"/v1/models": `"data":[{"id":"tiny/model"`,
		"/v1/models/tiny/model": `{"id":"tiny/model"`,
		"/v1/models/other":      `"code":"model_not_found"`} {
		request, _ := http.NewRequest("GET", s.URL+path, nil)
		if _, body := read(t, request); !strings.Contains(body, want) {
			t.Error(path, body)
		}
	}
}

func TestTokenize(t *testing.T) {
	s, _ := server(t, &upstream{})
	_, body := post(t, s, "/tokenize", `{"prompt":"Once </s>"}`)
	got := decode[tokenized](t, body)
	_, text := post(t, s, "/detokenize", strings.Replace(body, `"count"`, `"x"`, 1))
	if got.Count != len(got.Tokens) || got.MaxLen != 512 || text != "{\"prompt\":\"Once </s>\"}\n" {
		t.Error(body, text)
	}
	_, body = post(t, s, "/tokenize", `{"messages":[{"role":"user","content":"a"}]}`)
	if ids := decode[tokenized](t, body).Tokens; ids[0] != 1 {
		t.Error(body)
	}
	if _, body = post(t, s, "/tokenize", `{"prompt":""}`); !strings.Contains(body, `"tokens":[]`) {
		t.Error(body)
	}
}

func TestNative(t *testing.T) {
	u := storyteller(t)
	u.chunk = 3
	s, _ := server(t, u)
	_, body := post(t, s, "/v1/generate", `{"tokens":[1,2],"logprobs":2,"max_tokens":7,"model":"tiny/model"}`)
	lines := strings.Split(strings.TrimSpace(body), "\n")
	first := decode[nativeTokens](t, lines[0])
	if len(lines) != 4 || len(first.Tokens) != 3 || len(first.Logprobs) != 3 || len(first.TopIDs[2]) != 2 ||
		first.TopLogprobs[1][1] != -0.5 {
		t.Error(body)
	}
	if done := decode[nativeDone](t, lines[3]).Done; done.FinishReason != "length" || done.Usage.Generated != 7 ||
		done.Seed != 7 {
		t.Error(body)
	}
	_, body = post(t, s, "/v1/score", `{"tokens":[1,2,3,4],"top":1,"from":2}`)
	lines = strings.Split(strings.TrimSpace(body), "\n")
	if score := decode[scoreLine](t, lines[0]); len(lines) != 2 || score.Index != 2 || len(score.Logprobs) != 2 ||
		score.TopIDs[1][0] != 100 {
		t.Error(body)
	}
	u.failure = refusal(500)
	if _, body = post(t, s, "/v1/generate", `{"tokens":[1,2]}`); !strings.Contains(body,
		`{"error":{"message":"because"`) {
		t.Error(body)
	}
}

// TestNoTokenizer: a model of token ids alone can still be used for what it is.
func TestNoTokenizer(t *testing.T) {
	s, _ := server(t, storyteller(t), func(o *Options) { o.ModelFolder = t.TempDir() })
	for path, want := range map[string]int{"/v1/completions": 501, "/v1/chat/completions": 501, "/tokenize": 501,
		"/v1/generate": 200} {
		response, body := post(t, s, path, `{"prompt":"a","messages":[{"role":"user","content":"a"}],"tokens":[1,2]}`)
		if path == "/tokenize" {
			response, body = post(t, s, path, `{"prompt":"a"}`)
		}
		if response.StatusCode != want {
			t.Error(path, response.Status, body)
		}
	}
}

func TestMetricsAndLog(t *testing.T) {
	var log bytes.Buffer
	s, g := server(t, storyteller(t), func(o *Options) { o.Log = slog.New(slog.NewJSONHandler(&log, nil)) })
	post(t, s, "/v1/completions", ask1, "X-Request-Id", "rid", "traceparent",
		"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	post(t, s, "/v1/completions", `{"prompt":"a","model":"x"}`)
	post(t, s, "/nowhere/1", `{}`)
	page := httptest.NewRecorder()
	eventually(t, "all are counted", func() bool {
		page = httptest.NewRecorder()
		g.metrics.handler.ServeHTTP(page, httptest.NewRequest("GET", "/metrics", nil))
		return strings.Contains(page.Body.String(), `route="other"`)
	})
	for _, line := range []string{
		`colibri_gateway_requests_total{code="200",route="/v1/completions"} 1`,
		`colibri_gateway_requests_total{code="404",route="/v1/completions"} 1`,
		`colibri_gateway_requests_total{code="404",route="other"} 1`,
		`colibri_gateway_errors_total{code="model_not_found"} 1`,
		`colibri_gateway_time_to_first_token_seconds_count{route="/v1/completions"} 1`,
		`colibri_gateway_tokens_total{kind="generated"} 16`,
		`colibri_gateway_build_info{go="`,
	} {
		if !strings.Contains(page.Body.String(), line) {
			t.Errorf("%s is not in\n%s", line, page.Body)
		}
	}
	var line map[string]any
	if err := json.NewDecoder(&log).Decode(&line); err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]any{"request_id": "rid", "status": 200.0, "path": "/v1/completions",
		"generated_tokens": 16.0,
		"finish":           "length", "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"} {
		if line[key] != want {
			t.Error(key, line[key])
		}
	}
}

func TestPanic(t *testing.T) {
	u := storyteller(t)
	s, _ := server(t, u)
	u.output = nil
	u.finish = "panic"
	if response, body := post(t, s, "/v1/completions", ask1); response.StatusCode != 500 || strings.Contains(body,
		"deliberate") {
		t.Error(response.Status, body)
	}
}

func TestOperations(t *testing.T) {
	_, g := server(t, &upstream{})
	s := httptest.NewServer(g.Operations())
	defer s.Close()
	for path, want := range map[string]int{"/metrics": 200, "/health/live": 200, "/v1/models": 404} {
		response, err := http.Get(s.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		if response.StatusCode != want {
			t.Error(path, response.Status)
		}
	}
}
