// Package strictjson reads JSON that must mean the same to everyone. Beyond the grammar it refuses what readers are
// known to disagree on: a key that is there twice, bytes that are not UTF-8, half a surrogate pair, anything after the
// value; and nesting that is deeper than the caller allows.
//
// A document is checked once, as a whole; its parts are then taken out where they are wanted. Checking allocates only
// for the keys of objects, so a body costs no more memory than a small multiple of its size.
package strictjson

import (
	"errors"
	"fmt"
	"iter"
	"strconv"
	"unicode/utf8"
)

// Raw is one value of a checked document, without space around it. It is a part of the document's memory.
type Raw []byte

// Kind of a value: the first byte tells it.
type Kind byte

// Kinds. A number may also begin with '-', true and false are both Bool.
const (
	Object Kind = '{'
	Array  Kind = '['
	String Kind = '"'
	Number Kind = '0'
	Bool   Kind = 't'
	Null   Kind = 'n'
)

// SyntaxError says what is wrong at which byte, from 0.
type SyntaxError struct {
	Offset  int
	Message string
}

func (e *SyntaxError) Error() string {
	return fmt.Sprintf("%s, at byte %d", e.Message, e.Offset)
}

// Parse checks a document. depth is how many arrays and objects may be inside one another.
func Parse(data []byte, depth int) (Raw, error) {
	s := scanner{data: data, depth: depth}
	if at := firstInvalid(data); at >= 0 {
		return nil, s.fail(at, "invalid UTF-8")
	}
	s.space()
	start := s.at
	if err := s.value(); err != nil {
		return nil, err
	}
	end := s.at
	if s.space(); s.at != len(data) {
		return nil, s.fail(s.at, "data after the value")
	}
	return Raw(data[start:end]), nil
}

// firstInvalid is the offset of the first byte that is not UTF-8, or -1.
func firstInvalid(data []byte) int {
	if utf8.Valid(data) {
		return -1
	}
	at := 0
	for {
		r, size := utf8.DecodeRune(data[at:])
		if r == utf8.RuneError && size <= 1 {
			return at
		}
		at += size
	}
}

// Kind of the value.
func (r Raw) Kind() Kind {
	switch c := r[0]; {
	case c == '-' || c >= '0' && c <= '9':
		return Number
	case c == 'f':
		return Bool
	default:
		return Kind(c)
	}
}

// IsNull says whether the value is null.
func (r Raw) IsNull() bool { return r.Kind() == Null }

// Fields of an object, in their order; nothing for other kinds.
func (r Raw) Fields() iter.Seq2[string, Raw] {
	return func(yield func(string, Raw) bool) {
		s := scanner{data: r}
		for range s.entries(Object) {
			key := Raw(s.skip()).unquote()
			s.space()
			s.at++ // the colon
			s.space()
			if !yield(key, s.skip()) {
				return
			}
		}
	}
}

// Items of an array, with their index; nothing for other kinds.
func (r Raw) Items() iter.Seq2[int, Raw] {
	return func(yield func(int, Raw) bool) {
		s := scanner{data: r}
		for i := range s.entries(Array) {
			if !yield(i, s.skip()) {
				return
			}
		}
	}
}

// Text of a string.
func (r Raw) Text() (string, bool) {
	if r.Kind() != String {
		return "", false
	}
	return r.unquote(), true
}

// Bool is the value of true or false.
func (r Raw) Bool() (value, ok bool) { return r[0] == 't', r.Kind() == Bool }

// Float of a number that float64 can hold.
func (r Raw) Float() (float64, bool) {
	if r.Kind() != Number {
		return 0, false
	}
	value, err := strconv.ParseFloat(string(r), 64)
	return value, err == nil
}

// Uint of a number that is a whole one from 0 to 2^64−1, written without fraction and exponent.
func (r Raw) Uint() (uint64, bool) {
	if r.Kind() != Number {
		return 0, false
	}
	value, err := strconv.ParseUint(string(r), 10, 64)
	return value, err == nil
}

// Int of a number that is a whole one from −2^63 to 2^63−1, written without fraction and exponent.
func (r Raw) Int() (int64, bool) {
	if r.Kind() != Number {
		return 0, false
	}
	value, err := strconv.ParseInt(string(r), 10, 64)
	return value, err == nil
}

// IsSyntax says whether err is about the document.
func IsSyntax(err error) bool {
	var syntax *SyntaxError
	return errors.As(err, &syntax)
}
