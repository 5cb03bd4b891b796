// Package colibri speaks the client protocol of the Colibri daemon; daemon/colibri_protocol/SPEC.md describes it.
package colibri

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"io"

	"github.com/tinylib/msgp/msgp"
)

// Message is one of the structs of messages_gen.go that have a tag.
type Message interface {
	Tag() uint64
	appendBody(b []byte) []byte
}

// TokenIDs travel as binary, little-endian u32 each.
type TokenIDs []uint32

// Floats travel as binary, little-endian f32 each. Minus infinity travels as -9999.
type Floats []float32

// Encode makes one frame, header included, in canonical form: the same bytes as the daemon's own encoder.
func Encode(m Message, id uint64) []byte {
	return Append(make([]byte, 0, 64), m, id)
}

// Append is Encode behind what is in b.
func Append(b []byte, m Message, id uint64) []byte {
	start := len(b)
	b = append(b, make([]byte, HeaderBytes)...)
	b = msgp.AppendArrayHeader(b, 3)
	b = msgp.AppendUint64(b, m.Tag())
	b = msgp.AppendUint64(b, id)
	b = m.appendBody(b)
	binary.BigEndian.PutUint32(b[start:], uint32(len(b)-start-HeaderBytes))
	return b
}

// Decode reads one payload. A nil message without an error is one of a type that may be skipped. An error is a
// *ProtocolError; if it is not a fault, id is right and the connection can go on.
func Decode(payload []byte) (m Message, id uint64, err error) {
	if broken := scan(payload); broken != nil {
		return nil, 0, broken
	}
	tag, id, body, problem := envelope(payload)
	if problem != nil {
		return nil, 0, problem
	}
	reader, known := readers[tag]
	if !known && tag >= Ignorable {
		return nil, id, nil
	}
	if !known {
		return nil, id, fault(CodeProtocol, "type %d is unknown", tag)
	}
	if _, problem = checkValue(body, "body"); problem != nil {
		return nil, id, problem
	}
	d := decoder{b: body, field: "body"}
	m = reader(&d)
	if d.err != nil {
		return nil, id, d.err
	}
	return m, id, nil
}

// envelope takes a scanned payload apart.
func envelope(payload []byte) (tag, id uint64, body []byte, problem *ProtocolError) {
	const arrayOf3 = 0x93
	if payload[0] != arrayOf3 {
		return 0, 0, nil, fault(CodeProtocol, "a message is an array of three: type, request id, body")
	}
	tag, rest, err := msgp.ReadUint64Bytes(payload[1:])
	if err != nil {
		return 0, 0, nil, fault(CodeProtocol, "the type is not an integer from 0 to 2^64−1")
	}
	id, body, err = msgp.ReadUint64Bytes(rest)
	if err != nil {
		return 0, 0, nil, fault(CodeProtocol, "the request id is not an integer from 0 to 2^64−1")
	}
	return tag, id, body, nil
}

// FrameReader cuts a stream into payloads. It reads ahead, and what it keeps grows with what arrives, not with what a
// header announces.
type FrameReader struct {
	r    *bufio.Reader
	max  uint32
	used int          // bytes of r that the last payload is in
	big  bytes.Buffer // a payload that does not fit into r's buffer
}

const readAhead = 256 << 10 // the longest SCORES fit

// NewFrameReader reads from r frames of at most max bytes.
func NewFrameReader(r io.Reader, max uint32) *FrameReader {
	return &FrameReader{r: bufio.NewReaderSize(r, readAhead), max: max}
}

// Next gives the next payload, valid until the call after it. io.EOF: the stream ended between frames. A *ProtocolError
// is a fault, which is an io.ErrUnexpectedEOF if the stream ended within a frame; any other error is the reader's.
func (f *FrameReader) Next() ([]byte, error) {
	f.discard(f.used)
	f.used = 0
	header, err := f.r.Peek(HeaderBytes)
	if err != nil {
		if len(header) > 0 {
			err = cut(err)
		}
		return nil, err
	}
	size := binary.BigEndian.Uint32(header)
	if size == 0 {
		return nil, fault(CodeProtocol, "a frame of length 0; a payload has at least one byte")
	}
	if size > f.max {
		return nil, fault(CodeFrameTooLarge, "a frame of %d bytes; at most %d are allowed", size, f.max)
	}
	f.discard(HeaderBytes)
	return f.payload(int(size))
}

func (f *FrameReader) payload(size int) ([]byte, error) {
	if size <= f.r.Size() {
		payload, err := f.r.Peek(size)
		f.used = len(payload)
		return payload, cut(err)
	}
	f.big.Reset()
	_, err := io.CopyN(&f.big, f.r, int64(size))
	return f.big.Bytes(), cut(err)
}

// discard drops what has been peeked at, which cannot fail.
func (f *FrameReader) discard(n int) { _, _ = f.r.Discard(n) }

// cut is what an error within a frame means.
func cut(err error) error {
	if err != io.EOF {
		return err
	}
	problem := fault(CodeProtocol, "the stream ends in the middle of a frame")
	problem.err = io.ErrUnexpectedEOF
	return problem
}
