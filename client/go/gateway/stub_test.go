package gateway

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	colibri "colibri/client/go"
	"colibri/client/go/gateway/serve"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// upstream is a daemon's place at the interface of transports: it answers every request with the same tokens.
type upstream struct {
	output  []uint32
	chunk   int           // tokens at once; 0: one
	finish  string        // finish_reason
	refusal error         // instead of a stream
	failure error         // after the output
	hold    chan struct{} // if there, tokens come when it is closed

	mu       sync.Mutex
	requests []colibri.Generate
	live     atomic.Int64
	aborted  atomic.Int64
	health   colibri.HealthReply
	lost     error // of every other question
}

var servedModel = colibri.ModelInfo{Name: "tiny/model", ID: "0123456789", Fingerprint: "abcdef0123", VocabSize: 2048,
	MaxLen: 512}

func (u *upstream) Generate(ctx context.Context, request *colibri.Generate) (*colibri.Stream, error) {
	u.mu.Lock()
	u.requests = append(u.requests, *request)
	u.mu.Unlock()
	if u.refusal != nil {
		return nil, u.refusal
	}
	u.live.Add(1)
	return &colibri.Stream{Reader: &flow{upstream: u, ctx: ctx, request: request}}, nil
}

func (u *upstream) Score(_ context.Context, request *colibri.Score) (*colibri.ScoreResult, error) {
	n := len(request.Tokens) - int(request.Start)
	result := &colibri.ScoreResult{From: request.Start, Done: &colibri.Done{FinishReason: "length"}}
	result.Done.Usage.Prompt = uint64(len(request.Tokens))
	for i := range n {
		result.Logprobs = append(result.Logprobs, -float32(i+1))
		for k := range request.Top {
			result.TopIDs = append(result.TopIDs, uint32(100+k))
			result.TopLogprobs = append(result.TopLogprobs, -float32(k))
		}
	}
	return result, u.refusal
}

func (u *upstream) Check(context.Context, *colibri.TokenCheck) (*colibri.TokenCheckReply, error) {
	return &colibri.TokenCheckReply{}, u.lost
}
func (u *upstream) Health(context.Context) (*colibri.HealthReply, error) { return &u.health, u.lost }
func (u *upstream) Stats(context.Context) (*colibri.StatsReply, error) {
	return &colibri.StatsReply{}, u.lost
}
func (u *upstream) Model(context.Context) (*colibri.ModelInfo, error) { return &servedModel, u.lost }
func (u *upstream) Close() error                                      { return nil }

// asked is the newest request.
func (u *upstream) asked() colibri.Generate {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.requests[len(u.requests)-1]
}

// flow is one stream of it.
type flow struct {
	upstream *upstream
	ctx      context.Context
	request  *colibri.Generate
	sent     int
	done     *colibri.Done
	closed   sync.Once
}

func (f *flow) Next() (*colibri.TokensOut, error) {
	u := f.upstream
	if u.hold != nil {
		select {
		case <-u.hold:
		case <-f.ctx.Done():
		}
	}
	if err := f.ctx.Err(); err != nil {
		f.Close()
		return nil, err
	}
	left := u.output[f.sent:min(len(u.output), int(f.request.MaxTokens))]
	if len(left) == 0 && u.failure != nil {
		return nil, u.failure
	}
	if len(left) == 0 && u.finish == "panic" {
		panic("deliberate")
	}
	if len(left) == 0 {
		usage := colibri.Usage{Prompt: uint64(len(f.request.Tokens)), Generated: uint64(f.sent), Cached: 1}
		f.done = &colibri.Done{FinishReason: u.finish, Usage: usage, Seed: 7}
		return nil, io.EOF
	}
	ids := left[:min(max(u.chunk, 1), len(left))]
	chunk := &colibri.TokensOut{IDs: ids, Index: uint64(f.sent), CachedTokens: new(uint64)}
	if f.request.Logprobs != nil {
		for i := range ids {
			chunk.Logprobs = append(chunk.Logprobs, -float32(f.sent+i+1)/4)
			for k := range *f.request.Logprobs {
				chunk.TopIDs = append(chunk.TopIDs, uint32(100+k))
				chunk.TopLogprobs = append(chunk.TopLogprobs, -float32(k)/2)
			}
		}
	}
	f.sent += len(ids)
	return chunk, nil
}

func (f *flow) Prompt() *colibri.ScoreResult { return nil }
func (f *flow) Done() *colibri.Done          { return f.done }
func (f *flow) Cancel(string)                { f.Close() }
func (f *flow) Close() {
	f.closed.Do(func() {
		f.upstream.live.Add(-1)
		if f.done == nil {
			f.upstream.aborted.Add(1)
		}
	})
}

// modelFolder has the tokenizer of the tiny model of the tests and a chat template.
func modelFolder(t testing.TB) string {
	t.Helper()
	tokenizer, err := os.ReadFile("../../../tests/fixtures/tiny/tokenizer.json")
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	template := `{% for m in messages %}{{ '<s>' + m.role + ': ' + m.content + '</s>' }}{% endfor %}` +
		`{% if add_generation_prompt %}{{ '<s>assistant: ' }}{% endif %}`
	config, _ := json.Marshal(map[string]string{"chat_template": template, "bos_token": "<s>", "eos_token": "</s>"})
	for name, data := range map[string][]byte{"tokenizer.json": tokenizer, "tokenizer_config.json": config} {
		if err := os.WriteFile(filepath.Join(folder, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return folder
}

// server is a gateway in front of u on a port of its own.
func server(t testing.TB, u *upstream, change ...func(*Options)) (*httptest.Server, *Gateway) {
	t.Helper()
	o := Options{Client: u, Log: slog.New(slog.DiscardHandler), Registry: prometheus.NewRegistry(), Version: "1.2.3",
		ModelFolder: modelFolder(t), Metrics: true}
	for _, change := range change {
		change(&o)
	}
	g := New(o)
	s := httptest.NewUnstartedServer(g)
	s.Listener = serve.Bounded(s.Listener)
	s.Start()
	t.Cleanup(func() {
		s.Close()
		http.DefaultClient.CloseIdleConnections()
	})
	return s, g
}

// post sends a body and reads the answer.
func post(t testing.TB, s *httptest.Server, path, body string, headers ...string) (*http.Response, string) {
	t.Helper()
	request, err := http.NewRequest("POST", s.URL+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	for pair := range slices.Chunk(headers, 2) {
		request.Header.Set(pair[0], pair[1])
	}
	return read(t, request)
}

func read(t testing.TB, request *http.Request) (*http.Response, string) {
	t.Helper()
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	checkDocumented(t, request, response, answer)
	return response, string(answer)
}

// events are the data of a stream of events.
func eventsOf(t testing.TB, stream string) []string {
	t.Helper()
	var events []string
	for event := range strings.SplitSeq(strings.TrimSuffix(stream, "\n\n"), "\n\n") {
		data, ok := strings.CutPrefix(event, "data: ")
		if !ok && !strings.HasPrefix(event, ":") {
			t.Fatalf("%q is no event", event)
		}
		if ok {
			events = append(events, data)
		}
	}
	return events
}

// eventually waits for a condition.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !condition(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("waited in vain: " + what)
		}
	}
}

// encodeTiny is a text in the tiny model's tokens.
func encodeTiny(t testing.TB, spelled string) []uint32 {
	t.Helper()
	m := &models{client: &upstream{}, folder: modelFolder(t)}
	served, err := m.current(context.Background())
	if err != nil || served.text == nil {
		t.Fatal(err, served.textErr)
	}
	ids, err := encodeText(served.text, spelled, false, "")
	if err != nil {
		t.Fatal(err)
	}
	return ids
}

// newPipe is a body that is written later; it is closed at the end of the test.
func newPipe(t testing.TB) (*io.PipeReader, *io.PipeWriter) {
	reader, writer := io.Pipe()
	t.Cleanup(func() { writer.Close() })
	return reader, writer
}
