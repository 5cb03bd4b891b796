package unixsock

import (
	"time"

	colibri "colibri/client/go"
)

// policy says when to try again. Pure functions of what has happened; clock and chance are passed in.
type policy struct {
	retries   int            // at most so many attempts after the first, for errors that may pass
	reconnect time.Duration  // that a lost connection may take to come back, while no token arrives; 0: none
	base      time.Duration  // of the back-off, which doubles
	most      time.Duration  // up to this
	chance    func() float64 // in [0, 1)
}

// delay is the wait before attempt 1, 2, ...: never less than after; jitter keeps clients apart.
func (p policy) delay(attempt int, after time.Duration) time.Duration {
	backoff := min(p.most, p.base<<min(attempt-1, 20))
	return after + time.Duration(float64(backoff)*(0.5+0.5*p.chance()))
}

// again is the wait before attempt 1, 2, ... after a refusal; false: it is final. DRAINING is tried again although this
// daemon will not take the request: the next connection may reach another.
func (p policy) again(refusal *colibri.Error, attempt int) (time.Duration, bool) {
	if attempt > p.retries || !(refusal.Retryable || colibri.Code(refusal.Code) == colibri.CodeDraining) {
		return 0, false
	}
	return p.delay(attempt, refusal.RetryAfter()), true
}

// reconnectAfter is the wait after so many losses in a row, the first of them lostFor ago; false: give up. The first
// is at once: a daemon that is replaced is there already.
func (p policy) reconnectAfter(losses int, lostFor time.Duration) (time.Duration, bool) {
	switch {
	case p.reconnect <= 0 || lostFor > p.reconnect:
		return 0, false
	case losses <= 1:
		return 0, true
	}
	return min(p.delay(losses-1, 0), p.reconnect-lostFor), true
}
