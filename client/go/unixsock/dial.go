package unixsock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"time"

	colibri "colibri/client/go"
)

const (
	clientName  = "colibri-client-go"
	busyPause   = 20 * time.Millisecond // between attempts while the daemon's queue of connections is full
	remedyNone  = "there is no socket here; is the daemon running (colibrid serve), and is this its --socket?"
	remedyGroup = "permission denied; join the group that owns the socket (see ls -l), or ask its administrator"
)

var remedies = map[syscall.Errno]string{
	syscall.ENOENT:       remedyNone,
	syscall.ENOTDIR:      remedyNone,
	syscall.ECONNREFUSED: "nobody listens here; the daemon has ended, start it again (colibrid serve)",
	syscall.EACCES:       remedyGroup,
	syscall.EPERM:        remedyGroup,
	syscall.ENOTSOCK:     "this is not a socket; give the path of the daemon's --socket",
	syscall.EPROTOTYPE:   "this is a socket of another type than the daemon's; give the path of its --socket",
	syscall.EAGAIN:       "too many connections are waiting to be accepted here; try again later",
}

// greeted is a connection behind the handshake.
type greeted struct {
	conn    net.Conn
	frames  *colibri.FrameReader
	welcome *colibri.Welcome
}

// dial connects and shakes hands within the timeout. An error is a *ConnectionError, a *ProtocolError, the daemon's
// *Error, or that of the context.
func dial(ctx context.Context, path string, timeout time.Duration) (*greeted, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	conn, err := connect(ctx, path)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	g := &greeted{conn: conn, frames: colibri.NewFrameReader(conn, colibri.FrameCeiling)}
	err = g.handshake()
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err == nil {
		return g, nil
	}
	conn.Close()
	return nil, explain(ctx, path, err, timeout)
}

// connect gives a connected socket. On a Unix socket connecting never waits: it says EAGAIN instead.
func connect(ctx context.Context, path string) (net.Conn, error) {
	var dialer net.Dialer
	for {
		conn, err := dialer.DialContext(ctx, "unix", path)
		if err == nil {
			return conn, nil
		}
		if errors.Is(err, syscall.EAGAIN) && sleep(ctx, busyPause) == nil {
			continue
		}
		var number syscall.Errno
		errors.As(err, &number)
		reason, known := remedies[number]
		if !known {
			reason = err.Error()
		}
		return nil, &colibri.ConnectionError{Message: path + ": " + reason, Err: err}
	}
}

func (g *greeted) handshake() error {
	hello := colibri.Hello{ProtoMin: colibri.ProtocolVersion, ProtoMax: colibri.ProtocolVersion,
		Features: []string{"credit"}, Client: clientName}
	if _, err := g.conn.Write(colibri.Encode(&hello, 0)); err != nil {
		return err
	}
	payload, err := g.frames.Next()
	if err != nil {
		return err
	}
	m, _, err := colibri.Decode(payload)
	if err != nil {
		return err
	}
	switch m := m.(type) {
	case *colibri.Welcome:
		g.welcome = m
		return nil
	case *colibri.Error:
		return m
	}
	return violation("%s in answer to HELLO", name(m))
}

// explain makes a sentence of what the system says.
func explain(ctx context.Context, path string, err error, timeout time.Duration) error {
	var refusal *colibri.Error
	var broken *colibri.ProtocolError
	switch {
	case errors.As(err, &refusal), errors.As(err, &broken), errors.Is(ctx.Err(), context.Canceled):
		return err
	case ctx.Err() != nil:
		return &colibri.ConnectionError{Message: fmt.Sprintf("%s: no answer within %v; is the daemon stopped or "+
			"overloaded, or is this the socket of something else?", path, timeout), Err: err}
	case errors.Is(err, io.EOF):
		return &colibri.ConnectionError{Message: path + ": the daemon closed the connection before it said WELCOME"}
	}
	return &colibri.ConnectionError{Message: fmt.Sprintf("%s: %v, before WELCOME", path, err), Err: err}
}

// sleep waits; an error is that of the context.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}
