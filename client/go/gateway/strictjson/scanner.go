package strictjson

import (
	"fmt"
	"iter"
	"unicode/utf16"
	"unicode/utf8"
)

// scanner goes over data once. Its checking half (value and what it calls) trusts nothing; its other half (entries,
// skip) is for values that were checked.
type scanner struct {
	data  []byte
	at    int
	depth int // how much deeper it may get
}

func (s *scanner) fail(at int, format string, values ...any) *SyntaxError {
	return &SyntaxError{Offset: at, Message: fmt.Sprintf(format, values...)}
}

// peek is the next byte, 0 at the end: no value of JSON has a zero byte.
func (s *scanner) peek() byte {
	if s.at < len(s.data) {
		return s.data[s.at]
	}
	return 0
}

func (s *scanner) space() {
	for s.at < len(s.data) {
		switch s.data[s.at] {
		case ' ', '\t', '\n', '\r':
			s.at++
		default:
			return
		}
	}
}

// ---- checking ----

func (s *scanner) value() error {
	switch c := s.peek(); {
	case c == '{':
		return s.nested(s.object)
	case c == '[':
		return s.nested(s.array)
	case c == '"':
		return s.text()
	case c == '-' || c >= '0' && c <= '9':
		return s.number()
	case c == 't':
		return s.word("true")
	case c == 'f':
		return s.word("false")
	case c == 'n':
		return s.word("null")
	case s.at >= len(s.data):
		return s.fail(s.at, "the end where a value should be")
	}
	return s.fail(s.at, "no JSON value")
}

func (s *scanner) nested(read func() error) error {
	if s.depth == 0 {
		return s.fail(s.at, "nested too deeply")
	}
	s.depth--
	s.at++
	s.space()
	err := read()
	s.depth++
	return err
}

func (s *scanner) object() error {
	seen := make(map[string]struct{})
	return s.list('}', func() error {
		start := s.at
		if s.peek() != '"' {
			return s.fail(s.at, "a key must be a string")
		}
		if err := s.text(); err != nil {
			return err
		}
		key := Raw(s.data[start:s.at]).unquote()
		if _, twice := seen[key]; twice {
			return s.fail(start, "the key %.64q is there twice", key)
		}
		seen[key] = struct{}{}
		s.space()
		if s.peek() != ':' {
			return s.fail(s.at, "a colon is missing")
		}
		s.at++
		s.space()
		return s.value()
	})
}

func (s *scanner) array() error { return s.list(']', s.value) }

// list reads entries up to the closing bracket; the opening one has been read.
func (s *scanner) list(closing byte, entry func() error) error {
	if s.peek() == closing {
		s.at++
		return nil
	}
	for {
		if err := entry(); err != nil {
			return err
		}
		s.space()
		switch s.peek() {
		case closing:
			s.at++
			return nil
		case ',':
			s.at++
			s.space()
		default:
			return s.fail(s.at, "a comma or %q is missing", closing)
		}
	}
}

func (s *scanner) word(word string) error {
	if len(s.data)-s.at < len(word) || string(s.data[s.at:s.at+len(word)]) != word {
		return s.fail(s.at, "no JSON value")
	}
	s.at += len(word)
	return nil
}

func (s *scanner) number() error {
	if s.peek() == '-' {
		s.at++
	}
	if s.peek() == '0' {
		s.at++
	} else if !s.digits() {
		return s.fail(s.at, "a digit is missing")
	}
	if s.peek() == '.' {
		s.at++
		if !s.digits() {
			return s.fail(s.at, "a digit is missing")
		}
	}
	if c := s.peek(); c == 'e' || c == 'E' {
		s.at++
		if c := s.peek(); c == '+' || c == '-' {
			s.at++
		}
		if !s.digits() {
			return s.fail(s.at, "a digit is missing")
		}
	}
	return nil
}

// digits skips them and says whether there was one.
func (s *scanner) digits() bool {
	start := s.at
	for c := s.peek(); c >= '0' && c <= '9'; c = s.peek() {
		s.at++
	}
	return s.at > start
}

func (s *scanner) text() error {
	for s.at++; s.at < len(s.data); {
		switch c := s.data[s.at]; {
		case c == '"':
			s.at++
			return nil
		case c < ' ':
			return s.fail(s.at, "a control character in a string")
		case c == '\\':
			if err := s.escape(); err != nil {
				return err
			}
		default:
			s.at++
		}
	}
	return s.fail(s.at, "a string has no end")
}

func (s *scanner) escape() error {
	at := s.at
	r, size := decodeEscape(s.data[at:])
	if size == 0 {
		return s.fail(at, "no such escape")
	}
	if utf16.IsSurrogate(r) {
		return s.fail(at, "half a surrogate pair")
	}
	s.at += size
	return nil
}

// ---- after the check ----

// entries stops before each entry (for an object: before its key); the loop's body must move past the entry.
func (s *scanner) entries(kind Kind) iter.Seq[int] {
	return func(yield func(int) bool) {
		if Raw(s.data).Kind() != kind {
			return
		}
		s.at++
		for i := 0; ; i++ {
			s.space()
			if c := s.peek(); c == ',' {
				s.at++
				s.space()
			} else if c == '}' || c == ']' {
				return
			}
			if !yield(i) {
				return
			}
		}
	}
}

// skip moves past a value and returns it.
func (s *scanner) skip() Raw {
	start, open := s.at, 0
	for {
		switch c := s.peek(); c {
		case '{', '[':
			open++
			s.at++
		case '}', ']':
			open--
			s.at++
		case '"':
			s.skipText()
		case ',', ':', ' ', '\t', '\n', '\r':
			s.at++
			continue // not the end of a value
		default:
			s.skipPlain()
		}
		if open == 0 {
			return Raw(s.data[start:s.at])
		}
	}
}

func (s *scanner) skipText() {
	for s.at++; s.data[s.at] != '"'; s.at++ {
		if s.data[s.at] == '\\' {
			s.at++
		}
	}
	s.at++
}

// skipPlain moves past a number, true, false or null.
func (s *scanner) skipPlain() {
	for {
		switch s.peek() {
		case ',', '}', ']', ' ', '\t', '\n', '\r', 0:
			return
		}
		s.at++
	}
}

// unquote is the text of a checked string.
func (r Raw) unquote() string {
	inner := r[1 : len(r)-1]
	out := make([]byte, 0, len(inner))
	for len(inner) > 0 {
		if inner[0] != '\\' {
			out = append(out, inner[0])
			inner = inner[1:]
			continue
		}
		decoded, size := decodeEscape(inner)
		out = utf8.AppendRune(out, decoded)
		inner = inner[size:]
	}
	return string(out)
}
