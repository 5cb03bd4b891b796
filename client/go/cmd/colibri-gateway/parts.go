package main

import (
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"colibri/client/go/gateway/apikeys"
	"colibri/client/go/gateway/config"
	"colibri/client/go/gateway/serve"
	"colibri/client/go/unixsock"
)

func dial(c *config.Config) *unixsock.Client {
	if c.Connections == 0 {
		return unixsock.New(c.Socket)
	}
	return unixsock.New(c.Socket, unixsock.WithConnections(c.Connections))
}

// registry has what every Go program tells of itself.
func registry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	process := collectors.NewProcessCollector(collectors.ProcessCollectorOpts{})
	r.MustRegister(collectors.NewGoCollector(), process)
	return r
}

// files are what is read again while it runs; each may be nil.
type files struct {
	keys        *apikeys.File
	certificate *serve.Certificate
}

func open(c *config.Config, log *slog.Logger) (f files, err error) {
	if c.APIKeys != "" {
		if f.keys, err = apikeys.Open(c.APIKeys, log); err != nil {
			return f, err
		}
	}
	if c.TLSCert != "" {
		f.certificate, err = serve.OpenCertificate(c.TLSCert, c.TLSKey, log)
	}
	return f, err
}

func (f files) tls() *tls.Config {
	if f.certificate == nil {
		return nil
	}
	return f.certificate.Config()
}

func (f files) reload(log *slog.Logger) {
	if f.keys != nil {
		report(log, f.keys.Reload())
	}
	if f.certificate != nil {
		report(log, f.certificate.Reload())
	}
}

func report(log *slog.Logger, err error) {
	if err != nil {
		log.Error("reload failed, nothing has changed", "error", err)
	}
}

// listen opens the main address and, if there is one, that of metrics and health.
func listen(c *config.Config, main serve.Place, operations http.Handler) (places []serve.Place, err error) {
	if main.Listener, err = serve.Listen(c.Listen, os.FileMode(c.ListenMode)); err != nil {
		return nil, err
	}
	places = append(places, main)
	if c.MetricsListen == "" {
		return places, nil
	}
	other := serve.Place{Handler: operations}
	if other.Listener, err = serve.Listen(c.MetricsListen, os.FileMode(c.ListenMode)); err != nil {
		return nil, err
	}
	return append(places, other), nil
}

// hashKey is the command of that name; its exit code.
func hashKey(arguments []string) int {
	if len(arguments) != 1 || !apikeys.ValidName(arguments[0]) {
		fmt.Fprintln(os.Stderr, "Usage: colibri-gateway hash-key NAME < KEY   (an empty input: a new key)")
		return exitRefused
	}
	input, err := io.ReadAll(io.LimitReader(os.Stdin, 1<<16))
	if err != nil {
		fmt.Fprintln(os.Stderr, "colibri-gateway:", err)
		return exitRefused
	}
	key := strings.TrimSpace(string(input))
	if key == "" {
		key = apikeys.New()
		fmt.Fprintln(os.Stderr, key)
	}
	fmt.Println(apikeys.Hash(key), arguments[0])
	return 0
}
