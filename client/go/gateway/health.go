package gateway

import (
	"context"
	"net/http"
	"time"
)

type readiness struct {
	Ready    bool     `json:"ready"`
	State    string   `json:"state"`
	Reason   string   `json:"reason,omitempty"`
	Progress *float64 `json:"progress,omitempty"`
}

// live: the gateway answers. It does not depend on the daemon, which restarts by itself.
func live(_ *deps, x *exchange) error {
	return x.json(http.StatusOK, map[string]bool{"live": true})
}

// ready: a request would be served now. The daemon is asked each time; it answers from what it knows.
func ready(d *deps, x *exchange) error {
	if d.isDraining() {
		return x.notReady(readiness{State: "draining", Reason: "the gateway is stopping"})
	}
	const patience = 2 * time.Second
	ctx, cancel := context.WithTimeout(x.r.Context(), patience)
	defer cancel()
	reply, err := d.client.Health(ctx)
	if err != nil {
		return x.notReady(readiness{State: "unreachable", Reason: "the daemon does not answer"})
	}
	state := readiness{reply.Ready, reply.State, reply.Reason, reply.Progress}
	if !reply.Ready {
		return x.notReady(state)
	}
	return x.json(http.StatusOK, state)
}

func (x *exchange) notReady(state readiness) error {
	x.w.Header().Set("Retry-After", "1")
	return x.json(http.StatusServiceUnavailable, state)
}
