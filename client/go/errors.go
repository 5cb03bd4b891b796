package colibri

import (
	"errors"
	"fmt"
	"time"
)

// Code is a permanent error number; messages_gen.go has them all.
type Code uint64

// codeRow: retry as in SPEC.md ("no", "yes", "after", "unsent", "elsewhere"); http: the status a gateway answers with.
type codeRow struct {
	name  string
	retry string
	http  int
}

// String is the code's name, or its number if a newer daemon sent it.
func (c Code) String() string {
	if row, known := codes[c]; known {
		return row.name
	}
	return fmt.Sprintf("code %d", uint64(c))
}

// HTTP is the status a gateway answers with; 500 for an unknown code.
func (c Code) HTTP() int {
	if row, known := codes[c]; known {
		return row.http
	}
	return 500
}

// Retryable says whether sending the same request again to the same daemon can help.
func (c Code) Retryable(tokensSent uint64) bool {
	switch codes[c].retry {
	case "yes", "after":
		return true
	case "unsent":
		return tokensSent == 0
	}
	return false
}

// Error makes an ERROR message usable as a Go error.
func (m *Error) Error() string {
	return fmt.Sprintf("%s: %s", Code(m.Code), m.Message)
}

// RetryAfter is the time to let pass before the same request is sent again; 0 if the daemon did not say.
func (m *Error) RetryAfter() time.Duration {
	if m.RetryAfterMS == nil {
		return 0
	}
	return time.Duration(*m.RetryAfterMS) * time.Millisecond
}

// ErrClosed: the client was used after Close, or closed while the request was running.
var ErrClosed = errors.New("the client is closed; make another one")

// ConnectionError: no connection could be made, or the one with the request was lost and could not be replaced.
type ConnectionError struct {
	Message string // a sentence for people, with the remedy if there is one
	Err     error  // what the system said, or nil
}

func (e *ConnectionError) Error() string { return e.Message }

func (e *ConnectionError) Unwrap() error { return e.Err }

// ProtocolError is what the peer did wrong, found on this side.
type ProtocolError struct {
	Code    Code
	Message string

	// Field and Index name the place, if Field is not empty and Index not nil.
	Field string
	Index *uint64

	// Fault: the stream is broken and the connection must be closed. Otherwise one message is bad and the rest is not.
	Fault bool

	err error
}

func (e *ProtocolError) Error() string {
	return fmt.Sprintf("%s: %s", e.Code, e.Message)
}

func (e *ProtocolError) Unwrap() error { return e.err }

// fault is a broken stream.
func fault(code Code, format string, values ...any) *ProtocolError {
	return &ProtocolError{Code: code, Message: fmt.Sprintf(format, values...), Fault: true}
}

// invalid is a bad field of one message.
func invalid(field, format string, values ...any) *ProtocolError {
	message := field + " " + fmt.Sprintf(format, values...)
	return &ProtocolError{Code: CodeInvalidArgument, Message: message, Field: field}
}
