package text

import (
	"slices"
	"strings"
)

const (
	replacement = '\ufffd' // what a decoder puts in the place of bytes that are not UTF-8 (yet)
	window      = 16       // tokens; the window is halved when it is longer
	undecided   = 3        // tokens, of a byte each, that can wait for the last one of their character
)

// Decoder gives the text of a stream of tokens piece by piece, never half a character. One goroutine uses it.
//
// The pieces join to Decode(all tokens), however the stream is cut: with byte-level vocabularies always; where bytes
// are tokens of their own (<0x0A>) if they are valid UTF-8 and not U+FFFD itself, because there one bad byte changes
// how its neighbours are decoded, and what was given out is not taken back. The cost of a token does not grow with the
// stream: only a window of the last tokens is decoded. It always holds some text given out before, because what a token
// looks like can depend on whether it is the first.
type Decoder struct {
	model  *Model
	window []uint32
	given  int // characters of the window's text
	open   int // tokens since the text last ended in a whole character
}

// NewDecoder begins a stream.
func (m *Model) NewDecoder() *Decoder {
	return &Decoder{model: m, window: make([]uint32, 0, window+1)}
}

// Push gives the text that these tokens complete, possibly none.
func (d *Decoder) Push(ids ...uint32) string {
	if len(ids) == 1 {
		return d.push(ids[0])
	}
	var b strings.Builder
	for _, id := range ids {
		b.WriteString(d.push(id))
	}
	return b.String()
}

// Flush ends the stream and gives what is left: bytes that stayed incomplete come as U+FFFD.
func (d *Decoder) Flush() string {
	text := d.decode(0)
	return d.give(text, len(text))
}

func (d *Decoder) push(id uint32) string {
	if _, skipped := d.model.specials.names[id]; skipped {
		return ""
	}
	d.window = append(d.window, id)
	text := d.decode(0)
	if len(text) > 0 && text[len(text)-1] == replacement {
		d.open++
	} else {
		d.open = 0
	}
	piece := d.give(text, d.settled(text))
	if len(d.window) > window && (d.open == 0 || d.open > undecided) {
		d.shorten(text)
	}
	return piece
}

// decode gives the characters of the window from a token on.
func (d *Decoder) decode(from int) []rune {
	return []rune(d.model.Decode(d.window[from:]))
}

// give: what of the window's text is new up to a character.
func (d *Decoder) give(text []rune, end int) string {
	if end <= d.given {
		return ""
	}
	piece := string(text[d.given:end])
	d.given = end
	return piece
}

// settled counts the characters that later tokens cannot change. Replacements that stay longer than a character can are
// final.
func (d *Decoder) settled(text []rune) int {
	if d.open == 0 {
		return len(text)
	}
	whole := len(text)
	for whole > 0 && text[whole-1] == replacement {
		whole--
	}
	if d.open <= undecided {
		return whole
	}
	return max(whole, len(text)-undecided)
}

// shorten drops old tokens, at a place where the rest decodes by itself to what it is in the window.
func (d *Decoder) shorten(text []rune) {
	for cut := len(d.window) / 2; cut < len(d.window)-undecided; cut++ {
		tail := d.decode(cut)
		dropped := len(text) - len(tail)
		if given := d.given - dropped; given > 0 && dropped >= 0 && slices.Equal(text[dropped:], tail) {
			d.window, d.given = slices.Delete(d.window, 0, cut), given
			return
		}
	}
}
