package unixsock

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	colibri "colibri/client/go"
)

// request is a question from its first sending to its answer, whatever happens to connections in between. The goroutine
// that reads it drives it: nothing of a request runs on its own but the CANCEL at the end of its context.
type request struct {
	pool    *pool
	ctx     context.Context
	cancel  context.CancelFunc
	unwatch func() bool
	limited bool // counts against the limits of a connection

	// opening makes the message that starts the request, or goes on with it.
	opening func(waited time.Duration) colibri.Message

	began      time.Time
	deadline   time.Time // for getting onto a connection, the first time and again; zero: none
	attempts   int       // refused
	losses     int       // of connections in a row, since a message has come
	firstLoss  time.Time
	progressed bool  // since it was last sent
	failure    error // why it is being tried again
	cancelled  bool  // its reader wants no other attempt

	mu sync.Mutex
	ex *exchange // of the last attempt
}

// newRequest makes a request that is cancelled when the context ends, or by cancel. settle must be called at its end.
func newRequest(ctx context.Context, p *pool, limited bool) *request {
	r := &request{pool: p, limited: limited, began: time.Now()}
	r.ctx, r.cancel = context.WithCancel(ctx)
	r.unwatch = context.AfterFunc(r.ctx, r.abort)
	return r
}

// within bounds the time without a connection by a request's own deadline, which the daemon keeps once it has it.
func (r *request) within(deadlineMS uint64) {
	if deadlineMS > 0 && deadlineMS <= math.MaxInt64/uint64(time.Millisecond) {
		r.deadline = r.began.Add(time.Duration(deadlineMS) * time.Millisecond)
	}
}

// settle ends the request. If its last message has not come, the daemon is told: the reader may have seen the end of the
// context before abort could run.
func (r *request) settle() {
	r.unwatch()
	r.cancel()
	r.abort()
}

// abort tells the daemon at once, and drops what may still come.
func (r *request) abort() {
	r.mu.Lock()
	e := r.ex
	r.mu.Unlock()
	if e != nil {
		e.link.cancel(e, "")
		e.fail(r.ctx.Err())
	}
}

// next waits for a message other than ERROR, over as many attempts as the policy allows.
func (r *request) next() (colibri.Message, error) {
	for {
		m, err := r.ex.next(r.ctx)
		if refusal, ok := m.(*colibri.Error); ok {
			r.heed(refusal)
			err = refusal
		}
		if err == nil {
			r.progressed = true
			return m, nil
		}
		if err = r.begin(err); err != nil {
			return nil, err
		}
	}
}

// heed: who says DRAINING wants no other request either, even if its GOAWAY was not seen.
func (r *request) heed(refusal *colibri.Error) {
	if colibri.Code(refusal.Code) == colibri.CodeDraining {
		r.ex.link.goAway()
	}
}

// final is an error that no other attempt follows.
type final struct{ error }

// begin gets the request onto a connection: at first (err is nil), and again after err if the policy allows it.
func (r *request) begin(err error) error {
	ctx := r.ctx
	if !r.deadline.IsZero() {
		var done context.CancelFunc
		ctx, done = context.WithDeadline(ctx, r.deadline)
		defer done()
	}
	for {
		if err != nil {
			delay, again := r.verdict(err)
			if !again {
				return plain(err)
			}
			r.failure = plain(err)
			if err := sleep(ctx, delay); err != nil {
				return r.unplaced(err)
			}
		}
		if err = r.send(ctx); err == nil {
			return nil
		}
	}
}

// plain is the error for the caller.
func plain(err error) error {
	switch e := err.(type) {
	case lost:
		return e.ConnectionError
	case final:
		return e.error
	}
	return err
}

// verdict says whether and when to try again after err.
func (r *request) verdict(err error) (delay time.Duration, again bool) {
	if r.cancelled {
		return 0, false
	}
	switch e := err.(type) {
	case *colibri.Error:
		r.attempts++
		return r.pool.again(e, r.attempts)
	case lost:
		now := time.Now()
		if r.progressed || r.losses == 0 {
			r.losses, r.firstLoss = 0, now
		}
		r.losses++
		r.progressed = false
		return r.pool.reconnectAfter(r.losses, now.Sub(r.firstLoss))
	}
	return 0, false
}

// send makes one attempt; ctx bounds the wait for a connection.
func (r *request) send(ctx context.Context) error {
	l, err := r.pool.acquire(ctx, r.limited)
	if err != nil {
		return final{r.unplaced(err)}
	}
	e := newExchange(l, r.limited)
	if err := l.start(r.opening(time.Since(r.began)), e); err != nil {
		if r.limited {
			r.pool.release(l)
		}
		return err
	}
	r.progressed = false
	r.mu.Lock()
	r.ex = e
	r.mu.Unlock()
	if r.ctx.Err() != nil { // it may have ended before abort could find e
		r.abort()
	}
	return nil
}

// unplaced is why there was no connection: with what befell the request if it had been on one before.
func (r *request) unplaced(err error) error {
	if _, isRefusal := r.failure.(*colibri.Error); isRefusal && r.ctx.Err() == nil {
		return r.failure
	}
	if errors.Is(err, context.DeadlineExceeded) && r.ctx.Err() == nil {
		message := "no connection to the daemon within the request's deadline"
		if r.failure != nil {
			message = fmt.Sprintf("%v; and %s", r.failure, message)
		}
		return &colibri.Error{Code: uint64(colibri.CodeDeadlineExceeded), Message: message}
	}
	if failed, ok := err.(*colibri.ConnectionError); ok && r.failure != nil {
		message := fmt.Sprintf("%v; and no new one could be made: %v", r.failure, failed)
		return &colibri.ConnectionError{Message: message, Err: failed.Err}
	}
	return err
}

// violation gives up the connection.
func (r *request) violation(format string, values ...any) error {
	err := violation(format, values...)
	r.ex.link.drop(err)
	return err
}

// within takes what has been waited off a deadline, which counts from the receipt of the message, if it matters.
func within(deadlineMS uint64, waited time.Duration) uint64 {
	ms := uint64(waited.Milliseconds())
	if ms*1000 < deadlineMS {
		return deadlineMS
	}
	return max(1, deadlineMS-min(ms, deadlineMS))
}
