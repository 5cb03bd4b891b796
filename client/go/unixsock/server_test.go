package unixsock

import (
	"fmt"
	"net"
	"path/filepath"
	"reflect"
	"runtime"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	colibri "colibri/client/go"
)

const patience = 20 * time.Second // for things that happen soon; only a broken test waits so long

// script is the daemon's side of one connection.
type script func(p *peer)

// peer is a connection seen from the daemon. A failure in a script fails the test and ends the script.
type peer struct {
	t      testing.TB
	conn   net.Conn
	frames *colibri.FrameReader
}

// leaveNothing: when the test and its cleanups from here on are over, no goroutine may be left.
func leaveNothing(t testing.TB) {
	old := goleak.IgnoreCurrent()
	t.Cleanup(func() { goleak.VerifyNone(t, old) })
}

// serve runs a script for each connection, in order; the last one serves all further ones. All must have ended when the
// test does, and no goroutine may be left.
func serve(t testing.TB, scripts ...script) (path string) {
	t.Helper()
	leaveNothing(t)
	path = filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	running.Go(func() {
		for i := 0; ; i++ {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			conn.SetReadDeadline(time.Now().Add(patience))
			run := scripts[min(i, len(scripts)-1)]
			running.Go(func() {
				defer conn.Close()
				run(&peer{t, conn, colibri.NewFrameReader(conn, colibri.MaxFrame)})
			})
		}
	})
	t.Cleanup(func() {
		listener.Close()
		running.Wait()
	})
	return path
}

func (p *peer) fail(format string, values ...any) {
	p.t.Errorf("script: "+format, values...)
	p.conn.Close()
	runtime.Goexit()
}

// next is the next message and its id; a nil message: the client has closed the connection.
func (p *peer) next() (colibri.Message, uint64) {
	payload, err := p.frames.Next()
	if err != nil {
		if e, ok := err.(net.Error); ok && e.Timeout() {
			p.fail("the client says nothing")
		}
		return nil, 0
	}
	m, id, err := colibri.Decode(payload)
	if err != nil {
		p.fail("%v", err)
	}
	return m, id
}

// expect is the next message, which must be a T.
func expect[T colibri.Message](p *peer) (T, uint64) {
	m, id := p.next()
	wanted, ok := m.(T)
	if !ok {
		p.fail("%T instead of %v", m, reflect.TypeFor[T]())
	}
	return wanted, id
}

// gone: the client closes the connection next; it may say BYE.
func (p *peer) gone() {
	for {
		switch m, _ := p.next(); m.(type) {
		case nil:
			return
		case *colibri.Bye, *colibri.Cancel:
		default:
			p.fail("%T instead of the end", m)
		}
	}
}

func (p *peer) send(m colibri.Message, id uint64) { p.conn.Write(colibri.Encode(m, id)) }

func (p *peer) tokens(id, index uint64, ids ...uint32) {
	p.send(&colibri.TokensOut{IDs: ids, Index: index}, id)
}

func (p *peer) done(id uint64, reason string) { p.send(&colibri.Done{FinishReason: reason}, id) }

var tiny = colibri.ModelInfo{Name: "tiny", ID: "id", Fingerprint: "fp", VocabSize: 256, MaxLen: 1 << 20, Block: 64,
	Positions: "cache", KVFormat: "f16"}

// welcome shakes hands; change may alter the WELCOME.
func (p *peer) welcome(change ...func(*colibri.Welcome)) {
	m, _ := p.next()
	if m == nil { // the test is over before this connection was made
		runtime.Goexit()
	}
	hello, ok := m.(*colibri.Hello)
	if !ok {
		p.fail("%T instead of HELLO", m)
	}
	w := colibri.NewWelcome()
	w.Proto, w.Features, w.Server, w.Model = colibri.ProtocolVersion, hello.Features, "scripted", tiny
	w.Limits.Frame, w.Limits.Requests = colibri.MaxFrame, 64
	for _, f := range change {
		f(&w)
	}
	p.send(&w, 0)
}

// greeting is a script that begins with the handshake.
func greeting(rest script, change ...func(*colibri.Welcome)) script {
	return func(p *peer) {
		p.welcome(change...)
		rest(p)
	}
}

func requests(n uint64) func(*colibri.Welcome) {
	return func(w *colibri.Welcome) { w.Limits.Requests = n }
}

func credit(n uint64) func(*colibri.Welcome) { return func(w *colibri.Welcome) { w.Limits.Credit = n } }

// quick makes a client over one connection whose back-off is short; it is closed before the server is.
func quick(t testing.TB, path string, options ...Option) *Client {
	fast := func(s *settings) { s.connections, s.base, s.most = 1, time.Millisecond, 5*time.Millisecond }
	c := New(path, append([]Option{fast}, options...)...)
	t.Cleanup(func() { c.Close() })
	return c
}

func prompt(tokens ...uint32) *colibri.Generate {
	g := colibri.NewGenerate()
	g.Tokens = tokens
	return &g
}

// begin starts a stream.
func begin(t testing.TB, c *Client, g *colibri.Generate) *colibri.Stream {
	t.Helper()
	stream, err := c.Generate(t.Context(), g)
	if err != nil {
		t.Fatal(err)
	}
	return stream
}

// readAll is the rest of a stream, and its error.
func readAll(stream *colibri.Stream) (ids []uint32, err error) {
	for chunk, err := range stream.All() {
		if err != nil {
			return ids, err
		}
		ids = append(ids, chunk.IDs...)
	}
	return ids, nil
}

// outcome is a stream in one line: its tokens, and how it ended.
func outcome(stream *colibri.Stream) string {
	ids, err := readAll(stream)
	if err != nil {
		return fmt.Sprint(ids, " ", err)
	}
	return fmt.Sprint(ids, " ", stream.Done().FinishReason)
}

func want(t testing.TB, got, wanted any) {
	t.Helper()
	if !reflect.DeepEqual(got, wanted) {
		t.Errorf("%v; not %v", got, wanted)
	}
}

// soon waits until a condition holds.
func soon(t testing.TB, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !condition(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain until %s", what)
		}
	}
}
