package strictjson

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
	"testing"
)

func TestRefused(t *testing.T) {
	for name, document := range map[string]string{
		"nothing":             ``,
		"space only":          " \n",
		"two values":          `{} {}`,
		"trailing comma":      `[1,]`,
		"no comma":            `[1 2]`,
		"NaN":                 `{"temperature": NaN}`,
		"infinity":            `[Infinity]`,
		"minus infinity":      `[-Infinity]`,
		"leading zero":        `[01]`,
		"plus":                `[+1]`,
		"no fraction":         `[1.]`,
		"no exponent":         `[1e]`,
		"lone minus":          `-`,
		"half a word":         `[tru]`,
		"single quotes":       `{'a': 1}`,
		"number as key":       `{1: 1}`,
		"no colon":            `{"a" 1}`,
		"key twice":           `{"a": 1, "b": 2, "a": 3}`,
		"key twice, escaped":  `{"a": 1, "\u0061": 3}`,
		"key twice, inside":   `{"x": [{"a": 1, "a": 1}]}`,
		"open string":         `["abc`,
		"open string, escape": `["abc\`,
		"raw newline":         "[\"a\nb\"]",
		"no such escape":      `["\x41"]`,
		"short unicode":       `["\u12"]`,
		"high surrogate":      `["\ud83d"]`,
		"low surrogate":       `["\ude00"]`,
		"two high surrogates": `["\ud83d\ud83d"]`,
		"invalid UTF-8":       "[\"a\xff\"]",
		"overlong UTF-8":      "[\"\xc0\xaf\"]",
		"UTF-8 surrogate":     "[\"\xed\xa0\x80\"]",
		"byte order mark":     "\ufeff{}",
		"too deep":            strings.Repeat("[", 9) + strings.Repeat("]", 9),
		"unclosed":            `{"a": [1, 2`,
		"wrong bracket":       `[1}`,
		"comment":             `{} // no`,
	} {
		if raw, err := Parse([]byte(document), 8); err == nil {
			t.Errorf("%s: %q was read as %s", name, document, raw)
		} else if !IsSyntax(err) {
			t.Errorf("%s: %v is no SyntaxError", name, err)
		}
	}
}

func TestOffset(t *testing.T) {
	_, err := Parse([]byte(`{"a": 1, "a": 2}`), 8)
	if err == nil || err.Error() != `the key "a" is there twice, at byte 9` {
		t.Error(err)
	}
}

func TestParts(t *testing.T) {
	raw, err := Parse([]byte(` {"a" : [ 1 ,-2.5, "x\ud83d\ude00\n" , {"deep":[[],{}]} ] , "b":null,"c":true} `), 8)
	if err != nil {
		t.Fatal(err)
	}
	if got := tree(raw); !reflect.DeepEqual(got, map[string]any{
		"a": []any{1.0, -2.5, "x😀\n", map[string]any{"deep": []any{[]any{}, map[string]any{}}}}, "b": nil, "c": true,
	}) {
		t.Errorf("%#v", got)
	}
}

func TestWholeNumbers(t *testing.T) {
	for document, want := range map[string]bool{`18446744073709551615`: true, `18446744073709551616`: false,
		`-1`:  false,
		`1.0`: false, `1e3`: false, `"1"`: false, `0`: true} {
		if _, ok := Raw(document).Uint(); ok != want {
			t.Errorf("%s as Uint: %v", document, ok)
		}
	}
	if _, ok := Raw(`1e400`).Float(); ok {
		t.Error("1e400 was read as a float")
	}
}

// tree is what encoding/json would make of it.
func tree(raw Raw) any {
	switch raw.Kind() {
	case Object:
		object := map[string]any{}
		for key, value := range raw.Fields() {
			object[key] = tree(value)
		}
		return object
	case Array:
		array := []any{}
		for _, value := range raw.Items() {
			array = append(array, tree(value))
		}
		return array
	case String:
		text, _ := raw.Text()
		return text
	case Number:
		number, _ := raw.Float()
		return number
	case Bool:
		value, _ := raw.Bool()
		return value
	}
	return nil
}

// FuzzParse: what is accepted is accepted by encoding/json too and means the same.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{`{"model":"m","prompt":[1,2,[3]],"stop":null,"seed":-1.5e+3}`, `"\ud83d\ude00"`,
		`[{}]`, ` 1 `} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		raw, err := Parse(data, 16)
		if err != nil {
			return
		}
		var want any
		if err := json.NewDecoder(bytes.NewReader(data)).Decode(&want); err != nil {
			if strings.Contains(err.Error(), "cannot unmarshal number") {
				return // beyond float64
			}
			t.Fatalf("%q is accepted here only: %v", data, err)
		}
		if got := tree(raw); !reflect.DeepEqual(got, want) {
			t.Fatalf("%q: %#v, not %#v", data, got, want)
		}
	})
}
