package colibri

import (
	"bytes"
	"io"
	"testing"
)

// One token in a frame, as streams have it.
func BenchmarkDecodeTokens(b *testing.B) {
	frame := Encode(&TokensOut{IDs: TokenIDs{415}, Index: 1000, Step: 123456}, 77)
	b.ReportAllocs()
	for b.Loop() {
		if _, _, err := Decode(frame[HeaderBytes:]); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkFrames(b *testing.B) {
	stream := bytes.Repeat(Encode(&TokensOut{IDs: TokenIDs{415}, Index: 1000, Step: 123456}, 77), 1000)
	b.ReportAllocs()
	for b.Loop() {
		frames := NewFrameReader(bytes.NewReader(stream), MaxFrame)
		for {
			if _, err := frames.Next(); err == io.EOF {
				break
			}
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(1000*b.N), "ns/frame")
}
