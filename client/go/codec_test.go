package colibri

import (
	"bytes"
	"errors"
	"io"
	"runtime"
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

// FuzzDecode: nothing panics, every error is a ProtocolError, and what is accepted is stable once it is canonical.
func FuzzDecode(f *testing.F) {
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
