package gateway

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	colibri "colibri/client/go"
	"colibri/client/go/gateway/strictjson"
)

// statusClientLeft is for logs and metrics: nobody is there to read it.
const statusClientLeft = 499

// apiError is an answer in OpenAI's form. retryAfter 0: no such header.
type apiError struct {
	status     int
	kind       string
	code       string
	param      string
	message    string
	retryAfter time.Duration
	allow      string // header Allow of 405
	hangUp     bool   // the connection cannot be used any more
}

func (e *apiError) Error() string { return e.message }

// kinds are OpenAI's "type" by status; others below 500 are invalid_request_error, from 500 on server_error.
var kinds = map[int]string{
	http.StatusUnauthorized:       "authentication_error",
	http.StatusForbidden:          "permission_error",
	http.StatusTooManyRequests:    "rate_limit_error",
	http.StatusGatewayTimeout:     "timeout_error",
	http.StatusServiceUnavailable: "service_unavailable_error",
}

// codeNames are OpenAI's own names where it has one; other codes are called as in the protocol, in small letters.
var codeNames = map[colibri.Code]string{
	colibri.CodePromptTooLong: "context_length_exceeded",
	colibri.CodeModelMismatch: "model_not_found",
}

func newError(status int, code, format string, values ...any) *apiError {
	kind, listed := kinds[status]
	switch {
	case listed:
	case status >= http.StatusInternalServerError:
		kind = "server_error"
	default:
		kind = "invalid_request_error"
	}
	return &apiError{status: status, kind: kind, code: code, message: fmt.Sprintf(format, values...)}
}

// invalid is a parameter that has a wrong value. reason goes on after the parameter's name: "must be ...".
func invalid(param, reason string) *apiError {
	e := newError(http.StatusBadRequest, "invalid_argument", "%s %s", param, reason)
	e.param = param
	return e
}

func modelNotFound(asked, served string) *apiError {
	e := newError(http.StatusNotFound, "model_not_found", "the model %.200q does not exist here; %q is served", asked,
		served)
	e.param = "model"
	return e
}

// unread is an answer that could not be delivered.
func unread(err error) *apiError {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return newError(statusClientLeft, "client_too_slow", "the client does not read")
	}
	return newError(statusClientLeft, "client_left", "the client left")
}

// asAPIError translates whatever a handler returned. It is the only place that knows the errors of other packages.
func asAPIError(err error) *apiError {
	var (
		own        *apiError
		upstream   *colibri.Error
		misspoken  *colibri.ProtocolError
		connection *colibri.ConnectionError
		syntax     *strictjson.SyntaxError
		tooLarge   *http.MaxBytesError
	)
	switch {
	case errors.As(err, &own):
		return own
	case errors.As(err, &upstream):
		return fromDaemon(upstream)
	case errors.As(err, &syntax):
		return newError(http.StatusBadRequest, "invalid_json", "the body is not valid JSON: %v", syntax)
	case errors.As(err, &tooLarge):
		e := newError(http.StatusRequestEntityTooLarge, "body_too_large", "the body is larger than %d bytes",
			tooLarge.Limit)
		e.hangUp = true
		return e
	case errors.As(err, &misspoken):
		return newError(http.StatusBadGateway, codeName(misspoken.Code), "the daemon cannot be understood: %v",
			misspoken)
	case errors.As(err, &connection), errors.Is(err, colibri.ErrClosed):
		e := newError(http.StatusServiceUnavailable, "daemon_unreachable",
			"the daemon cannot be reached; try again soon")
		e.retryAfter = time.Second
		return e
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return newError(statusClientLeft, "client_left", "the client left")
	}
	return newError(http.StatusInternalServerError, "internal",
		"an internal error; the gateway's log has it under the request id")
}

// fromDaemon maps an ERROR by the protocol's table.
func fromDaemon(err *colibri.Error) *apiError {
	code := colibri.Code(err.Code)
	e := newError(code.HTTP(), codeName(code), "%s", err.Message)
	e.retryAfter = err.RetryAfter()
	if err.Field != nil {
		e.param = *err.Field
	}
	switch e.status {
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		e.retryAfter = max(e.retryAfter, time.Second) // the header is promised, and its unit is seconds
	case statusClientLeft:
		// By CANCELLED: an administrator ended it, and the client is there to be told.
		e.status, e.kind = http.StatusServiceUnavailable, kinds[http.StatusServiceUnavailable]
	}
	return e
}

func codeName(code colibri.Code) string {
	if name, special := codeNames[code]; special {
		return name
	}
	return strings.ReplaceAll(strings.ToLower(code.String()), " ", "_")
}

// errorBody is OpenAI's.
type errorBody struct {
	Error errorDetail `json:"error"`
}

type errorDetail struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    string  `json:"code"`
}

func (e *apiError) body() errorBody {
	detail := errorDetail{Message: e.message, Type: e.kind, Code: e.code}
	if e.param != "" {
		detail.Param = &e.param
	}
	return errorBody{detail}
}

func (e *apiError) setHeaders(h http.Header) {
	if e.retryAfter > 0 {
		h.Set("Retry-After", strconv.Itoa(int(math.Ceil(e.retryAfter.Seconds()))))
	}
	if e.allow != "" {
		h.Set("Allow", e.allow)
	}
	if e.status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", `Bearer realm="colibri"`)
	}
	if e.hangUp {
		h.Set("Connection", "close")
	}
}
