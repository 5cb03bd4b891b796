// Package gateway answers HTTP in OpenAI's words from a Colibri daemon. It needs a colibri.Client, whatever its
// transport, and the folder of the model that the daemon serves, for the tokenizer and the chat template.
//
// routes.go has every path; each has its handler in a file of its own, a function of its dependencies and one exchange.
// What a handler may accept is a table (fields); what it returns as an error becomes an answer in one place
// (errors.go).
package gateway

import (
	"context"
	"log/slog"
	"net/http"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	colibri "colibri/client/go"
	"colibri/client/go/gateway/apikeys"
)

// Options of a Gateway. Client, Log and Registry must be set; New fills in the rest.
type Options struct {
	Client   colibri.Client
	Log      *slog.Logger
	Registry *prometheus.Registry
	Version  string

	ModelFolder string        // instead of the folder that the daemon names
	Keys        *apikeys.File // nil: whoever can connect may ask
	Metrics     bool          // /metrics is served here too

	MaxBody     int64         // bytes of a request's body
	BodyTime    time.Duration // for a body to arrive
	WriteTime   time.Duration // without progress until a client that does not read is given up
	KeepAlive   time.Duration // of silence until a comment is sent in a stream
	MaxChoices  int           // prompts × n of a request
	MaxRequests int           // at once, of all clients
}

// Defaults of Options.
const (
	DefaultMaxBody     = 4 << 20
	DefaultBodyTime    = 30 * time.Second
	DefaultWriteTime   = 30 * time.Second
	DefaultKeepAlive   = 15 * time.Second
	DefaultMaxChoices  = 64
	DefaultMaxRequests = 1024
)

// Gateway is an http.Handler.
type Gateway struct {
	options  Options
	deps     deps
	mux      *http.ServeMux
	metrics  *metrics
	live     atomic.Int64
	draining atomic.Bool
}

// deps are what handlers depend on.
type deps struct {
	client     colibri.Client
	models     *models
	metrics    *metrics
	options    *Options
	isDraining func() bool
}

// handler answers, or returns why not; then asAPIError is the answer.
type handler func(d *deps, x *exchange) error

// New makes a gateway. It does not connect.
func New(o Options) *Gateway {
	fill(&o.MaxBody, DefaultMaxBody)
	fill(&o.BodyTime, DefaultBodyTime)
	fill(&o.WriteTime, DefaultWriteTime)
	fill(&o.KeepAlive, DefaultKeepAlive)
	fill(&o.MaxChoices, DefaultMaxChoices)
	fill(&o.MaxRequests, DefaultMaxRequests)
	g := &Gateway{options: o, mux: http.NewServeMux(), metrics: newMetrics(o.Registry, o.Version)}
	g.deps = deps{client: o.Client, models: &models{client: o.Client, folder: o.ModelFolder}, metrics: g.metrics,
		options: &g.options, isDraining: g.draining.Load}
	for _, route := range routes {
		if route.path != metricsPath || o.Metrics {
			g.mux.Handle(route.method+" "+route.path, g.serve(route))
		}
	}
	g.mux.Handle("/", g.serve(unknownRoute))
	return g
}

func fill[T comparable](value *T, otherwise T) {
	var unset T
	if *value == unset {
		*value = otherwise
	}
}

// Drain makes /health/ready say no from now on. Requests are still answered.
func (g *Gateway) Drain() { g.draining.Store(true) }

// Operations is what a listener of its own may have: health and metrics.
func (g *Gateway) Operations() http.Handler {
	mux := http.NewServeMux()
	for _, route := range routes {
		if !route.guarded {
			mux.Handle(route.method+" "+route.path, g.serve(route))
		}
	}
	mux.Handle("/", g.serve(unknownRoute))
	return mux
}

func (g *Gateway) ServeHTTP(w http.ResponseWriter, r *http.Request) { g.mux.ServeHTTP(w, r) }

// serve is what every request goes through.
func (g *Gateway) serve(route route) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		x := g.exchange(route, w, r)
		g.metrics.inFlight.Inc()
		defer g.metrics.inFlight.Dec()
		defer g.finish(x)
		defer g.rescue(x)
		if err := g.admitted(route, x); err != nil {
			x.fail(err)
		}
	})
}

func (g *Gateway) exchange(route route, w http.ResponseWriter, r *http.Request) *exchange {
	x := &exchange{w: w, r: r, rc: http.NewResponseController(w), cfg: &g.options, start: time.Now(), route: route.path}
	if x.id = r.Header.Get(requestHeader); !validID(x.id) {
		x.id = newID()
	}
	w.Header().Set(requestHeader, x.id)
	if parent := r.Header.Get("traceparent"); validTrace(parent) {
		x.trace = &parent
	}
	return x
}

// admitted is the handler behind the limits and the key.
func (g *Gateway) admitted(route route, x *exchange) error {
	if !route.guarded {
		return route.handler(&g.deps, x)
	}
	if g.live.Add(1) > int64(g.options.MaxRequests) {
		g.live.Add(-1)
		e := newError(http.StatusTooManyRequests, "gateway_busy", "%d requests are being answered; try again soon",
			g.options.MaxRequests)
		e.retryAfter = time.Second
		return e
	}
	defer g.live.Add(-1)
	leave, err := authorize(g.options.Keys, x)
	if err != nil {
		return err
	}
	defer leave()
	return route.handler(&g.deps, x)
}

// rescue answers for a handler that panicked; a stream is cut, so that nobody takes it for whole.
func (g *Gateway) rescue(x *exchange) {
	cause := recover()
	if cause == nil {
		return
	}
	g.options.Log.Error("panic", "request_id", x.id, "cause", cause, "stack", string(debug.Stack()))
	begun := x.status != 0
	x.fail(newError(http.StatusInternalServerError, "internal",
		"an internal error; the gateway's log has it under the request id"))
	if begun {
		g.finish(x)
		panic(http.ErrAbortHandler)
	}
}

// finish is the log line and the metrics of a request.
func (g *Gateway) finish(x *exchange) {
	took := time.Since(x.start)
	g.metrics.observe(x, took)
	level := slog.LevelInfo
	if x.status >= http.StatusInternalServerError {
		level = slog.LevelWarn
	}
	facts := []slog.Attr{
		slog.String("request_id", x.id), slog.String("method", x.r.Method), slog.String("path", x.route),
		slog.Int("status", x.status), slog.Float64("ms", milliseconds(took)), slog.String("remote", x.r.RemoteAddr),
	}
	if x.trace != nil {
		facts = append(facts, slog.String("traceparent", *x.trace))
	}
	if x.key != nil {
		facts = append(facts, slog.String("key", x.key.Name))
	}
	if x.first > 0 {
		facts = append(facts, slog.Float64("first_ms", milliseconds(x.first)))
	}
	if x.usage.Prompt > 0 {
		facts = append(facts, slog.Uint64("prompt_tokens", x.usage.Prompt), slog.Uint64("cached_tokens",
			x.usage.Cached),
			slog.Uint64("generated_tokens", x.usage.Generated))
	}
	g.options.Log.LogAttrs(context.Background(), level, "request", append(facts, x.facts...)...)
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
