package strictjson

import "unicode/utf16"

var escapes = map[byte]rune{
	'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t',
}

const hexEscape = len(`\uXXXX`)

// decodeEscape reads the escape at the start of b, two of them if they are a surrogate pair. size 0: there is none. A
// surrogate without its other half comes as it is.
func decodeEscape(b []byte) (r rune, size int) {
	if len(b) < 2 {
		return 0, 0
	}
	if plain, known := escapes[b[1]]; known {
		return plain, 2
	}
	first, ok := hexRune(b)
	if !ok {
		return 0, 0
	}
	if utf16.IsSurrogate(first) {
		if second, ok := hexRune(b[hexEscape:]); ok {
			if pair := utf16.DecodeRune(first, second); pair != '\uFFFD' {
				return pair, 2 * hexEscape
			}
		}
	}
	return first, hexEscape
}

// hexRune reads \uXXXX.
func hexRune(b []byte) (rune, bool) {
	if len(b) < hexEscape || b[0] != '\\' || b[1] != 'u' {
		return 0, false
	}
	var r rune
	for _, c := range b[2:hexEscape] {
		switch {
		case c >= '0' && c <= '9':
			r = r<<4 | rune(c-'0')
		case c|0x20 >= 'a' && c|0x20 <= 'f':
			r = r<<4 | rune(c|0x20-'a'+10)
		default:
			return 0, false
		}
	}
	return r, true
}
