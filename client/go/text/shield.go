package text

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// shield tells typed special tokens from a chat template's. The first character of a typed one travels through the
// template as [nonce:hex], with a nonce of this conversation's own, and is put back when the template's special tokens
// have become names of the encoder.
type shield struct {
	specials []string // longest first
	hidden   map[string]string
	any      *regexp.Regexp
}

func newShield(s specials) shield {
	names := make([]string, 0, len(s.hidden))
	quoted := make([]string, 0, len(s.hidden))
	for name := range s.hidden {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int { return len(b) - len(a) })
	for _, name := range names {
		quoted = append(quoted, regexp.QuoteMeta(name))
	}
	return shield{names, s.hidden, regexp.MustCompile(strings.Join(quoted, "|"))}
}

// escape hides every place of text where a special token begins, or could begin at the end of text if the template went
// on with the rest of it.
func (s shield) escape(text, nonce string) string {
	var b strings.Builder
	for at, c := range text {
		if s.begins(text[at:]) {
			fmt.Fprintf(&b, "[%s:%x]", nonce, c)
		} else {
			b.WriteRune(c)
		}
	}
	return b.String()
}

func (s shield) begins(rest string) bool {
	for _, name := range s.specials {
		if strings.HasPrefix(rest, name) || strings.HasPrefix(name, rest) {
			return true
		}
	}
	return false
}

// resolve gives what the template made of escaped texts: its own special tokens under the encoder's names, the typed ones
// as typed. None begins or ends within an escape, whatever the nonce looks like.
func (s shield) resolve(rendered, nonce string) string {
	return eachPiece(rendered, nonce, s.translate)
}

func unescape(text, nonce string) string {
	return eachPiece(text, nonce, func(piece string) string { return piece })
}

// eachPiece puts the escaped characters of text back, and change what it makes of the pieces between them.
func eachPiece(text, nonce string, change func(string) string) string {
	var b strings.Builder
	end := 0
	for _, at := range regexp.MustCompile(`\[`+nonce+`:([0-9a-f]+)\]`).FindAllStringSubmatchIndex(text, -1) {
		c, err := strconv.ParseInt(text[at[2]:at[3]], 16, 32)
		if err != nil { // only a template that puts digits together could do that; what is left is harmless
			continue
		}
		b.WriteString(change(text[end:at[0]]))
		b.WriteRune(rune(c))
		end = at[1]
	}
	b.WriteString(change(text[end:]))
	return b.String()
}

// translate gives the special tokens of text the encoder's names.
func (s shield) translate(text string) string {
	if len(s.specials) == 0 {
		return text
	}
	return s.any.ReplaceAllStringFunc(text, func(name string) string { return s.hidden[name] })
}
