package text

import (
	"encoding/json"
	"fmt"
	"slices"
)

// component is one part of tokenizer.json, or of a sequence of such parts.
type component struct {
	Type          string
	Normalizers   []component
	Pretokenizers []component
	Processors    []component
	Decoders      []component
}

// known are the components that the tokenizers crate has. It refuses others itself, but does not say which one it was.
var known = map[string][]string{
	"model": {"BPE", "Unigram", "WordLevel", "WordPiece"},
	"normalizer": {"BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled",
		"Prepend", "Replace", "Sequence", "Strip", "StripAccents"},
	"pre_tokenizer": {"BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace",
		"Punctuation", "Sequence", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"},
	"post_processor": {"BertProcessing", "ByteLevel", "RobertaProcessing", "Sequence", "TemplateProcessing"},
	"decoder": {"BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Replace", "Sequence", "Strip",
		"WordPiece"},
}

// blame adds the component that a refusal is about, if that is a question of its type.
func blame(tokenizerJSON []byte, refusal error) error {
	var file map[string]json.RawMessage
	if json.Unmarshal(tokenizerJSON, &file) != nil {
		return refusal
	}
	for part, types := range known {
		var top component
		if json.Unmarshal(file[part], &top) != nil {
			continue
		}
		for _, name := range top.types() {
			if name != "" && !slices.Contains(types, name) {
				return fmt.Errorf("the %s %q is not supported (%w)", part, name, refusal)
			}
		}
	}
	return refusal
}

func (c component) types() []string {
	found := []string{c.Type}
	for _, members := range [][]component{c.Normalizers, c.Pretokenizers, c.Processors, c.Decoders} {
		for _, member := range members {
			found = append(found, member.types()...)
		}
	}
	return found
}
