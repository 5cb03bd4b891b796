package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"maps"
	"mime"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"

	colibri "colibri/client/go"
	"colibri/client/go/text"
)

// documented is openapi.json, which must be valid itself.
var documented = sync.OnceValues(func() (*openapi3.T, error) {
	doc, err := openapi3.NewLoader().LoadFromData(document)
	if err != nil {
		return nil, err
	}
	return doc, doc.Validate(context.Background())
})

func mustDocument(t testing.TB) *openapi3.T {
	t.Helper()
	doc, err := documented()
	if err != nil {
		t.Fatal(err)
	}
	return doc
}

// checkDocumented holds an answer of a test against the document: status, type and every field.
func checkDocumented(t testing.TB, request *http.Request, response *http.Response, body []byte) {
	t.Helper()
	operation := findOperation(mustDocument(t), request.Method, request.URL.Path)
	if operation == nil {
		return // 404 and 405
	}
	described := operation.Responses.Status(response.StatusCode)
	if described == nil {
		t.Errorf("%s %s: status %d is not in the document", request.Method, request.URL.Path, response.StatusCode)
		return
	}
	kind, _, _ := mime.ParseMediaType(response.Header.Get("Content-Type"))
	content := described.Value.Content.Get(kind)
	if content == nil {
		t.Errorf("%s %s: %d %s is not in the document", request.Method, request.URL.Path, response.StatusCode, kind)
		return
	}
	switch kind {
	case "application/json":
		checkSchema(t, content.Schema.Value, body)
	case "text/event-stream":
		schema := named(t, content.Schema.Value.Extensions["x-chunk"])
		for _, event := range eventsOf(t, string(body)) {
			if event != "[DONE]" && !strings.HasPrefix(event, `{"error"`) {
				checkSchema(t, schema, []byte(event))
			}
		}
	case "application/x-ndjson":
		schema := named(t, content.Schema.Value.Extensions["x-line"])
		for line := range bytes.Lines(body) {
			checkSchema(t, schema, line)
		}
	}
}

func findOperation(doc *openapi3.T, method, path string) *openapi3.Operation {
	if strings.HasPrefix(path, "/v1/models/") {
		path = "/v1/models/{model}"
	}
	if item := doc.Paths.Value(path); item != nil {
		return item.GetOperation(method)
	}
	return nil
}

// named is a schema of components.
func named(t testing.TB, reference any) *openapi3.Schema {
	name, _ := strings.CutPrefix(reference.(string), "#/components/schemas/")
	schema := mustDocument(t).Components.Schemas[name]
	if schema == nil {
		t.Fatalf("no schema %s", name)
	}
	return schema.Value
}

func checkSchema(t testing.TB, schema *openapi3.Schema, data []byte) {
	t.Helper()
	var value any
	if err := json.Unmarshal(data, &value); err != nil {
		t.Errorf("%v: %s", err, data)
		return
	}
	if err := schema.VisitJSON(value); err != nil {
		t.Errorf("%.300s\n%v", data, err)
	}
}

func TestEveryRouteIsDocumented(t *testing.T) {
	doc := mustDocument(t)
	var there, described []string
	for _, route := range routes {
		there = append(there, route.method+" "+strings.Replace(route.path, "...", "", 1))
	}
	for path, item := range doc.Paths.Map() {
		for method, operation := range item.Operations() {
			described = append(described, method+" "+path)
			open := operation.Security != nil && len(*operation.Security) == 0
			i := slices.IndexFunc(routes, func(r route) bool {
				return r.method == method && strings.Replace(r.path, "...", "", 1) == path
			})
			if i >= 0 && routes[i].guarded == open {
				t.Errorf("%s %s: whether a key is asked for", method, path)
			}
		}
	}
	slices.Sort(there)
	slices.Sort(described)
	if !slices.Equal(there, described) {
		t.Errorf("there:     %v\ndescribed: %v", there, described)
	}
}

func TestEveryFieldIsDocumented(t *testing.T) {
	generate, score := colibri.NewGenerate(), colibri.NewScore()
	tables := map[string]fields{
		"CompletionRequest": newCompletionAsk().fields(1), "ChatRequest": newChatAsk().fields(1),
		"GenerateRequest": native(&generate),
		"ScoreRequest":    nativeScore(&score), "TokenizeRequest": new(tokenizeAsk).fields(),
		"DetokenizeRequest": new(detokenizeAsk).fields(),
		"Message":           messageFields(new(text.Message)),
	}
	for name, table := range tables {
		described := map[string]bool{}
		collect(named(t, name), described)
		for field := range maps.Keys(table) {
			if !described[field] {
				t.Errorf("%s.%s is read and not described", name, field)
			}
			delete(described, field)
		}
		if len(described) > 0 {
			t.Errorf("%s: described and not read: %v", name, described)
		}
	}
}

// collect gathers the properties of a schema and of what it is made of, without those it says are ignored.
func collect(schema *openapi3.Schema, into map[string]bool) {
	for name, property := range schema.Properties {
		if property.Value.Extensions["x-ignored"] == nil {
			into[name] = true
		}
	}
	for _, part := range schema.AllOf {
		collect(part.Value, into)
	}
}

func TestDocumentIsServed(t *testing.T) {
	s, _ := server(t, &upstream{})
	request, _ := http.NewRequest("GET", s.URL+"/openapi.json", nil)
	if _, body := read(t, request); body != string(document) {
		t.Error(body)
	}
}
