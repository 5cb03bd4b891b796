package serve

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var quiet = slog.New(slog.DiscardHandler)

// running is a Run of one place whose answers wait for release.
type running struct {
	url      string
	client   *http.Client
	signals  chan os.Signal
	ended    chan error
	entered  chan struct{}
	release  chan struct{}
	drained  atomic.Bool
	reloaded atomic.Int64
}

func start(t *testing.T, change func(*Plan)) *running {
	t.Helper()
	listener, err := Listen("127.0.0.1:0", 0)
	if err != nil {
		t.Fatal(err)
	}
	r := &running{url: "http://" + listener.Addr().String(), signals: make(chan os.Signal, 2), ended: make(chan error,
		1),
		entered: make(chan struct{}, 1), release: make(chan struct{}),
		client: &http.Client{Transport: &http.Transport{}}}
	handler := http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		r.entered <- struct{}{}
		select {
		case <-r.release:
		case <-request.Context().Done():
		}
	})
	plan := Plan{Places: []Place{{listener, handler, nil}}, Signals: r.signals, Drain: func() { r.drained.Store(true) },
		Reload: func() { r.reloaded.Add(1) }, Timeout: time.Minute, Log: quiet}
	change(&plan)
	go func() { r.ended <- Run(plan) }()
	t.Cleanup(r.client.CloseIdleConnections)
	return r
}

// ask sends a request and gives its answer's error.
func (r *running) ask() <-chan error {
	answered := make(chan error, 1)
	go func() {
		response, err := r.client.Get(r.url)
		if err == nil {
			response.Body.Close()
		}
		answered <- err
	}()
	<-r.entered
	return answered
}

func TestDrain(t *testing.T) {
	r := start(t, func(*Plan) {})
	answered := r.ask()
	r.signals <- syscall.SIGHUP
	r.signals <- syscall.SIGTERM
	for {
		conn, err := net.Dial("tcp", r.url[len("http://"):])
		if err != nil {
			break // closed to new ones
		}
		conn.Close()
		time.Sleep(time.Millisecond)
	}
	select {
	case err := <-r.ended:
		t.Fatal("ended before the request had its answer", err)
	default:
	}
	close(r.release)
	if err := <-answered; err != nil {
		t.Error(err)
	}
	if err := <-r.ended; err != nil || !r.drained.Load() || r.reloaded.Load() != 1 {
		t.Error(err, r.drained.Load(), r.reloaded.Load())
	}
}

func TestSecondSignal(t *testing.T) {
	for name, delay := range map[string]time.Duration{"in the delay": time.Hour, "while draining": 0} {
		r := start(t, func(p *Plan) { p.Delay = delay })
		answered := r.ask()
		r.signals <- syscall.SIGTERM
		r.signals <- syscall.SIGTERM
		if err := <-r.ended; err != nil {
			t.Error(name, err)
		}
		if err := <-answered; err == nil {
			t.Error(name, "the request was answered")
		}
	}
}

// Half a header holds a connection no longer than that, and what is being answered is not hurried by it.
func TestSlowHeaders(t *testing.T) {
	r := start(t, func(p *Plan) { p.Headers = 50 * time.Millisecond })
	answered := r.ask()
	for _, sent := range []string{"", "GET / HTTP/1.1\r\n", "GET / HTTP/1.1\r\nHost: x\r\nX-Slow: "} {
		conn, err := net.Dial("tcp", r.url[len("http://"):])
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Write([]byte(sent)); err != nil {
			t.Error(err)
		}
		if got, err := io.ReadAll(conn); err != nil || len(got) > 0 {
			t.Errorf("%q: %q, %v", sent, got, err)
		}
		conn.Close()
	}
	close(r.release)
	if err := <-answered; err != nil {
		t.Error(err)
	}
	r.signals <- syscall.SIGTERM
	if err := <-r.ended; err != nil {
		t.Error(err)
	}
}

func TestDrainTimeout(t *testing.T) {
	r := start(t, func(p *Plan) { p.Timeout = time.Millisecond })
	answered := r.ask()
	r.signals <- syscall.SIGTERM
	if err := <-r.ended; err != nil {
		t.Error(err)
	}
	if err := <-answered; err == nil {
		t.Error("the request was answered")
	}
}

func TestUnixSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	listener, err := Listen("unix:"+path, 0o640)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o640 {
		t.Error(info.Mode(), err)
	}
	if _, err := Listen("unix:"+path, 0o640); err == nil {
		t.Error("a socket in use was taken")
	}
	listener.(bounded).Listener.(*net.UnixListener).SetUnlinkOnClose(false)
	listener.Close()
	if listener, err = Listen("unix:"+path, 0o640); err != nil {
		t.Fatal("a stale socket is in the way:", err)
	}
	listener.Close()
	if _, err := os.Stat(path); err == nil {
		t.Error("the socket was left")
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen("unix:"+path, 0o640); err == nil {
		t.Error("a file was removed")
	}
}

func TestNoSystemd(t *testing.T) {
	if _, err := Listen("systemd", 0); err == nil {
		t.Error("there is a socket of systemd")
	}
}

func TestCertificateIsReloaded(t *testing.T) {
	folder := t.TempDir()
	cert, key := filepath.Join(folder, "cert"), filepath.Join(folder, "key")
	certify(t, cert, key, 1)
	c, err := OpenCertificate(cert, key, quiet)
	if err != nil {
		t.Fatal(err)
	}
	listener, _ := Listen("127.0.0.1:0", 0)
	signals, ended := make(chan os.Signal, 1), make(chan error, 1)
	reloaded := make(chan error, 1)
	handler := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok") })
	go func() {
		ended <- Run(Plan{Places: []Place{{listener, handler, c.Config()}}, Signals: signals, Drain: func() {},
			Reload: func() { reloaded <- c.Reload() }, Timeout: time.Second, Log: quiet})
	}()
	serial := func() (serial int64, protocol string) {
		client := &http.Client{Transport: &http.Transport{ForceAttemptHTTP2: true, DisableKeepAlives: true,
			TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
		response, err := client.Get("https://" + listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		return response.TLS.PeerCertificates[0].SerialNumber.Int64(), response.Proto
	}
	if n, protocol := serial(); n != 1 || protocol != "HTTP/2.0" {
		t.Error(n, protocol)
	}
	certify(t, cert, key, 2)
	signals <- syscall.SIGHUP
	if err := <-reloaded; err != nil {
		t.Fatal(err)
	}
	if n, _ := serial(); n != 2 {
		t.Error(n)
	}
	os.WriteFile(key, []byte("nonsense"), 0o600)
	signals <- syscall.SIGHUP
	if err := <-reloaded; err == nil {
		t.Error("nonsense was read")
	}
	if n, _ := serial(); n != 2 {
		t.Error(n)
	}
	signals <- syscall.SIGTERM
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// certify writes a certificate that signs itself.
func certify(t *testing.T, cert, key string, serial int64) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(serial), NotAfter: time.Now().Add(time.Hour)}
	signed, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	encoded, _ := x509.MarshalECPrivateKey(private)
	for path, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: signed},
		key: {Type: "EC PRIVATE KEY", Bytes: encoded}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}
