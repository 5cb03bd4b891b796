// Package unixsock is the client over the daemon's Unix socket.
//
// A Client makes up to one connection per core, on demand, and sends any number of requests over each. What befalls a
// connection is not the caller's business: a request that the daemon refuses for now is sent again, a stream whose
// connection was lost goes on at the token where it stopped, with the same bits, and a daemon that drains is left for
// the one that takes its place.
package unixsock

import (
	"context"
	"math/rand/v2"
	"os"
	"runtime"
	"time"

	colibri "colibri/client/go"
)

// DefaultSocket is where the daemon listens if nothing else is said.
const DefaultSocket = "/run/colibri/colibri.sock"

const mostConnections = 16 // one per core, but the daemon allows a user 64

// Client implements colibri.Client.
type Client struct{ pool *pool }

var _ colibri.Client = (*Client)(nil)

// settings of a client.
type settings struct {
	policy
	connections    int
	connectTimeout time.Duration
	ping           time.Duration // of silence, while an answer is owed, before the daemon is asked for a sign of life
}

// Option changes a default of New.
type Option func(*settings)

// WithConnections bounds the connections; by default one per core, 16 at most.
func WithConnections(n int) Option { return func(s *settings) { s.connections = max(1, n) } }

// WithRetries bounds the attempts after the first for errors that may pass (queue full, draining); by default 3.
func WithRetries(n int) Option { return func(s *settings) { s.retries = n } }

// WithReconnect is the time that a lost connection may take to come back, by default 10 s; 0: its loss is an error.
func WithReconnect(d time.Duration) Option { return func(s *settings) { s.reconnect = d } }

// WithConnectTimeout is the time for one connection, handshake included; by default 5 s.
func WithConnectTimeout(d time.Duration) Option { return func(s *settings) { s.connectTimeout = d } }

// New makes a client of the daemon at a socket; an empty path is $COLIBRI_SOCKET, or DefaultSocket. It does not connect
// yet.
func New(path string, options ...Option) *Client {
	if path == "" {
		path = os.Getenv("COLIBRI_SOCKET")
	}
	if path == "" {
		path = DefaultSocket
	}
	s := settings{
		policy: policy{retries: 3, reconnect: 10 * time.Second, base: 100 * time.Millisecond, most: 5 * time.Second,
			chance: rand.Float64},
		connections:    min(runtime.GOMAXPROCS(0), mostConnections),
		connectTimeout: 5 * time.Second,
		ping:           30 * time.Second,
	}
	for _, option := range options {
		option(&s)
	}
	return &Client{newPool(path, s)}
}

// Generate is colibri.Client's.
func (c *Client) Generate(ctx context.Context, request *colibri.Generate) (*colibri.Stream, error) {
	o := newOutput(newRequest(ctx, c.pool, true), request)
	if err := o.begin(nil); err != nil {
		o.settle()
		return nil, err
	}
	return &colibri.Stream{Reader: o}, nil
}

// Score is colibri.Client's.
func (c *Client) Score(ctx context.Context, request *colibri.Score) (*colibri.ScoreResult, error) {
	s := scoring{request: newRequest(ctx, c.pool, true), score: *request}
	defer s.settle()
	s.opening = s.open
	s.within(request.DeadlineMS)
	return s.run()
}

// Check is colibri.Client's.
func (c *Client) Check(ctx context.Context, request *colibri.TokenCheck) (*colibri.TokenCheckReply, error) {
	return ask[*colibri.TokenCheckReply](ctx, c.pool, request, true)
}

// Health is colibri.Client's.
func (c *Client) Health(ctx context.Context) (*colibri.HealthReply, error) {
	return ask[*colibri.HealthReply](ctx, c.pool, &colibri.Health{}, false)
}

// Stats is colibri.Client's.
func (c *Client) Stats(ctx context.Context) (*colibri.StatsReply, error) {
	return ask[*colibri.StatsReply](ctx, c.pool, &colibri.Stats{}, false)
}

// Model is colibri.Client's.
func (c *Client) Model(ctx context.Context) (*colibri.ModelInfo, error) {
	if _, err := c.pool.acquire(ctx, false); err != nil {
		return nil, err
	}
	return c.pool.model.Load(), nil
}

// Close is colibri.Client's.
func (c *Client) Close() error {
	c.pool.close()
	return nil
}

// ask sends a question and waits for its one answer. limited: it counts as a live request of the connection.
func ask[Answer colibri.Message](ctx context.Context, p *pool, question colibri.Message, limited bool) (Answer, error) {
	var none Answer
	r := newRequest(ctx, p, limited)
	defer r.settle()
	r.opening = func(time.Duration) colibri.Message { return question }
	if err := r.begin(nil); err != nil {
		return none, err
	}
	m, err := r.next()
	if err != nil {
		return none, err
	}
	if answer, ok := m.(Answer); ok {
		return answer, nil
	}
	return none, r.violation("%s in answer to %s", name(m), name(question))
}
