package colibri

import (
	"bytes"
	"errors"
	"io"
	"runtime"
	"slices"
	"testing"
	"testing/iotest"
)

func TestDefaultsAreLeftOut(t *testing.T) {
	request := NewGenerate()
	request.Tokens = TokenIDs{1}
	if n := len(Encode(&request, 1)); n != HeaderBytes+4+1+6+6 {
		t.Errorf("%d bytes", n)
	}
}

func TestFramesComeWholeFromAnySplit(t *testing.T) {
	stream := append(Encode(&Ping{Data: []byte("abc")}, 5), Encode(&Bye{}, 0)...)
	for _, r := range []io.Reader{bytes.NewReader(stream), iotest.OneByteReader(bytes.NewReader(stream))} {
		frames := NewFrameReader(r, MaxFrame)
		for _, tag := range []uint64{TagPing, TagBye} {
			payload, err := frames.Next()
			if err != nil {
				t.Fatal(err)
			}
			if message, _, err := Decode(payload); err != nil || message.Tag() != tag {
				t.Errorf("%v, %v", message, err)
			}
		}
		if _, err := frames.Next(); err != io.EOF {
			t.Errorf("%v at the end", err)
		}
	}
}

func TestStreamEndsInAFrame(t *testing.T) {
	stream := Encode(&Bye{}, 0)
	for n := 1; n < len(stream); n++ {
		_, err := NewFrameReader(bytes.NewReader(stream[:n]), MaxFrame).Next()
		var problem *ProtocolError
		if !errors.As(err, &problem) || problem.Code != CodeProtocol {
			t.Errorf("after %d bytes: %v", n, err)
		}
	}
}

func TestTypesThatMayBeSkipped(t *testing.T) {
	if message, id, err := Decode([]byte{0x93, 0xcc, 200, 9, 0x80}); message != nil || id != 9 || err != nil {
		t.Errorf("%v, %d, %v", message, id, err)
	}
}

// What a few bytes announce is not reserved.
func TestAnnouncedSizesCostNothing(t *testing.T) {
	bombs := map[string][]byte{
		"frame":   {0, 0x10, 0, 0, 0x93},
		"array32": {0, 0, 0, 7, 0x93, 3, 9, 0xdd, 0xff, 0xff, 0xff, 0xff},
		"array16": append([]byte{0, 1, 0x11, 0x70}, bytes.Repeat([]byte{0xdc, 0xff, 0xff}, 23344)...),
		"bin32":   {0, 0, 0, 8, 0x93, 3, 9, 0xc6, 0x7f, 0xff, 0xff, 0xff},
	}
	for name, bomb := range bombs {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if _, _, err := decodeStream(bomb); err == nil {
			t.Errorf("%s: accepted", name)
		}
		runtime.ReadMemStats(&after)
		if grown := after.TotalAlloc - before.TotalAlloc; grown > 512<<10 {
			t.Errorf("%s: %d bytes allocated", name, grown)
		}
	}
}

func TestRetryable(t *testing.T) {
	rows := []struct {
		code Code
		sent uint64
		want bool
	}{
		{CodeQueueFull, 5, true}, {CodeWorkerLost, 0, true}, {CodeWorkerLost, 1, false}, {CodeDraining, 0, false},
		{CodePoisoned, 0, false}, {9999, 0, false},
	}
	for _, row := range rows {
		if row.code.Retryable(row.sent) != row.want {
			t.Errorf("%v after %d tokens", row.code, row.sent)
		}
	}
}

func TestErrorsSayTheirCode(t *testing.T) {
	var err error = &Error{Code: uint64(CodeQueueFull), Message: "full"}
	if err.Error() != "QUEUE_FULL: full" || CodeQueueFull.HTTP() != 429 {
		t.Error(err)
	}
	if Code(9999).String() != "code 9999" || Code(9999).HTTP() != 500 {
		t.Error(Code(9999))
	}
}

// FuzzMessages: nothing panics, every error is a ProtocolError, and what is accepted is stable once it is canonical.
func FuzzMessages(f *testing.F) {
	loaded := loadVectors(f)
	for _, vector := range loaded.Messages {
		f.Add(unhex(f, vector.Hex)[HeaderBytes:])
	}
	for _, vector := range loaded.Refused {
		f.Add(unhex(f, vector.Hex)[HeaderBytes:])
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		message, id, err := Decode(payload)
		var problem *ProtocolError
		if err != nil && !errors.As(err, &problem) {
			t.Fatal(err)
		}
		if message == nil {
			return
		}
		data := Encode(message, id)
		again, _, err := Decode(data[HeaderBytes:])
		if err != nil {
			t.Fatalf("%x is refused: %v", data, err)
		}
		if !bytes.Equal(Encode(again, id), data) {
			t.Errorf("%x is not stable", data)
		}
	})
}

// FuzzFrames: however a stream is cut into reads, it gives the same payloads and the same end, and no more is kept than
// what has arrived asks for.
func FuzzFrames(f *testing.F) {
	for _, vector := range loadVectors(f).Messages {
		f.Add(unhex(f, vector.Hex), uint16(3))
	}
	f.Add([]byte{0, 0x10, 0, 0, 0x93}, uint16(1))
	f.Fuzz(func(t *testing.T, stream []byte, piece uint16) {
		whole, wholeErr := allFrames(t, bytes.NewReader(stream), len(stream))
		cut, cutErr := allFrames(t, &pieces{stream, 1 + int(piece)}, len(stream))
		if !slices.EqualFunc(whole, cut, bytes.Equal) || wholeErr.Error() != cutErr.Error() {
			t.Errorf("%x, %v whole; %x, %v in pieces of %d", whole, wholeErr, cut, cutErr, 1+int(piece))
		}
	})
}

func allFrames(t *testing.T, r io.Reader, arrived int) (payloads [][]byte, err error) {
	frames := NewFrameReader(r, FrameCeiling)
	for {
		payload, err := frames.Next()
		if kept := frames.big.Cap(); kept > 4*arrived+readAhead {
			t.Fatalf("%d bytes kept for %d that arrived", kept, arrived)
		}
		if err != nil {
			return payloads, err
		}
		payloads = append(payloads, bytes.Clone(payload))
	}
}

// pieces gives at most n bytes in each read.
type pieces struct {
	left []byte
	n    int
}

func (p *pieces) Read(b []byte) (int, error) {
	if len(p.left) == 0 {
		return 0, io.EOF
	}
	n := copy(b[:min(len(b), p.n)], p.left)
	p.left = p.left[n:]
	return n, nil
}
