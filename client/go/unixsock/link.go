package unixsock

import (
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	colibri "colibri/client/go"
)

const (
	pingsUnanswered = 3           // then the connection is given up
	flushTime       = time.Second // for the daemon to take what was written before the end
	keptBuffer      = 64 << 10    // bytes of an output buffer that is kept for later
	keptModels      = 64          // of generations; streams of older ones ended long ago
)

// lost is why a connection ended if another one may help.
type lost struct{ *colibri.ConnectionError }

func lostBecause(format string, values ...any) error {
	return lost{&colibri.ConnectionError{Message: fmt.Sprintf(format, values...)}}
}

var (
	errAway     = lostBecause("the daemon sent the connection away")
	errDraining = &colibri.Error{Code: uint64(colibri.CodeDraining), Message: "the daemon is stopping"}
)

// violation is the daemon's fault; the connection is given up.
func violation(format string, values ...any) error {
	message := "the server broke the protocol: " + fmt.Sprintf(format, values...) +
		"; do client and daemon have the same version?"
	return &colibri.ProtocolError{Code: colibri.CodeProtocol, Message: message, Fault: true}
}

func name(m colibri.Message) string { return strings.TrimPrefix(fmt.Sprintf("%T", m), "*colibri.") }

// link is one connection. Two goroutines run as long as it does: one reads, hands out what arrives and at the end fails
// what has no answer; one writes, so that nobody who sends waits for the socket.
type link struct {
	pool    *pool
	conn    net.Conn
	frames  *colibri.FrameReader
	welcome *colibri.Welcome
	credit  uint64           // tokens a stream may send before it is granted more; 0: no limit
	models  []*colibri.Model // what each generation serves, as told here, the newest last; the reader's own
	lastID  atomic.Uint64
	heard   atomic.Bool   // since the last tick
	wake    chan struct{} // of the writer: out is not empty, or the end has come

	mu         sync.Mutex
	calls      map[uint64]*exchange // whose last message has not come, those included that nobody reads any more
	out        []byte               // frames to be written
	away       bool                 // the daemon wants no new requests here
	end        error                // why the connection is over, once it is
	unanswered int                  // pings
	timer      *time.Timer

	live int // requests that count, under the pool's lock: sent ones, and those about to be
}

func newLink(p *pool, g *greeted) *link {
	l := &link{pool: p, conn: g.conn, frames: g.frames, welcome: g.welcome, wake: make(chan struct{}, 1),
		calls: map[uint64]*exchange{}}
	l.models = []*colibri.Model{{Generation: g.welcome.Generation, Model: g.welcome.Model}}
	for _, feature := range g.welcome.Features {
		if feature == "credit" {
			l.credit = g.welcome.Limits.Credit
		}
	}
	return l
}

// run starts the goroutines.
func (l *link) run(running *sync.WaitGroup) {
	l.mu.Lock()
	l.timer = time.AfterFunc(l.pool.ping, l.tick)
	l.mu.Unlock()
	running.Go(l.read)
	running.Go(l.write)
}

// start sends a request, whose answer goes to e.
func (l *link) start(m colibri.Message, e *exchange) error {
	e.id = l.lastID.Add(1)
	frame := colibri.Encode(m, e.id)
	if size, limit := uint64(len(frame)-colibri.HeaderBytes), l.welcome.Limits.Frame; size > limit {
		return tooLarge(size, limit)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.away: // also when that has been its end
		return errDraining
	case l.end != nil:
		return l.end
	}
	l.calls[e.id] = e
	l.out = append(l.out, frame...)
	l.awaken()
	return nil
}

func tooLarge(size, limit uint64) error {
	field := "tokens"
	return &colibri.Error{Code: uint64(colibri.CodeInvalidArgument), Field: &field, Limit: &limit,
		Message: fmt.Sprintf("a message of %d bytes; at most %d are allowed; give fewer tokens", size, limit)}
}

// tell sends a message about a request, if it is still live.
func (l *link) tell(m colibri.Message, id uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.calls[id] != nil && l.end == nil {
		l.send(m, id)
	}
}

// cancel tells the daemon, once and if the last message of e has not come.
func (l *link) cancel(e *exchange, reason string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.calls[e.id] != nil && l.end == nil && !e.left {
		e.left = true
		l.send(&colibri.Cancel{Reason: reason}, e.id)
	}
}

// send appends a frame for the writer; the lock is held.
func (l *link) send(m colibri.Message, id uint64) {
	l.out = colibri.Append(l.out, m, id)
	l.awaken()
}

func (l *link) awaken() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// drop ends the connection at once, without a word. The first reason counts.
func (l *link) drop(reason error) {
	l.mu.Lock()
	if l.end == nil {
		l.end = reason
	}
	l.mu.Unlock()
	l.conn.Close()
	l.awaken()
	l.pool.retire(l)
}

// bye ends the connection when what was sent has been written; live requests are thereby cancelled.
func (l *link) bye(reason error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.end != nil {
		return
	}
	if len(l.calls) == 0 {
		l.send(&colibri.Bye{}, 0)
	}
	l.end = reason
	l.conn.SetWriteDeadline(time.Now().Add(flushTime))
	l.awaken()
}

// write is the writer: what was sent while it wrote leaves in one write.
func (l *link) write() {
	defer l.conn.Close()
	var spare []byte
	for range l.wake {
		l.mu.Lock()
		frames, over := l.out, l.end != nil
		l.out = spare[:0]
		l.mu.Unlock()
		if len(frames) > 0 {
			if _, err := l.conn.Write(frames); err != nil {
				l.drop(lostBecause("the connection broke: %v", err))
				return
			}
		}
		if over {
			return
		}
		if spare = frames; cap(spare) > keptBuffer {
			spare = nil
		}
	}
}

// tick asks a silent daemon for a sign of life while it owes an answer.
func (l *link) tick() {
	if l.silent() {
		l.drop(lostBecause("the daemon has not answered %d pings", pingsUnanswered))
	}
}

// silent says whether it was asked often enough, and asks again if not.
func (l *link) silent() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.end != nil:
		return false
	case l.heard.Swap(false) || len(l.calls) == 0:
		l.unanswered = 0
	case l.unanswered == pingsUnanswered:
		return true
	default:
		l.unanswered++
		l.send(&colibri.Ping{}, 0)
	}
	l.timer.Reset(l.pool.ping)
	return false
}
