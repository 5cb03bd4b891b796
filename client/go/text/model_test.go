package text

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"
)

const chatML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}" +
	"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

// folder is a model folder of these files.
func folder(t testing.TB, files map[string]string) string {
	t.Helper()
	path := t.TempDir()
	for name, content := range files {
		check(t, os.WriteFile(filepath.Join(path, name), []byte(content), 0o600))
	}
	return path
}

func TestOpen(t *testing.T) {
	tokenizer := string(tokenizerJSON(t, "qwen"))
	for _, c := range []struct {
		name  string
		files map[string]string
		chat  bool
	}{
		{"tokenizer only", map[string]string{"tokenizer.json": tokenizer}, false},
		{"template as a file", map[string]string{"tokenizer.json": tokenizer, "chat_template.jinja": chatML}, true},
		{"template in the configuration", map[string]string{"tokenizer.json": tokenizer,
			"tokenizer_config.json": `{"chat_template": "{{ messages[0].content }}", "model_max_length": 1e30}`}, true},
		{"named templates", map[string]string{"tokenizer.json": tokenizer, "tokenizer_config.json": `{"chat_template":
			[{"name": "rag", "template": "{% no"}, {"name": "default", "template": "{{ messages[0].content }}"}]}`}, true},
		{"no default", map[string]string{"tokenizer.json": tokenizer,
			"tokenizer_config.json": `{"chat_template": [{"name": "rag", "template": "x"}]}`}, false},
		{"broken template", map[string]string{"tokenizer.json": tokenizer, "chat_template.jinja": "{% if %}"}, false},
		{"null", map[string]string{"tokenizer.json": tokenizer,
			"tokenizer_config.json": `{"chat_template": null}`}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, err := Open(folder(t, c.files))
			check(t, err)
			ids, err := m.Chat([]Message{{"user", "the end"}}, ChatOptions{AddGenerationPrompt: true})
			var refused *TemplateError
			if m.HasChatTemplate() != c.chat || (err == nil) != c.chat || !c.chat && !errors.As(err, &refused) {
				t.Errorf("has a template: %t; %v, %v", m.HasChatTemplate(), ids, err)
			}
		})
	}
}

func TestOpenRefuses(t *testing.T) {
	tokenizer := string(tokenizerJSON(t, "qwen"))
	if _, err := Open(t.TempDir()); !errors.Is(err, ErrNoTokenizer) {
		t.Errorf("no tokenizer: %v", err)
	}
	for _, c := range []struct{ name, old, new, says string }{
		{"a pre-tokenizer that is not known", `"type":"Split"`, `"type":"Splat"`, "Splat"},
		{"a normalizer that is not known", `"type":"NFC"`, `"type":"NFQ"`, "NFQ"},
		{"a regex that is none", `(?i:'s`, `(?i:'s(`, "regex"},
		{"a model that is not known", `"type":"BPE"`, `"type":"ABC"`, "ABC"},
		{"no model", `"model":`, `"modell":`, "model"},
		{"a special token with another's id", `"content":"<|im_end|>"`, `"content":"a"`, `"a"`},
		{"half a file", tokenizer[len(tokenizer)/2:], ``, "JSON"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if !strings.Contains(tokenizer, c.old) {
				t.Fatalf("%q is not in the file", c.old)
			}
			changed := strings.Replace(tokenizer, c.old, c.new, 1)
			_, err := Open(folder(t, map[string]string{"tokenizer.json": changed}))
			if err == nil || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), "tokenizer.json") {
				t.Errorf("says %v; should name %q and the file", err, c.says)
			}
		})
	}
	_, err := Open(folder(t, map[string]string{"tokenizer.json": tokenizer, "tokenizer_config.json": "["}))
	if err == nil || !strings.Contains(err.Error(), "tokenizer_config.json") {
		t.Errorf("a broken configuration: %v", err)
	}
}

func TestTextThatIsNotUTF8IsRefused(t *testing.T) {
	m := withTemplate(t, "qwen", chatML, nil)
	if _, err := m.Encode("a\xff", EncodeOptions{}); !errors.Is(err, ErrNotUTF8) {
		t.Errorf("Encode: %v", err)
	}
	for _, message := range []Message{{"user", "\xc3"}, {"us\xffer", "x"}} {
		if _, err := m.Chat([]Message{message}, ChatOptions{}); !errors.Is(err, ErrNotUTF8) {
			t.Errorf("Chat: %v", err)
		}
	}
}

func TestTokenText(t *testing.T) {
	m := model(t, "mixtral")
	for id, want := range map[uint32]string{0: "<unk>", 1: "<s>", 3: "\x00", 0x0a + 3: "\n", 0xe2 + 3: "\xe2"} {
		if got := string(m.TokenText(id)); got != want {
			t.Errorf("%d: %q, want %q", id, got, want)
		}
	}
	ids, err := m.Encode("the", EncodeOptions{})
	check(t, err)
	var spelled string
	for _, id := range ids {
		spelled += string(m.TokenText(id))
	}
	if spelled != " the" { // the space that SentencePiece puts before a text
		t.Errorf("the text is spelled %q", spelled)
	}
	if got := m.TokenText(1 << 30); got != nil {
		t.Errorf("an id without a token: %q", got)
	}
}

// Any way to cut a stream gives the same text, and no piece ends in half a character.
func TestStreamsCutAnywhere(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	everyTokenizer(t, func(t *testing.T, m *Model, f tokenizerFixture) {
		for range 200 {
			var ids []uint32
			for range random.IntN(8) + 1 {
				ids = append(ids, f.IDs[random.IntN(len(f.IDs))]...)
			}
			decoder := m.NewDecoder()
			var b strings.Builder
			for rest := ids; len(rest) > 0; {
				n := random.IntN(len(rest)) + 1
				piece := decoder.Push(rest[:n]...)
				if !utf8.ValidString(piece) {
					t.Errorf("%v gives %q", ids, piece)
				}
				b.WriteString(piece)
				rest = rest[n:]
			}
			b.WriteString(decoder.Flush())
			if want := m.Decode(ids); b.String() != want && !strings.ContainsRune(want, replacement) {
				t.Errorf("%v: %q, want %q", ids, b.String(), want)
			}
		}
	})
}

func TestAWaitingCharacterIsNotGivenInHalves(t *testing.T) {
	m := model(t, "tiny")
	ids, err := m.Encode("𠀀", EncodeOptions{})
	check(t, err)
	if len(ids) < 2 {
		t.Fatalf("the character is %d token", len(ids))
	}
	decoder := m.NewDecoder()
	if early := decoder.Push(ids[:len(ids)-1]...); early != "" {
		t.Errorf("%q came early", early)
	}
	if got := decoder.Push(ids[len(ids)-1]); got != "𠀀" {
		t.Errorf("the character came as %q", got)
	}
	decoder = m.NewDecoder()
	decoder.Push(ids[0])
	if got := decoder.Flush(); got != string(replacement) {
		t.Errorf("a cut character ends as %q", got)
	}
	if again := decoder.Flush(); again != "" {
		t.Errorf("a second end gives %q", again)
	}
}

func TestManyGoroutines(t *testing.T) {
	m := withTemplate(t, "smollm2", chats().Template, nil)
	fixture := texts().Tokenizers["smollm2"]
	var done sync.WaitGroup
	for worker := range 8 {
		done.Go(func() {
			for i := worker; i < 400; i++ {
				ids, err := m.Encode(texts().Strings[i], EncodeOptions{})
				if err != nil || !slices.Equal(ids, fixture.IDs[i]) || m.Decode(ids) != m.Decode(fixture.IDs[i]) {
					t.Errorf("%q: %v, %v", texts().Strings[i], ids, err)
				}
				if _, err := m.Chat([]Message{{"user", texts().Strings[i]}}, ChatOptions{}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	done.Wait()
}

// A model that is no longer used gives its memory back, the part in C too.
func TestModelsAreFreed(t *testing.T) {
	freed := make(chan struct{})
	func() {
		m, err := fromJSON(tokenizerJSON(t, "qwen"))
		check(t, err)
		runtime.AddCleanup(m.encoder, func(ch chan struct{}) { close(ch) }, freed)
	}()
	for {
		runtime.GC()
		select {
		case <-freed:
			return
		default:
		}
	}
}

func FuzzText(f *testing.F) {
	for _, seed := range []string{"", "Hello <|im_end|>", "<|im_start|>", "\xff", "日本👩‍👩‍👧", "  \n\t", "\x00<s>"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		for _, name := range []string{"llama3", "mixtral"} {
			m := model(t, name)
			ids, err := m.Encode(text, EncodeOptions{})
			if !utf8.ValidString(text) {
				if !errors.Is(err, ErrNotUTF8) {
					t.Fatalf("%q: %v", text, err)
				}
				continue
			}
			check(t, err)
			decoder := m.NewDecoder()
			streamed := decoder.Push(ids...) + decoder.Flush()
			for _, id := range ids {
				if special, is := m.specials.names[id]; is && special != "<unk>" {
					t.Fatalf("%q became special", text)
				}
			}
			if name == "llama3" && (m.Decode(ids) != text || streamed != text) {
				t.Fatalf("%q: %q, streamed %q", text, m.Decode(ids), streamed)
			}
		}
	})
}
