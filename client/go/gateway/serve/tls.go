package serve

import (
	"crypto/tls"
	"log/slog"
	"sync/atomic"
)

// Certificate is a TLS certificate and its key in files that may be renewed.
type Certificate struct {
	cert, key string
	log       *slog.Logger
	now       atomic.Pointer[tls.Certificate]
}

// OpenCertificate reads it.
func OpenCertificate(cert, key string, log *slog.Logger) (*Certificate, error) {
	c := &Certificate{cert: cert, key: key, log: log}
	return c, c.Reload()
}

// Reload reads it again; on an error the old one stays.
func (c *Certificate) Reload() error {
	loaded, err := tls.LoadX509KeyPair(c.cert, c.key)
	if err != nil {
		return err
	}
	c.now.Store(&loaded)
	c.log.Info("certificate read", "file", c.cert, "until", loaded.Leaf.NotAfter)
	return nil
}

// Config is for a server: TLS 1.2 and later, HTTP/2 and HTTP/1.1.
func (c *Certificate) Config() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		NextProtos: []string{"h2", "http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			return c.now.Load(), nil
		},
	}
}
