package unixsock

import (
	"context"
	"sync"

	colibri "colibri/client/go"
)

// exchange is one request on one connection: what has arrived and was not read. The link puts in, one goroutine takes
// out. The credit of a stream bounds what waits here.
type exchange struct {
	link    *link
	limited bool   // counts against the connection's limit of live requests
	id      uint64 // set by the link
	left    bool   // the daemon was told that nobody reads it; under the link's lock

	maker *colibri.ModelInfo // of the tokens; set by the link before it puts in the first

	batch []colibri.Message // taken from arrived; the reading goroutine's own
	place int               // in batch

	mu      sync.Mutex
	arrived []colibri.Message
	over    bool  // nothing more arrives
	err     error // why, unless it was the last message
	wake    chan struct{}
}

func newExchange(l *link, limited bool) *exchange {
	return &exchange{link: l, limited: limited, wake: make(chan struct{}, 1)}
}

// deliver puts a message in; one that comes after the end is dropped.
func (e *exchange) deliver(m colibri.Message, last bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.over {
		return
	}
	e.arrived = append(e.arrived, m)
	e.over = last
	e.notify()
}

// fail ends the exchange without an answer, unless it has ended. What has arrived can still be read.
func (e *exchange) fail(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.over {
		e.over, e.err = true, err
		e.notify()
	}
}

func (e *exchange) notify() {
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

// next waits for a message. An error is that of the context, or why the exchange failed.
func (e *exchange) next(ctx context.Context) (colibri.Message, error) {
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if e.place < len(e.batch) {
			m := e.batch[e.place]
			e.batch[e.place] = nil
			e.place++
			return m, nil
		}
		if err := e.refill(); err != nil {
			return nil, err
		}
		if len(e.batch) > 0 {
			continue
		}
		select {
		case <-e.wake:
		case <-ctx.Done():
		}
	}
}

// refill takes all that has arrived; it fails when there is nothing and will be nothing.
func (e *exchange) refill() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.batch, e.arrived, e.place = e.arrived, e.batch[:0], 0
	if len(e.batch) == 0 && e.over {
		return e.err
	}
	return nil
}
