package gateway

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// rawPost is a request as bytes.
func rawPost(body, version string) string {
	head := fmt.Sprintf("POST /v1/completions HTTP/%s\r\nHost: x\r\nContent-Length: %d\r\n", version, len(body))
	return head + "Content-Type: application/json\r\n\r\n" + body
}

// TestClientLeaves: before the first token, streaming or not, the daemon's request is cancelled and the log says 499.
func TestClientLeaves(t *testing.T) {
	for _, body := range []string{ask1, `{"prompt":"Tell","stream":true}`, `{"prompt":["a","b","c"]}`} {
		u := storyteller(t)
		u.hold = make(chan struct{})
		s, g := server(t, u)
		ctx, leave := context.WithCancel(context.Background())
		request, _ := http.NewRequestWithContext(ctx, "POST", s.URL+"/v1/completions", strings.NewReader(body))
		request.Header.Set("Content-Type", "application/json")
		gone := make(chan error, 1)
		go func() {
			_, err := http.DefaultClient.Do(request)
			gone <- err
		}()
		eventually(t, "it runs", func() bool { return u.live.Load() > 0 })
		leave()
		if err := <-gone; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		eventually(t, "it is cancelled", func() bool { return u.live.Load() == 0 })
		eventually(t, "the log has 499", func() bool {
			page := httptest.NewRecorder()
			g.metrics.handler.ServeHTTP(page, httptest.NewRequest("GET", "/metrics", nil))
			return strings.Contains(page.Body.String(),
				`colibri_gateway_requests_total{code="499",route="/v1/completions"} 1`)
		})
	}
}

// endless is an output that goes on until somebody stops it.
func endless() *upstream {
	output := make([]uint32, 1<<20)
	for i := range output {
		output[i] = 500
	}
	return &upstream{output: output, finish: "length"}
}

// TestNeverRead: a client that does not read costs a bounded time and no growing memory.
func TestNeverRead(t *testing.T) {
	u := endless()
	s, _ := server(t, u, func(o *Options) { o.WriteTime = 1500 * time.Millisecond })
	conns := make([]net.Conn, 20)
	for i := range conns {
		conn := dial(t, s)
		conn.(*net.TCPConn).SetReadBuffer(4096)
		conns[i] = conn
		body := `{"prompt":"Tell","max_tokens":1000000,"stream":true}`
		io.WriteString(conn, rawPost(body, "1.1"))
	}
	eventually(t, "all run", func() bool { return u.live.Load() == int64(len(conns)) })
	if response, _ := post(t, s, "/v1/completions", ask1); response.StatusCode != http.StatusOK {
		t.Error("others are affected", response.Status)
	}
	eventually(t, "they are given up", func() bool { return u.live.Load() == 0 })
	for _, conn := range conns {
		conn.Close()
	}
}

func dial(t testing.TB, s *httptest.Server) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", s.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func TestKeepAlive(t *testing.T) {
	u := storyteller(t)
	u.hold = make(chan struct{})
	s, _ := server(t, u, func(o *Options) { o.KeepAlive = 5 * time.Millisecond })
	request, _ := http.NewRequest("POST", s.URL+"/v1/completions",
		strings.NewReader(`{"prompt":"Tell","max_tokens":100,"stream":true}`))
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	lines := bufio.NewReader(response.Body)
	for range 2 {
		if line, _ := lines.ReadString('\n'); line != ": keep-alive\n" {
			t.Fatal(line)
		}
		lines.ReadString('\n')
	}
	close(u.hold)
	if rest, _ := io.ReadAll(lines); !strings.HasSuffix(string(rest), "data: [DONE]\n\n") {
		t.Error(string(rest))
	}
}

// TestOldAndPipelined: HTTP/1.0 gets a stream that ends with the connection; pipelined requests get answers in order.
func TestOldAndPipelined(t *testing.T) {
	s, _ := server(t, storyteller(t))
	conn := dial(t, s)
	body := `{"prompt":"Tell","max_tokens":100,"stream":true}`
	io.WriteString(conn, rawPost(body, "1.0"))
	old, _ := io.ReadAll(conn)
	if text := string(old); !strings.HasPrefix(text, "HTTP/1.0 200 OK\r\n") || strings.Contains(text, "chunked") ||
		!strings.HasSuffix(text, "data: [DONE]\n\n") {
		t.Error(text)
	}
	conn = dial(t, s)
	for i := range 3 {
		io.WriteString(conn, rawPost(fmt.Sprintf(`{"prompt":"Tell","max_tokens":%d}`, i+1), "1.1"))
	}
	answers := bufio.NewReader(conn)
	for i := range 3 {
		response, err := http.ReadResponse(answers, nil)
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(response.Body)
		if got := decode[answer[completionChoice]](t, string(text)); got.Usage.CompletionTokens != uint64(i+1) {
			t.Error(i, string(text))
		}
	}
}
