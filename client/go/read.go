package colibri

import (
	"encoding/binary"
	"iter"
	"math"
	"slices"

	"github.com/tinylib/msgp/msgp"
)

func ptr[T any](value T) *T { return &value }

// decoder reads the values of one scanned body. After the first error every call gives a zero value and reads nothing.
type decoder struct {
	b      []byte
	prefix string // of the map that is being read: "" or "cache."
	field  string // that is being read
	err    *ProtocolError
}

func (d *decoder) bad(format string, values ...any) {
	if d.err == nil {
		d.err = invalid(d.field, format, values...)
	}
}

// badEntry is bad for one entry of a list or map.
func (d *decoder) badEntry(code Code, index uint64, format string, values ...any) {
	if d.err == nil {
		d.bad(format, values...)
		d.err.Code, d.err.Index = code, &index
	}
}

// fields goes through the keys of a map; the loop's body reads or skips each value.
func (d *decoder) fields() iter.Seq[string] {
	return func(yield func(string) bool) {
		n, rest, err := msgp.ReadMapHeaderBytes(d.b)
		if err != nil {
			d.bad("must be a map")
		}
		prefix, whole := d.prefix, d.field
		if whole != "body" {
			d.prefix = whole + "."
		}
		for d.b = rest; n > 0 && d.err == nil; n-- {
			key, rest, err := msgp.ReadStringBytes(d.b)
			if err != nil {
				d.field = whole
				d.bad("has a key that is not text")
				break
			}
			d.b, d.field = rest, d.prefix+key
			if !yield(key) {
				break
			}
		}
		d.prefix, d.field = prefix, whole
	}
}

// require checks that bit i of seen is set for the i-th name.
func (d *decoder) require(seen uint64, names ...string) {
	for i, name := range names {
		if d.err == nil && seen>>i&1 == 0 {
			if d.field != "body" {
				name = d.field + "." + name
			}
			d.err = invalid(name, "is missing")
		}
	}
}

func (d *decoder) skip() {
	if d.err == nil {
		d.b, _ = msgp.Skip(d.b)
	}
}

// read takes one value off with a reader of msgp, whose error can only be the wrong type.
func read[T any](d *decoder, what string, from func([]byte) (T, []byte, error)) (value T, ok bool) {
	if d.err != nil {
		return value, false
	}
	value, rest, err := from(d.b)
	if err != nil {
		d.bad("must be %s", what)
		return value, false
	}
	d.b = rest
	return value, true
}

func (d *decoder) uint(least, most uint64) uint64 {
	return within(d, least, most, msgp.ReadUint64Bytes)
}

func (d *decoder) int(least, most int64) int64 {
	return within(d, least, most, msgp.ReadInt64Bytes)
}

// within reads an integer in [least, most].
func within[T int64 | uint64](d *decoder, least, most T, from func([]byte) (T, []byte, error)) (value T) {
	if d.err != nil {
		return value
	}
	value, rest, err := from(d.b)
	switch {
	case err != nil:
		d.bad("must be an integer from %d to %d", least, most)
	case value < least || value > most:
		d.bad("is %d; it must be from %d to %d", value, least, most)
	}
	d.b = rest
	return value
}

// readNumber accepts integers too.
func readNumber(b []byte) (float64, []byte, error) {
	switch msgp.NextType(b) {
	case msgp.IntType:
		value, rest, err := msgp.ReadInt64Bytes(b)
		return float64(value), rest, err
	case msgp.UintType:
		value, rest, err := msgp.ReadUint64Bytes(b)
		return float64(value), rest, err
	}
	return msgp.ReadFloat64Bytes(b)
}

// float: in [least, most], or (least, most] if above.
func (d *decoder) float(least, most float64, above bool) float64 {
	value, ok := read(d, "a number", readNumber)
	if ok && !(value >= least && value <= most && (!above || value > least)) { // NaN is not
		d.bad("is %g; it must be from %g to %g", value, least, most)
	}
	return value
}

func (d *decoder) flag() bool {
	value, _ := read(d, "true or false", msgp.ReadBoolBytes)
	return value
}

func (d *decoder) text(most int) string {
	value, _ := read(d, "text", msgp.ReadStringBytes)
	if len(value) > most {
		d.bad("is longer than %d bytes", most)
	}
	return value
}

func (d *decoder) blob(most int) []byte {
	value, _ := read(d, "binary", msgp.ReadBytesZC)
	if len(value) > most {
		d.bad("has %d bytes; at most %d are allowed", len(value), most)
	}
	return slices.Clone(value)
}

func (d *decoder) tokens(most int) TokenIDs {
	var ids TokenIDs
	if d.err == nil && msgp.NextType(d.b) == msgp.ArrayType {
		ids = d.tokenList()
	} else {
		ids = words[TokenIDs](d, func(word uint32) uint32 { return word })
	}
	if len(ids) > most {
		d.bad("has %d token ids; at most %d are allowed", len(ids), most)
	}
	return ids
}

// tokenList reads token ids as a list of integers; scan has bounded its length.
func (d *decoder) tokenList() TokenIDs {
	n, rest, _ := msgp.ReadArrayHeaderBytes(d.b)
	d.b = rest
	ids := make(TokenIDs, 0, n)
	for i := range uint64(n) {
		id, negative, ok := tokenID(&d.b)
		switch {
		case !ok:
			d.badEntry(CodeInvalidArgument, i, "has an entry that is not an integer")
		case negative || id > math.MaxUint32:
			d.badEntry(CodeTokenOutOfRange, i, "has an entry that is not a token id")
		}
		ids = append(ids, uint32(id))
	}
	return ids
}

// tokenID takes an integer off b; ok: it is one.
func tokenID(b *[]byte) (id uint64, negative, ok bool) {
	if kind := msgp.NextType(*b); kind != msgp.IntType && kind != msgp.UintType {
		return 0, false, false
	}
	id, rest, err := msgp.ReadUint64Bytes(*b)
	if err != nil {
		return 0, true, true
	}
	*b = rest
	return id, false, true
}

func (d *decoder) floats() Floats {
	return words[Floats](d, math.Float32frombits)
}

// words reads binary of 4 bytes each.
func words[S ~[]T, T any](d *decoder, from func(uint32) T) S {
	raw, ok := read(d, "binary, 4 bytes each", msgp.ReadBytesZC)
	if len(raw)%4 != 0 {
		d.bad("has %d bytes; it must be 4 bytes each", len(raw))
	}
	if !ok || d.err != nil {
		return nil
	}
	values := make(S, 0, len(raw)/4)
	for ; len(raw) > 0; raw = raw[4:] {
		values = append(values, from(binary.LittleEndian.Uint32(raw)))
	}
	return values
}

// readList reads a list of at most `most` entries, whose errors get its field and their index.
func readList[T any](d *decoder, most uint32, entry func() T) []T {
	n, ok := read(d, "a list", msgp.ReadArrayHeaderBytes)
	if n > most {
		d.bad("has %d entries; at most %d are allowed", n, most)
	}
	if !ok || d.err != nil {
		return nil
	}
	list := make([]T, 0, n)
	for i := uint64(0); i < uint64(n) && d.err == nil; i++ {
		list = append(list, entry())
		if d.err != nil {
			d.err.Field, d.err.Index = d.field, &i
		}
	}
	return list
}

// readMap reads the header of a map of at most `most` entries.
func (d *decoder) readMap(what string, most uint32) uint32 {
	n, _ := read(d, what, msgp.ReadMapHeaderBytes)
	if n > most {
		d.bad("has %d entries; at most %d are allowed", n, most)
	}
	return n
}

func (d *decoder) biases(most uint32) map[uint32]float64 {
	n := d.readMap("a map of token ids to numbers", most)
	biases := map[uint32]float64{}
	for ; n > 0 && d.err == nil; n-- {
		if id, ok := d.biasKey(); ok {
			bias, rest, err := readNumber(d.b)
			if err != nil || math.IsNaN(bias) || math.Abs(bias) > math.MaxFloat32 {
				d.badEntry(CodeInvalidArgument, id, "must have finite numbers")
			}
			d.b, biases[uint32(id)] = rest, bias
		}
	}
	return biases
}

func (d *decoder) biasKey() (id uint64, ok bool) {
	id, negative, ok := tokenID(&d.b)
	switch {
	case !ok:
		d.bad("has a key that is not a token id")
	case negative:
		d.bad("has a negative key")
		d.err.Code = CodeTokenOutOfRange
	case id > math.MaxUint32:
		d.badEntry(CodeTokenOutOfRange, id, "has a key that is not a token id")
	}
	return id, d.err == nil
}

func (d *decoder) counts(most uint32) map[string]float64 {
	n := d.readMap("a map of names to numbers", most)
	counts := map[string]float64{}
	for ; n > 0 && d.err == nil; n-- {
		name, _ := read(d, "a map of names to numbers", msgp.ReadStringBytes)
		counts[name], _ = read(d, "a map of names to numbers", readNumber)
	}
	return counts
}
