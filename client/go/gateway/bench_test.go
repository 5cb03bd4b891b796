package gateway

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
)

// The upstream answers at once, so what is measured is the gateway, Go's HTTP server and the client of the benchmark.
// Use -cpu 1 for figures per core.

// BenchmarkChunks streams one long completion, one token a chunk: chunks/s.
func BenchmarkChunks(b *testing.B) {
	u := &upstream{output: slices.Repeat(encodeTiny(b, story), b.N/len(encodeTiny(b, story))+1), finish: "length"}
	s, _ := server(b, u)
	body := fmt.Sprintf(`{"messages":[{"role":"user","content":"a"}],"max_tokens":%d,"stream":true}`, b.N)
	b.ReportAllocs()
	b.ResetTimer()
	response, err := http.Post(s.URL+"/v1/chat/completions", "application/json", strings.NewReader(body))
	if err != nil {
		b.Fatal(err)
	}
	defer response.Body.Close()
	counter := &lineCounter{}
	if _, err := io.Copy(counter, response.Body); err != nil {
		b.Fatal(err)
	}
	if counter.lines < b.N {
		b.Fatal("only", counter.lines, "events")
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "chunks/s")
}

type lineCounter struct{ lines int }

func (c *lineCounter) Write(p []byte) (int, error) {
	c.lines += bytes.Count(p, []byte("data: "))
	return len(p), nil
}

// BenchmarkFirstToken is the time from sending a request to reading its first event, on a connection that is kept. The
// 16-token prompt is encoded, the answer has 8 tokens.
func BenchmarkFirstToken(b *testing.B) {
	u := &upstream{output: encodeTiny(b, story)[:8], finish: "length"}
	s, _ := server(b, u)
	body := `{"prompt":"` + story + `","max_tokens":8,"stream":true}`
	conn := dial(b, s)
	answers := bufio.NewReader(conn)
	took := make([]time.Duration, 0, b.N)
	for b.Loop() {
		start := time.Now()
		io.WriteString(conn, rawPost(body, "1.1"))
		for line := ""; !strings.HasPrefix(line, "data: "); {
			line, _ = answers.ReadString('\n')
		}
		took = append(took, time.Since(start))
		for line := ""; line != "0\r\n"; {
			line, _ = answers.ReadString('\n')
		}
		answers.ReadString('\n')
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-µs")
}
