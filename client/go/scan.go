package colibri

import (
	"bytes"
	"encoding/binary"
	"strconv"
	"unicode/utf8"

	"github.com/tinylib/msgp/msgp"
)

// lengths describes a type whose length follows the lead byte, or is in its low bits (mask) when size is 0. values: how
// many values an entry is; 0 = the length is bytes to be skipped.
type lengths struct {
	name   string
	size   int
	limit  uint64
	values uint64
	mask   byte
}

var (
	widths [256]int // bytes of a value of fixed width, lead byte included; 0 for all others
	sized  [256]*lengths
)

func init() {
	set := func(first, last int, make func(lead int)) {
		for lead := first; lead <= last; lead++ {
			make(lead)
		}
	}
	width := func(n int) func(int) { return func(lead int) { widths[lead] = n } }
	length := func(row lengths) func(int) { return func(lead int) { sized[lead] = &row } }
	set(0x00, 0x7f, width(1)) // small integers
	set(0xe0, 0xff, width(1))
	set(0xa0, 0xbf, func(lead int) { widths[lead] = 1 + lead&0x1f }) // short text
	for lead, n := range map[int]int{0xc0: 0, 0xc2: 0, 0xc3: 0, 0xca: 4, 0xcb: 8, 0xcc: 1, 0xcd: 2, 0xce: 4, 0xcf: 8,
		0xd0: 1, 0xd1: 2, 0xd2: 4, 0xd3: 8} {
		widths[lead] = 1 + n
	}
	set(0x80, 0x8f, length(lengths{"map", 0, MaxMap, 2, 0x0f}))
	set(0x90, 0x9f, length(lengths{"array", 0, MaxArray, 1, 0x0f}))
	for log := range 3 {
		length(lengths{"binary", 1 << log, FrameCeiling, 0, 0})(0xc4 + log)
		length(lengths{"text", 1 << log, MaxText, 0, 0})(0xd9 + log)
	}
	for log := range 2 {
		length(lengths{"array", 2 << log, MaxArray, 1, 0})(0xdc + log)
		length(lengths{"map", 2 << log, MaxMap, 2, 0})(0xde + log)
	}
}

// scan checks that b is exactly one MessagePack value within the limits, before anything is made of it: what it
// announces is never reserved. It gives nothing but a fault.
func scan(b []byte) *ProtocolError {
	s := scanner{b: b, left: 1, items: 1}
	for s.left > 0 {
		if err := s.value(); err != nil {
			return err
		}
		for s.left == 0 && s.depth > 0 {
			s.depth--
			s.left = s.outer[s.depth]
		}
	}
	if s.at > len(b) {
		return errCut
	}
	if s.at < len(b) {
		return fault(CodeProtocol, "%d bytes follow the message", len(b)-s.at)
	}
	return nil
}

var errCut = fault(CodeProtocol, "the frame ends within a value")

type scanner struct {
	b     []byte
	at    int
	left  uint64           // values still to come at this level
	outer [MaxDepth]uint64 // and at the levels around it
	depth int
	items uint64
}

// value steps over a scalar, or into an array or map.
func (s *scanner) value() *ProtocolError {
	if s.at >= len(s.b) {
		return errCut
	}
	lead := s.b[s.at]
	s.left--
	if width := widths[lead]; width > 0 {
		s.at += width
		return nil
	}
	row := sized[lead]
	if row == nil {
		return fault(CodeProtocol, "type byte 0x%02x is not used by this protocol", lead)
	}
	if s.at+1+row.size > len(s.b) {
		return errCut
	}
	n := row.length(s.b[s.at:])
	s.at += 1 + row.size
	remaining := uint64(len(s.b) - s.at)
	if n > row.limit {
		return fault(CodeProtocol, "%s of length %d; at most %d is allowed", row.name, n, row.limit)
	}
	if n*max(row.values, 1) > remaining {
		return fault(CodeProtocol, "%s announces length %d, but %d bytes are left in the frame", row.name, n, remaining)
	}
	if row.values == 0 {
		s.at += int(n)
		return nil
	}
	return s.enter(n * row.values)
}

// enter goes down into an array or map of so many values.
func (s *scanner) enter(values uint64) *ProtocolError {
	if s.depth == MaxDepth {
		return fault(CodeProtocol, "arrays and maps are nested deeper than %d", MaxDepth)
	}
	if s.items += values; s.items > MaxItems {
		return fault(CodeProtocol, "more than %d values in one frame", MaxItems)
	}
	s.outer[s.depth] = s.left
	s.depth++
	s.left = values
	return nil
}

// length reads the length at b, which begins with the lead byte and is long enough.
func (row *lengths) length(b []byte) uint64 {
	switch row.size {
	case 1:
		return uint64(b[1])
	case 2:
		return uint64(binary.BigEndian.Uint16(b[1:]))
	case 4:
		return uint64(binary.BigEndian.Uint32(b[1:]))
	}
	return uint64(b[0] & row.mask)
}

// checkValue goes through a scanned value: keys are text or integers, each once, and text is UTF-8. It gives the bytes
// after the value. field is the one of the body that it is in, or "body". scan has bounded the recursion.
func checkValue(b []byte, field string) ([]byte, *ProtocolError) {
	switch msgp.NextType(b) {
	case msgp.StrType:
		text, rest, _ := msgp.ReadStringZC(b)
		if !utf8.Valid(text) {
			return nil, invalid(field, "has text that is not UTF-8")
		}
		return rest, nil
	case msgp.ArrayType:
		n, rest, _ := msgp.ReadArrayHeaderBytes(b)
		var err *ProtocolError
		for ; n > 0 && err == nil; n-- {
			rest, err = checkValue(rest, field)
		}
		return rest, err
	case msgp.MapType:
		return checkMap(b, field)
	}
	rest, _ := msgp.Skip(b)
	return rest, nil
}

func checkMap(b []byte, field string) ([]byte, *ProtocolError) {
	n, rest, _ := msgp.ReadMapHeaderBytes(b)
	var few [16]mapKey
	seen := few[:0] // n is at most MaxMap: comparing each with each is cheap
	for ; n > 0; n-- {
		key, ok := keyOf(rest)
		if !ok {
			return nil, invalid("body", "has a key that is neither text nor an integer")
		}
		for _, other := range seen {
			if key.equal(other) {
				return nil, invalid(key.String(), "is there twice")
			}
		}
		seen = append(seen, key)
		value, err := checkValue(rest, field)
		if err != nil {
			return nil, err
		}
		if rest, err = checkInside(value, key, field); err != nil {
			return nil, err
		}
	}
	return rest, nil
}

// checkInside is checkValue for the value of a key. Most values are scalars, whose field need not be named.
func checkInside(b []byte, key mapKey, field string) ([]byte, *ProtocolError) {
	if field == "body" {
		switch msgp.NextType(b) {
		case msgp.StrType, msgp.ArrayType, msgp.MapType:
			field = key.String()
		}
	}
	return checkValue(b, field)
}

// mapKey is a text or an integer.
type mapKey struct {
	isText   bool
	text     []byte
	number   uint64
	negative bool
}

func (k mapKey) equal(other mapKey) bool {
	return k.isText == other.isText && bytes.Equal(k.text, other.text) && k.number == other.number &&
		k.negative == other.negative
}

func (k mapKey) String() string {
	switch {
	case k.isText:
		return string(k.text)
	case k.negative:
		return strconv.FormatInt(int64(k.number), 10)
	}
	return strconv.FormatUint(k.number, 10)
}

// keyOf reads the key at b; it stays part of b.
func keyOf(b []byte) (key mapKey, ok bool) {
	switch msgp.NextType(b) {
	case msgp.StrType:
		key.isText = true
		key.text, _, _ = msgp.ReadStringZC(b)
	case msgp.UintType:
		key.number, _, _ = msgp.ReadUint64Bytes(b)
	case msgp.IntType:
		n, _, _ := msgp.ReadInt64Bytes(b)
		key.number, key.negative = uint64(n), n < 0
	default:
		return key, false
	}
	return key, true
}
