package serve

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"os"
	"syscall"
	"time"
)

const (
	headerTime     = 10 * time.Second
	idleTime       = 120 * time.Second
	maxHeaderBytes = 64 << 10
)

// Place is a listener and who answers there. TLS may be nil.
type Place struct {
	Listener net.Listener
	Handler  http.Handler
	TLS      *tls.Config
}

// Plan is how to run and to stop.
type Plan struct {
	Places  []Place
	Signals <-chan os.Signal // SIGTERM, SIGINT: stop; SIGHUP: reload
	Drain   func()           // from now on not ready
	Reload  func()
	Delay   time.Duration // between not ready and closed, for a load balancer to notice
	Timeout time.Duration // for what is being answered then
	Headers time.Duration // for the headers of a request to arrive; 0: 10 s
	Log     *slog.Logger
}

// Run serves until a signal has ended it. Draining: not ready, Delay, no new connections, what is being answered goes
// on for Timeout at most. A second signal ends it at once. The error is of a listener that failed.
func Run(p Plan) error {
	servers := make([]*http.Server, len(p.Places))
	failed := make(chan error, len(p.Places))
	for i, place := range p.Places {
		servers[i] = server(place, cmp.Or(p.Headers, headerTime), p.Log)
		go func() { failed <- serve(servers[i], place) }()
	}
	defer closeAll(servers)
	for {
		select {
		case err := <-failed:
			return err
		case signal := <-p.Signals:
			if signal == syscall.SIGHUP {
				p.Reload()
				continue
			}
			p.Log.Info("draining", "signal", signal.String(), "delay", p.Delay.String(), "timeout", p.Timeout.String())
			p.Drain()
			stop(p, servers)
			return nil
		}
	}
}

func server(place Place, headers time.Duration, log *slog.Logger) *http.Server {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(place.TLS != nil)
	return &http.Server{
		Handler:           place.Handler,
		TLSConfig:         place.TLS,
		Protocols:         protocols,
		ReadHeaderTimeout: headers,
		IdleTimeout:       idleTime,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug), // clients' TLS and HTTP mistakes
	}
}

func serve(s *http.Server, place Place) (err error) {
	if place.TLS != nil {
		err = s.ServeTLS(place.Listener, "", "")
	} else {
		err = s.Serve(place.Listener)
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// stop ends all servers as Plan says, or at once at another signal.
func stop(p Plan, servers []*http.Server) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	drained := make(chan error, 1)
	go func() { drained <- drain(ctx, p, servers) }()
	for {
		select {
		case err := <-drained:
			if err != nil {
				p.Log.Warn("requests were cut off", "timeout", p.Timeout.String())
			}
			return
		case signal := <-p.Signals:
			if signal != syscall.SIGHUP {
				p.Log.Warn("stopping at once", "signal", signal.String())
				return
			}
		}
	}
}

func drain(ctx context.Context, p Plan, servers []*http.Server) error {
	select {
	case <-ctx.Done():
		return nil
	case <-time.After(p.Delay):
	}
	ctx, cancel := context.WithTimeout(ctx, p.Timeout)
	defer cancel()
	results := make(chan error, len(servers))
	for _, s := range servers {
		go func() { results <- s.Shutdown(ctx) }()
	}
	var err error
	for range servers {
		err = errors.Join(err, <-results)
	}
	return err
}

func closeAll(servers []*http.Server) {
	for _, s := range servers {
		s.Close()
	}
}
