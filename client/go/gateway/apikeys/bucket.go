package apikeys

import (
	"sync"
	"time"
)

// bucket fills with rps tokens a second, up to a second's worth and at least one; it starts full.
type bucket struct {
	mu    sync.Mutex
	full  time.Time // when it would be full again
	begun bool
}

// take takes one token, or says how long until there is one. rps 0: there always is.
func (b *bucket) take(now time.Time, rps float64) (wait time.Duration) {
	if rps == 0 {
		return 0
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.begun || b.full.Before(now) {
		b.full, b.begun = now, true
	}
	one := time.Duration(float64(time.Second) / rps)
	size := max(time.Second, one)
	full := b.full.Add(one)
	if wait := full.Sub(now) - size; wait > 0 {
		return wait
	}
	b.full = full
	return 0
}
