package gateway

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"mime"
	"net/http"
	"os"
	"strconv"
	"time"

	colibri "colibri/client/go"
	"colibri/client/go/gateway/apikeys"
	"colibri/client/go/gateway/strictjson"
)

const (
	maxDepth       = 32
	requestHeader  = "X-Request-Id"
	deadlineHeader = "X-Deadline-Ms"
)

// exchange is one request and its answer, and what the log and the metrics will say of it.
type exchange struct {
	w   http.ResponseWriter
	r   *http.Request
	rc  *http.ResponseController
	cfg *Options

	id    string       // request id: the client's, or one of ours
	trace *string      // W3C traceparent, if a valid one came
	key   *apikeys.Key // nil: no keys are asked for
	start time.Time
	route string // pattern of the route

	names map[string]string // what the daemon's fields are called in this request, if otherwise

	status  int           // 0 until the answer has begun
	first   time.Duration // from start to the first tokens; 0: there were none
	usage   colibri.Usage // of an answer that came to its end
	failure string        // code of the error
	facts   []slog.Attr   // for the log
}

// note adds to the log line of the request.
func (x *exchange) note(facts ...slog.Attr) { x.facts = append(x.facts, facts...) }

// tenant is on whose behalf the daemon works, or nil.
func (x *exchange) tenant() *string {
	if x.key == nil || x.key.Tenant == "" {
		return nil
	}
	return &x.key.Tenant
}

// apiError is asAPIError in the words of this request.
func (x *exchange) apiError(err error) *apiError {
	e := asAPIError(err)
	if name, renamed := x.names[e.param]; renamed {
		e.param = name
	}
	return e
}

// read takes the body's fields.
func (x *exchange) read(f fields) error {
	object, err := x.object()
	if err != nil {
		return err
	}
	return f.bind(object)
}

// object reads the body, a JSON object, within the limits of size and time.
func (x *exchange) object() (strictjson.Raw, error) {
	kind, _, err := mime.ParseMediaType(x.r.Header.Get("Content-Type"))
	if err != nil || kind != "application/json" {
		return nil, newError(http.StatusUnsupportedMediaType, "unsupported_media_type",
			"Content-Type must be application/json")
	}
	if x.r.Header.Get("Content-Encoding") != "" {
		return nil, newError(http.StatusUnsupportedMediaType, "unsupported_media_type",
			"the body must not be compressed")
	}
	body, err := x.body()
	if err != nil {
		return nil, err
	}
	raw, err := strictjson.Parse(body, maxDepth)
	if err != nil {
		return nil, err
	}
	if raw.Kind() != strictjson.Object {
		return nil, newError(http.StatusBadRequest, "invalid_json", "the body must be a JSON object")
	}
	return raw, nil
}

func (x *exchange) body() ([]byte, error) {
	if x.r.ContentLength > x.cfg.MaxBody {
		return nil, &http.MaxBytesError{Limit: x.cfg.MaxBody}
	}
	if err := x.rc.SetReadDeadline(time.Now().Add(x.cfg.BodyTime)); err != nil {
		return nil, err
	}
	var body bytes.Buffer
	if _, err := io.Copy(&body, http.MaxBytesReader(x.w, x.r.Body, x.cfg.MaxBody)); err != nil {
		var tooLarge *http.MaxBytesError
		if errors.As(err, &tooLarge) {
			return nil, err
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			e := newError(http.StatusRequestTimeout, "body_timeout", "the body did not come within %v", x.cfg.BodyTime)
			e.hangUp = true
			return nil, e
		}
		e := newError(http.StatusBadRequest, "incomplete_body", "the body ended too early or is malformed")
		e.hangUp = true
		return nil, e
	}
	// From here on the connection is only watched for its end: a deadline would look like one.
	return body.Bytes(), x.rc.SetReadDeadline(time.Time{})
}

// deadline is the header's value in milliseconds, or otherwise.
func (x *exchange) deadline(otherwise uint64) (uint64, error) {
	value := x.r.Header.Get(deadlineHeader)
	if value == "" {
		return otherwise, nil
	}
	ms, err := strconv.ParseUint(value, 10, 64)
	if err != nil || ms < 1 || ms > maxDeadlineMS {
		return 0, invalid(deadlineHeader,
			"must be a whole number of milliseconds from 1 to "+strconv.Itoa(maxDeadlineMS))
	}
	return ms, nil
}

// json sends a whole answer.
func (x *exchange) json(status int, value any) error {
	encoded, err := encode(value)
	if err != nil {
		return err
	}
	return x.send(status, "application/json", encoded)
}

func (x *exchange) send(status int, kind string, body []byte) error {
	h := x.w.Header()
	h.Set("Content-Type", kind)
	h.Set("Content-Length", strconv.Itoa(len(body)))
	if err := x.begin(status); err != nil {
		return unread(err)
	}
	if _, err := x.w.Write(body); err != nil {
		return unread(err)
	}
	return nil
}

// begin sends the headers; the client then has WriteTime for each piece of the answer.
func (x *exchange) begin(status int) error {
	if err := x.rc.SetWriteDeadline(time.Now().Add(x.cfg.WriteTime)); err != nil {
		return err
	}
	x.status = status
	x.w.WriteHeader(status)
	return nil
}

// fail sends an error, if the answer has not begun: a stream tells its errors itself. It is noted for log and metrics
// in any case.
func (x *exchange) fail(err error) {
	e := x.apiError(err)
	// A body that cannot be read ends the context too.
	if x.r.Context().Err() != nil && e.status != statusClientLeft && !e.hangUp {
		e = unread(err)
	}
	x.failure = e.code
	x.note(slog.String("error", e.code))
	if e.status >= http.StatusInternalServerError || e.status == statusClientLeft {
		x.note(slog.String("cause", err.Error()))
	} else {
		x.note(slog.String("message", e.message))
	}
	switch {
	case e.status == statusClientLeft:
		x.status = statusClientLeft
	case x.status == 0:
		e.setHeaders(x.w.Header())
		_ = x.json(e.status, e.body()) // the client may have gone meanwhile
	}
}

// encode is JSON without the escapes for HTML.
func encode(value any) ([]byte, error) {
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	err := encoder.Encode(value)
	return out.Bytes(), err
}
