package gateway

import (
	"bytes"
	"encoding/json"
	"net/http"
	"sync"
	"time"
)

// events is an answer as server-sent events, or as lines of JSON. The answer begins with the first event, or with the
// first keep-alive comment if that is sooner: so a request that fails before can have its status.
//
// Choices may send from several goroutines. A client that does not read makes send wait, and with it the choices; after
// WriteTime without progress the connection is given up.
type events struct {
	x     *exchange
	lines bool // NDJSON

	mu      sync.Mutex
	begun   bool
	failed  error // of the connection: nothing more is sent
	buffer  bytes.Buffer
	encoder *json.Encoder
	armed   time.Time // when the write deadline was set
	last    time.Time // when something was sent
	comment *time.Timer
}

// newEvents starts an answer; end must be called.
func newEvents(x *exchange, lines bool) *events {
	e := &events{x: x, lines: lines, last: time.Now()}
	e.encoder = json.NewEncoder(&e.buffer)
	e.encoder.SetEscapeHTML(false)
	e.mu.Lock() // the first comment may be due before the timer is known
	defer e.mu.Unlock()
	if !lines {
		e.comment = time.AfterFunc(x.cfg.KeepAlive, e.keepAlive)
	}
	return e
}

// send is one event.
func (e *events) send(value any) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.buffer.Reset()
	if !e.lines {
		e.buffer.WriteString("data: ")
	}
	if err := e.encoder.Encode(value); err != nil { // with a line feed
		return err
	}
	if !e.lines {
		e.buffer.WriteByte('\n')
	}
	return e.write(e.buffer.Bytes())
}

// fail sends an error inside the stream. Before the stream has begun it returns the error, which then is the answer.
func (e *events) fail(err error) error {
	e.mu.Lock()
	begun, gone := e.begun, e.failed != nil
	e.mu.Unlock()
	if begun && !gone {
		_ = e.send(e.x.apiError(err).body()) // the error is logged anyway
	}
	return err
}

// finish sends OpenAI's end of a stream.
func (e *events) finish() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.write([]byte("data: [DONE]\n\n"))
}

// end stops the comments. No goroutine uses the answer after it.
func (e *events) end() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.comment != nil {
		e.comment.Stop()
	}
	if e.failed == nil {
		e.failed = errEnded
	}
}

var errEnded = newError(statusClientLeft, "ended", "the answer has ended")

// keepAlive runs on a timer's goroutine. A stream that sends by itself needs no comments.
func (e *events) keepAlive() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.failed != nil {
		return
	}
	wait := e.x.cfg.KeepAlive - time.Since(e.last)
	if wait <= 0 {
		wait = e.x.cfg.KeepAlive
		_ = e.write([]byte(": keep-alive\n\n")) // kept in failed
	}
	e.comment.Reset(wait)
}

// write sends bytes at once. The lock is held.
func (e *events) write(data []byte) error {
	if e.failed != nil {
		return e.failed
	}
	if err := e.try(data); err != nil {
		e.failed = unread(err)
	}
	return e.failed
}

func (e *events) try(data []byte) error {
	const often = time.Second // between settings of the deadline, which cost a system's timer each
	now := time.Now()
	if e.last = now; now.Sub(e.armed) > often {
		e.armed = now
		if err := e.x.rc.SetWriteDeadline(now.Add(e.x.cfg.WriteTime)); err != nil {
			return err
		}
	}
	if !e.begun {
		if err := e.open(); err != nil {
			return err
		}
	}
	if _, err := e.x.w.Write(data); err != nil {
		return err
	}
	return e.x.rc.Flush()
}

func (e *events) open() error {
	h := e.x.w.Header()
	h.Set("Content-Type", "text/event-stream")
	if e.lines {
		h.Set("Content-Type", "application/x-ndjson")
	}
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no") // nginx would collect events
	e.begun = true
	return e.x.begin(http.StatusOK)
}
