package text

import (
	"compress/bzip2"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"
)

// What testdata/make.py made; it says what the files hold.

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type textFixture struct {
	Strings    []string
	Tokenizers map[string]tokenizerFixture
}

type tokenizerFixture struct {
	IDs     [][]uint32 // of the first strings, or of all
	Begun   []uint32   // "the", with what the tokenizer adds by itself
	Streams []streamFixture
}

type streamFixture struct {
	IDs    []uint32
	Text   string
	Pieces []string // one for each id, and the end's
}

type chatFixture struct {
	Conversations [][]Message
	Renderings    []json.RawMessage // [template, conversation, generation prompt, text or null]
	Template      string
	Hostile       []json.RawMessage // [messages, ids]
}

var texts = fixture[textFixture]("text")
var chats = fixture[chatFixture]("chat")
var tokenizerFiles = fixture[map[string]json.RawMessage]("tokenizers")

// fixture is read when a test first needs it.
func fixture[T any](name string) func() T {
	return sync.OnceValue(func() (content T) {
		file, err := os.Open("testdata/" + name + ".json.bz2")
		if err != nil {
			panic(err)
		}
		defer file.Close()
		if err := json.NewDecoder(bzip2.NewReader(file)).Decode(&content); err != nil {
			panic(err)
		}
		return content
	})
}

// tokenizerJSON is a model's tokenizer.json, whole.
func tokenizerJSON(t testing.TB, name string) []byte {
	t.Helper()
	kept := tokenizerFiles()[name]
	if name != "smollm2" {
		return kept
	}
	var file object
	var model struct {
		object
		Vocab  map[string]int
		Merges [][2]string
	}
	check(t, json.Unmarshal(kept, &file))
	check(t, json.Unmarshal(file["model"], &model))
	check(t, json.Unmarshal(file["model"], &model.object))
	for _, merge := range model.Merges {
		if spelled := merge[0] + merge[1]; model.Vocab[spelled] == 0 {
			model.Vocab[spelled] = len(model.Vocab)
		}
	}
	vocab, err := json.Marshal(model.Vocab)
	check(t, err)
	model.object["vocab"] = vocab
	file["model"], err = json.Marshal(model.object)
	check(t, err)
	whole, err := json.Marshal(file)
	check(t, err)
	return whole
}

var models sync.Map // name -> *Model

func model(t testing.TB, name string) *Model {
	t.Helper()
	if known, ok := models.Load(name); ok {
		return known.(*Model)
	}
	m, err := fromJSON(tokenizerJSON(t, name))
	check(t, err)
	models.Store(name, m)
	return m
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// everyTokenizer runs a test on each of the fixture.
func everyTokenizer(t *testing.T, test func(t *testing.T, m *Model, f tokenizerFixture)) {
	for name, f := range texts().Tokenizers {
		t.Run(name, func(t *testing.T) { test(t, model(t, name), f) })
	}
}

func TestIdsAreThoseOfThePythonPackage(t *testing.T) {
	everyTokenizer(t, func(t *testing.T, m *Model, f tokenizerFixture) {
		for i, want := range f.IDs {
			if got, err := m.Encode(texts().Strings[i], EncodeOptions{}); err != nil || !slices.Equal(got, want) {
				t.Errorf("%q: %v, %v; want %v", texts().Strings[i], got, err, want)
			}
		}
		got, err := m.Encode("the", EncodeOptions{AddSpecial: true})
		if err != nil || !slices.Equal(got, f.Begun) {
			t.Errorf("with what the tokenizer adds: %v, %v; want %v", got, err, f.Begun)
		}
	})
	for _, name := range []string{"smollm2", "tiny"} {
		if n := len(texts().Tokenizers[name].IDs); n < 5000 {
			t.Errorf("%s has %d strings only", name, n)
		}
	}
}

func TestNothingTypedIsSpecial(t *testing.T) {
	everyTokenizer(t, func(t *testing.T, m *Model, _ tokenizerFixture) {
		for _, name := range m.specials.names {
			for _, typed := range []string{name, " " + name + name, "x" + name + "\n"} {
				ids, err := m.Encode(typed, EncodeOptions{})
				check(t, err)
				for _, id := range ids {
					if special, is := m.specials.names[id]; is && special != "<unk>" { // <unk>: what the model lacks
						t.Errorf("%q became %q", typed, special)
					}
				}
			}
		}
	})
}

func TestTextComesBack(t *testing.T) {
	for _, name := range []string{"tiny", "deepseek", "llama3"} { // smollm2 lacks some bytes, the others normalize
		m := model(t, name)
		for _, text := range texts().Strings {
			ids, err := m.Encode(text, EncodeOptions{})
			check(t, err)
			if got := m.Decode(ids); got != text {
				t.Errorf("%s: %q came back as %q", name, text, got)
			}
			var spelled []byte
			for _, id := range ids {
				spelled = append(spelled, m.TokenText(id)...)
			}
			if string(spelled) != text {
				t.Errorf("%s: the tokens of %q are %q", name, text, spelled)
			}
		}
	}
}

func TestRandomIdsDecodeAsInPython(t *testing.T) {
	everyTokenizer(t, func(t *testing.T, m *Model, f tokenizerFixture) {
		for _, stream := range f.Streams {
			if got := m.Decode(stream.IDs); got != stream.Text {
				t.Errorf("%v: %q, want %q", stream.IDs, got, stream.Text)
			}
			decoder, pieces := m.NewDecoder(), []string{}
			for _, id := range stream.IDs {
				pieces = append(pieces, decoder.Push(id))
			}
			if pieces = append(pieces, decoder.Flush()); !slices.Equal(pieces, stream.Pieces) {
				t.Errorf("%v: pieces %q, want %q", stream.IDs, pieces, stream.Pieces)
			}
		}
	})
}

func TestRenderingsAreThoseOfJinja2(t *testing.T) {
	variables := config{
		"bos_token": []byte(`"<s>"`), "eos_token": []byte(`{"content": "</s>"}`), "pad_token": []byte("null"),
	}
	templates := map[string]*chatTemplate{}
	refused := 0
	for _, raw := range chats().Renderings {
		var name string
		var conversation int
		var o ChatOptions
		var want *string
		check(t, json.Unmarshal(raw, &[]any{&name, &conversation, &o.AddGenerationPrompt, &want}))
		if templates[name] == nil {
			source, err := os.ReadFile("testdata/templates/" + name + ".jinja")
			check(t, err)
			templates[name], err = newTemplate(string(source), variables)
			check(t, err)
		}
		got, err := templates[name].render(chats().Conversations[conversation], o)
		switch {
		case want == nil && err == nil:
			t.Errorf("%s takes conversation %d, which Python's refuses", name, conversation)
		case want == nil:
			refused++
		case err != nil || got != *want:
			t.Errorf("%s, conversation %d: %q, %v\nwant %q", name, conversation, got, err, *want)
		}
	}
	if len(templates) < 7 || refused == 0 {
		t.Errorf("%d templates, %d refusals: the fixture does not show much", len(templates), refused)
	}
}

func TestHostileConversationsAsInPython(t *testing.T) {
	m := withTemplate(t, "smollm2", chats().Template, nil)
	for _, raw := range chats().Hostile {
		var messages []Message
		var want []uint32
		check(t, json.Unmarshal(raw, &[]any{&messages, &want}))
		got, err := m.Chat(messages, ChatOptions{AddGenerationPrompt: true})
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: %v, %v; want %v", messages, got, err, want)
		}
	}
}

// withTemplate is a model with another chat template.
func withTemplate(t testing.TB, name, source string, c config) *Model {
	t.Helper()
	m := *model(t, name)
	m.template = sync.OnceValues(func() (*chatTemplate, error) { return newTemplate(source, c) })
	return &m
}

func TestEveryStringStreamsToItself(t *testing.T) {
	everyTokenizer(t, func(t *testing.T, m *Model, f tokenizerFixture) {
		for i, ids := range f.IDs {
			decoder := m.NewDecoder()
			var b strings.Builder
			for _, id := range ids {
				b.WriteString(decoder.Push(id))
			}
			b.WriteString(decoder.Flush())
			if want := m.Decode(ids); b.String() != want && !strings.ContainsRune(want, replacement) {
				t.Errorf("%q streams as %q", texts().Strings[i], b.String())
			}
		}
	})
}
