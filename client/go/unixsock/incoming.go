package unixsock

import (
	"errors"
	"io"
	"slices"

	colibri "colibri/client/go"
)

// read is the reader.
func (l *link) read() {
	for {
		payload, err := l.frames.Next()
		if err != nil {
			l.drop(whyItEnded(err))
			break
		}
		l.heard.Store(true)
		m, id, err := colibri.Decode(payload)
		if err != nil {
			l.drop(violation("%v", err))
			break
		}
		if err := l.handle(m, id); err != nil {
			l.drop(err)
			break
		}
	}
	l.finish()
}

func whyItEnded(err error) error {
	var broken *colibri.ProtocolError
	switch {
	case errors.Is(err, io.EOF):
		return lostBecause("the daemon closed the connection")
	case errors.As(err, &broken) && !errors.Is(err, io.ErrUnexpectedEOF):
		return violation("%v", err)
	}
	return lostBecause("the connection broke: %v", err)
}

// handle digests one message; an error ends the connection.
func (l *link) handle(m colibri.Message, id uint64) error {
	switch m := m.(type) {
	case nil: // of a type that may be skipped
	case *colibri.Ping:
		l.mu.Lock()
		l.send(&colibri.Pong{Data: m.Data}, id)
		l.mu.Unlock()
	case *colibri.Pong:
	case *colibri.Model:
		l.models = append(l.models, m)
		l.models = l.models[max(0, len(l.models)-keptModels):]
		l.pool.model.Store(&m.Model)
	case *colibri.GoAway:
		l.goAway()
	default:
		if id == 0 {
			return aboutConnection(m)
		}
		return l.handOut(m, id)
	}
	return nil
}

// aboutConnection: ERROR with id 0 ends it; another one may help if that is retryable.
func aboutConnection(m colibri.Message) error {
	refusal, ok := m.(*colibri.Error)
	switch {
	case !ok:
		return violation("%s without a request", name(m))
	case refusal.Retryable:
		return lost{&colibri.ConnectionError{Message: refusal.Error(), Err: refusal}}
	}
	return refusal
}

// handOut gives a message to its request.
func (l *link) handOut(m colibri.Message, id uint64) error {
	last := true
	switch m.(type) {
	case *colibri.TokensOut, *colibri.Scores:
		last = false
	}
	l.mu.Lock()
	e := l.calls[id]
	if last {
		delete(l.calls, id)
	}
	finished := last && l.away && len(l.calls) == 0
	l.mu.Unlock()
	if e == nil {
		return violation("%s of request %d, which is not live", name(m), id)
	}
	if tokens, ok := m.(*colibri.TokensOut); ok && e.maker == nil {
		e.maker = l.maker(tokens.Generation)
	}
	e.deliver(m, last)
	if last && e.limited {
		l.pool.release(l)
	}
	if finished {
		l.bye(errAway)
	}
	return nil
}

// maker is what a generation serves; the newest model if the daemon did not say which, or it was not told here.
func (l *link) maker(generation *uint64) *colibri.ModelInfo {
	newest := &l.models[len(l.models)-1].Model
	if generation == nil {
		return newest
	}
	for _, told := range slices.Backward(l.models) {
		if told.Generation == *generation {
			return &told.Model
		}
	}
	return newest
}

// goAway: live requests go on here, new ones elsewhere.
func (l *link) goAway() {
	l.mu.Lock()
	l.away = true
	idle := len(l.calls) == 0
	l.mu.Unlock()
	l.pool.retire(l)
	if idle {
		l.bye(errAway)
	}
}

// finish fails what has no answer; the reader's last act.
func (l *link) finish() {
	l.mu.Lock()
	l.timer.Stop()
	calls, reason := l.calls, l.end
	l.calls = map[uint64]*exchange{}
	l.mu.Unlock()
	l.pool.forget(l)
	for _, e := range calls {
		e.fail(reason)
	}
}
