// Command colibri-gateway answers HTTP from a Colibri daemon. It only puts the parts together.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"colibri/client/go/gateway"
	"colibri/client/go/gateway/config"
	"colibri/client/go/gateway/serve"
)

// version is set by the build: -ldflags "-X main.version=...".
var version = "unknown"

const (
	exitRefused = 2
	exitAddress = 5
	keysEvery   = time.Second
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == "hash-key" {
		os.Exit(hashKey(os.Args[2:]))
	}
	settings, err := config.Parse(os.Args[1:], os.Stderr)
	switch {
	case errors.Is(err, config.ErrHelp):
		return
	case err != nil:
		fmt.Fprintln(os.Stderr, "colibri-gateway:", err)
		os.Exit(exitRefused)
	case settings.Version:
		fmt.Println("colibri-gateway", version)
		return
	}
	os.Exit(run(settings, settings.Logger(os.Stderr)))
}

func run(c *config.Config, log *slog.Logger) int {
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	client := dial(c)
	defer client.Close()
	files, err := open(c, log)
	if err != nil {
		log.Error("cannot start", "error", err)
		return exitRefused
	}
	if files.keys != nil {
		go files.keys.Watch(ctx, keysEvery)
	}
	g := gateway.New(gateway.Options{Client: client, Log: log, Registry: registry(), Version: version,
		ModelFolder: c.ModelFolder, Keys: files.keys, Metrics: c.MetricsListen == "", MaxBody: c.MaxBody,
		BodyTime: c.BodyTime, WriteTime: c.WriteTime, MaxChoices: c.MaxChoices, MaxRequests: c.MaxRequests})
	places, err := listen(c, serve.Place{Handler: g, TLS: files.tls()}, g.Operations())
	if err != nil {
		log.Error("cannot listen", "error", err)
		return exitAddress
	}
	for _, p := range places {
		log.Info("listening", "address", p.Listener.Addr().String(), "version", version, "socket", c.Socket)
	}
	err = serve.Run(serve.Plan{Places: places, Signals: signals, Drain: g.Drain, Delay: c.DrainDelay,
		Timeout: c.DrainTimeout, Log: log, Reload: func() { files.reload(log) }})
	if err != nil {
		log.Error("the listener failed", "error", err)
		return exitAddress
	}
	log.Info("stopped")
	return 0
}
