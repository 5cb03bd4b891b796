package gateway

import (
	"net/http"
	"slices"
	"strings"
)

// route: guarded ones ask for a key and count against the limits; the others say nothing that needs either.
type route struct {
	method, path string
	handler      handler
	guarded      bool
}

const metricsPath = "/metrics"

// routes are all there are; openapi.json describes each.
var routes = []route{
	{"POST", "/v1/completions", completions, true},
	{"POST", "/v1/chat/completions", chat, true},
	{"GET", "/v1/models", listModels, true},
	{"GET", "/v1/models/{model...}", oneModel, true},
	{"POST", "/v1/generate", generate, true},
	{"POST", "/v1/score", score, true},
	{"POST", "/tokenize", tokenize, true},
	{"POST", "/detokenize", detokenize, true},
	{"GET", "/health/live", live, false},
	{"GET", "/health/ready", ready, false},
	{"GET", metricsPath, showMetrics, false},
	{"GET", "/openapi.json", openAPI, false},
}

// unknownRoute answers for every other path, and for other methods of these. It has one label in the metrics.
var unknownRoute route

func init() { unknownRoute = route{path: "other", handler: notFound} }

func notFound(_ *deps, x *exchange) error {
	path := x.r.URL.Path
	var allowed []string
	for _, route := range routes {
		prefix, isPrefix := strings.CutSuffix(route.path, "{model...}")
		if route.path == path || isPrefix && strings.HasPrefix(path, prefix) {
			allowed = append(allowed, route.method)
		}
	}
	if len(allowed) > 0 && !slices.Contains(allowed, x.r.Method) {
		e := newError(http.StatusMethodNotAllowed, "method_not_allowed", "%.200s takes %s", path, strings.Join(allowed,
			", "))
		e.allow = strings.Join(allowed, ", ")
		return e
	}
	return newError(http.StatusNotFound, "not_found", "there is no %.200s here; GET /openapi.json lists what there is",
		path)
}
