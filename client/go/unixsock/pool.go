package unixsock

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	colibri "colibri/client/go"
)

// pool has the connections: it makes them on demand, gives each request a place on one, and lets requests wait for a
// place in the order they came. A link calls its pool with its own lock released.
type pool struct {
	settings
	path  string
	model atomic.Pointer[colibri.ModelInfo] // as last told

	stop    context.Context // ends with Close
	halt    context.CancelFunc
	running sync.WaitGroup // goroutines

	mu         sync.Mutex
	links      []*link            // for new requests
	all        map[*link]struct{} // and those that only finish what they have
	waiting    []*waiter          // for a place, in order
	questions  []*waiter          // for any connection: what does not count against its limit
	dialing    bool
	patient    bool      // connecting is repeated: not the first time, nor after that was in vain
	extraAfter time.Time // no second connection is tried before
	closed     bool
}

// waiter gets one placing.
type waiter struct{ got chan placing }

type placing struct {
	link *link
	err  error
}

const extraPause = 5 * time.Second // after a second connection could not be made

func newPool(path string, s settings) *pool {
	p := &pool{settings: s, path: path, all: map[*link]struct{}{}}
	p.stop, p.halt = context.WithCancel(context.Background())
	return p
}

// acquire gives a connection with room for one more request, which it then counts until release. limited is false for
// questions about the daemon: they are not counted and need no room.
func (p *pool) acquire(ctx context.Context, limited bool) (*link, error) {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil, colibri.ErrClosed
	}
	if !limited || len(p.waiting) == 0 {
		if l := p.pick(limited); l != nil {
			p.mu.Unlock()
			return l, nil
		}
	}
	w := &waiter{got: make(chan placing, 1)}
	queue := p.queue(limited)
	*queue = append(*queue, w)
	p.grow()
	p.mu.Unlock()
	select {
	case got := <-w.got:
		return got.link, got.err
	case <-ctx.Done():
		p.withdraw(w, limited)
		return nil, ctx.Err()
	}
}

func (p *pool) queue(limited bool) *[]*waiter {
	if limited {
		return &p.waiting
	}
	return &p.questions
}

// pick chooses the connection with the fewest live requests. A busy one is a reason to make another.
func (p *pool) pick(limited bool) *link {
	var best *link
	for _, l := range p.links {
		if best == nil || l.live < best.live {
			best = l
		}
	}
	switch {
	case best == nil || !limited:
		return best
	case best.live > 0:
		p.grow()
	}
	if uint64(best.live) >= best.welcome.Limits.Requests {
		return nil
	}
	best.live++
	return best
}

// grow makes one more connection if that is wanted.
func (p *pool) grow() {
	extra := len(p.links) > 0
	if p.dialing || p.closed || len(p.links) >= p.connections || extra && time.Now().Before(p.extraAfter) {
		return
	}
	p.dialing = true
	p.running.Go(p.dial)
}

// pump places what waits, as far as there is room.
func (p *pool) pump() {
	for _, limited := range []bool{false, true} {
		queue := p.queue(limited)
		for len(*queue) > 0 {
			l := p.pick(limited)
			if l == nil {
				p.grow()
				break
			}
			(*queue)[0].got <- placing{link: l}
			*queue = (*queue)[1:]
		}
	}
}

// withdraw takes back what acquire has asked for.
func (p *pool) withdraw(w *waiter, limited bool) {
	p.mu.Lock()
	queue := p.queue(limited)
	at := slices.Index(*queue, w)
	if at >= 0 {
		*queue = slices.Delete(*queue, at, at+1)
	}
	p.mu.Unlock()
	if at < 0 {
		if got := <-w.got; got.link != nil && limited {
			p.release(got.link)
		}
	}
}

// release gives a place back.
func (p *pool) release(l *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l.live--
	p.pump()
}

// retire: no new requests for this connection.
func (p *pool) retire(l *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if at := slices.Index(p.links, l); at >= 0 {
		p.links = slices.Delete(p.links, at, at+1)
	}
	p.pump()
}

// forget: the connection is gone.
func (p *pool) forget(l *link) {
	p.retire(l)
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.all, l)
}

// dial makes one connection. While there are others, only once, and its failure matters to nobody; else as the policy
// says, and its failure is that of all who wait.
func (p *pool) dial() {
	g, err := p.persist()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dialing = false
	switch {
	case err == nil && p.closed:
		g.conn.Close()
	case err == nil:
		p.admit(g)
	case len(p.links) > 0:
		p.extraAfter = time.Now().Add(extraPause)
	default:
		p.refuse(err)
	}
}

func (p *pool) admit(g *greeted) {
	l := newLink(p, g)
	p.model.Store(&g.welcome.Model)
	p.links, p.all[l], p.patient = append(p.links, l), struct{}{}, true
	p.pump()
	l.run(&p.running)
}

// refuse tells all who wait.
func (p *pool) refuse(err error) {
	for _, w := range slices.Concat(p.questions, p.waiting) {
		w.got <- placing{err: err}
	}
	p.questions, p.waiting = nil, nil
}

// persist dials as long and as often as the policy allows.
func (p *pool) persist() (*greeted, error) {
	began, failures, refusals := time.Now(), 0, 0
	for {
		g, err := dial(p.stop, p.path, p.connectTimeout)
		if err == nil {
			return g, nil
		}
		var delay time.Duration
		var again bool
		switch e := err.(type) {
		case *colibri.Error:
			refusals++
			delay, again = p.again(e, refusals)
		case *colibri.ConnectionError:
			failures++
			delay, again = p.reconnectAfter(failures+1, time.Since(began))
			again = p.keepPatience(again)
		}
		if !again || p.haveLinks() || sleep(p.stop, delay) != nil {
			return nil, err
		}
	}
}

// keepPatience: a daemon that was never there, or has been away for too long, is not waited for.
func (p *pool) keepPatience(again bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.patient = p.patient && again
	return p.patient
}

func (p *pool) haveLinks() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.links) > 0
}

// close ends all connections and waits for the goroutines.
func (p *pool) close() {
	p.mu.Lock()
	p.closed = true
	p.refuse(colibri.ErrClosed)
	links := make([]*link, 0, len(p.all))
	for l := range p.all {
		links = append(links, l)
	}
	p.mu.Unlock()
	p.halt()
	for _, l := range links {
		l.bye(colibri.ErrClosed)
	}
	p.running.Wait()
}
