package colibri

import (
	"encoding/binary"
	"maps"
	"math"
	"slices"

	"github.com/tinylib/msgp/msgp"
)

// object is a map that is being appended; its header is put in when the number of fields is known.
type object struct {
	b     []byte
	start int
	n     uint32
}

func openMap(b []byte) object { return object{b: b, start: len(b)} }

func (o *object) close() []byte {
	return slices.Insert(o.b, o.start, msgp.AppendMapHeader(nil, o.n)...)
}

// put appends one field.
func put[T any](o *object, key string, value T, add func([]byte, T) []byte) {
	o.b = add(msgp.AppendString(o.b, key), value)
	o.n++
}

// putUnlessEmpty is put for a map whose fields all have their defaults or not.
func putUnlessEmpty[T any](o *object, key string, value T, add func([]byte, T) []byte) {
	const emptyMap = 0x80
	if body := add(nil, value); body[0] != emptyMap {
		put(o, key, body, func(b, body []byte) []byte { return append(b, body...) })
	}
}

func appendUint(b []byte, value uint64) []byte { return msgp.AppendUint64(b, value) }

// appendInt is the shortest form: unsigned if it is not negative.
func appendInt(b []byte, value int64) []byte {
	if value >= 0 {
		return msgp.AppendUint64(b, uint64(value))
	}
	return msgp.AppendInt64(b, value)
}

func appendTokens(b []byte, ids TokenIDs) []byte {
	b = msgp.AppendBytesHeader(b, uint32(4*len(ids)))
	for _, id := range ids {
		b = binary.LittleEndian.AppendUint32(b, id)
	}
	return b
}

func appendFloats(b []byte, values Floats) []byte {
	b = msgp.AppendBytesHeader(b, uint32(4*len(values)))
	for _, value := range values {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(value))
	}
	return b
}

// listOf makes a function that appends a list of one that appends an entry.
func listOf[T any](add func([]byte, T) []byte) func([]byte, []T) []byte {
	return func(b []byte, list []T) []byte {
		b = msgp.AppendArrayHeader(b, uint32(len(list)))
		for _, entry := range list {
			b = add(b, entry)
		}
		return b
	}
}

func appendBiases(b []byte, biases map[uint32]float64) []byte {
	b = msgp.AppendMapHeader(b, uint32(len(biases)))
	for _, id := range slices.Sorted(maps.Keys(biases)) {
		b = msgp.AppendFloat64(msgp.AppendUint32(b, id), biases[id])
	}
	return b
}

func appendCounts(b []byte, counts map[string]float64) []byte {
	b = msgp.AppendMapHeader(b, uint32(len(counts)))
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		b = msgp.AppendFloat64(msgp.AppendString(b, name), counts[name])
	}
	return b
}
