package gateway

import (
	"net/http"
	"runtime"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	colibri "colibri/client/go"
)

// metrics are the gateway's own; the daemon has its own too. Routes and codes are closed sets: no label comes from a
// client.
type metrics struct {
	handler  http.Handler // of /metrics
	inFlight prometheus.Gauge
	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
	first    *prometheus.HistogramVec
	errors   *prometheus.CounterVec
	tokens   *prometheus.CounterVec
}

var (
	requestBuckets = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600}
	firstBuckets   = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60}
)

func newMetrics(registry *prometheus.Registry, version string) *metrics {
	m := &metrics{
		handler: promhttp.HandlerFor(registry, promhttp.HandlerOpts{}),
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "colibri_gateway_requests_in_flight", Help: "HTTP requests being answered."}),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "colibri_gateway_requests_total", Help: "HTTP requests answered; code 499: the client left."},
			[]string{"route", "code"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "colibri_gateway_request_duration_seconds", Help: "From headers read to the end of the answer.",
			Buckets: requestBuckets}, []string{"route", "code"}),
		first: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "colibri_gateway_time_to_first_token_seconds", Help: "From headers read to the first tokens.",
			Buckets: firstBuckets}, []string{"route"}),
		errors: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "colibri_gateway_errors_total", Help: "Requests that failed, by the error's code in the answer."},
			[]string{"code"}),
		tokens: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "colibri_gateway_tokens_total", Help: "Tokens of requests that were answered to the end."},
			[]string{"kind"}),
	}
	build := prometheus.NewGauge(prometheus.GaugeOpts{Name: "colibri_gateway_build_info", Help: "Always 1.",
		ConstLabels: prometheus.Labels{"version": version, "go": runtime.Version()}})
	build.Set(1)
	registry.MustRegister(m.inFlight, m.requests, m.seconds, m.first, m.errors, m.tokens, build)
	return m
}

func (m *metrics) observe(x *exchange, took time.Duration) {
	code := strconv.Itoa(x.status)
	m.requests.WithLabelValues(x.route, code).Inc()
	m.seconds.WithLabelValues(x.route, code).Observe(took.Seconds())
	if x.first > 0 {
		m.first.WithLabelValues(x.route).Observe(x.first.Seconds())
	}
	if x.failure != "" {
		m.errors.WithLabelValues(x.failure).Inc()
	}
	m.tokens.WithLabelValues("prompt").Add(float64(x.usage.Prompt))
	m.tokens.WithLabelValues("cached").Add(float64(x.usage.Cached))
	m.tokens.WithLabelValues("generated").Add(float64(x.usage.Generated))
}

func showMetrics(d *deps, x *exchange) error {
	x.status = http.StatusOK
	d.metrics.handler.ServeHTTP(x.w, x.r)
	return nil
}

// count notes the usage of an answer that came to its end.
func (x *exchange) count(u colibri.Usage) { x.usage = u }

// firstTokens notes when the first tokens came.
func (x *exchange) firstTokens() {
	if x.first == 0 {
		x.first = time.Since(x.start)
	}
}
