package text

import (
	"encoding/hex"
	"encoding/json"
	"strings"
)

// pieces tells the bytes of one piece of the vocabulary, by the parts of tokenizer.json's decoder that change single
// pieces, in their order. Parts that work on the whole text (the first space, for example) change no token's bytes.
type pieces []func(piece string) []byte

// decoderPart is a part of tokenizer.json's decoder, with the members of all kinds.
type decoderPart struct {
	Type        string        `json:"type"`
	Decoders    []decoderPart `json:"decoders"` // Sequence
	Replacement string        `json:"replacement"`
	Content     string        `json:"content"`
	Pattern     struct {
		String *string `json:"String"`
	} `json:"pattern"`
}

func newPieces(tokenizerJSON []byte) (pieces, error) {
	var file struct {
		Decoder decoderPart `json:"decoder"`
	}
	if err := json.Unmarshal(tokenizerJSON, &file); err != nil {
		return nil, err
	}
	return file.Decoder.pieces(), nil
}

func (d decoderPart) pieces() (p pieces) {
	switch {
	case d.Type == "Sequence":
		for _, part := range d.Decoders {
			p = append(p, part.pieces()...)
		}
	case d.Type == "ByteLevel":
		p = append(p, byteLevel)
	case d.Type == "ByteFallback":
		p = append(p, byteFallback)
	case d.Type == "Metaspace":
		p = append(p, replaced(d.Replacement, " "))
	case d.Type == "Replace" && d.Pattern.String != nil:
		p = append(p, replaced(*d.Pattern.String, d.Content))
	}
	return p
}

func (p pieces) bytes(piece string) []byte {
	for i, part := range p {
		if b := part(piece); i == len(p)-1 {
			return b
		} else {
			piece = string(b)
		}
	}
	return []byte(piece)
}

func replaced(old, new string) func(piece string) []byte {
	return func(piece string) []byte { return []byte(strings.ReplaceAll(piece, old, new)) }
}

// byteFallback: <0x0A> is one byte.
func byteFallback(piece string) []byte {
	if len(piece) == len("<0x0A>") && strings.HasPrefix(piece, "<0x") && strings.HasSuffix(piece, ">") {
		if b, err := hex.DecodeString(piece[3:5]); err == nil {
			return b
		}
	}
	return []byte(piece)
}

// byteLevel: each character is a byte, unless one is not in the table; then the piece is text (an added token).
func byteLevel(piece string) []byte {
	b := make([]byte, 0, len(piece))
	for _, c := range piece {
		value, in := byteOf[c]
		if !in {
			return []byte(piece)
		}
		b = append(b, value)
	}
	return b
}

// byteOf is GPT-2's table: printable Latin characters stand for themselves, the other bytes are U+0100 and on.
var byteOf = func() map[rune]byte {
	table, next := map[rune]byte{}, rune(0x100)
	for b := range rune(0x100) {
		if '!' <= b && b <= '~' || '¡' <= b && b <= '¬' || '®' <= b && b <= 'ÿ' {
			table[b] = byte(b)
		} else {
			table[next] = byte(b)
			next++
		}
	}
	return table
}()
