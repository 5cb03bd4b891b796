package text

import (
	"os"
	"strings"
	"testing"
)

// prose is English, of this repository.
func prose(b *testing.B) string {
	b.Helper()
	text, err := os.ReadFile("../../../ARCHITECTURE.md")
	check(b, err)
	return string(text)
}

func BenchmarkEncode(b *testing.B) {
	m, text := model(b, "smollm2"), prose(b)
	for name, part := range map[string]string{"whole": text, "200 bytes": strings.ToValidUTF8(text[1000:1200], "")} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(part)))
			for b.Loop() {
				_, err := m.Encode(part, EncodeOptions{})
				check(b, err)
			}
		})
	}
}

func BenchmarkDecoder(b *testing.B) {
	m := model(b, "smollm2")
	ids, err := m.Encode(prose(b), EncodeOptions{})
	check(b, err)
	decoder := m.NewDecoder()
	for i := 0; b.Loop(); i++ {
		decoder.Push(ids[i%len(ids)])
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "tokens/s")
}

func BenchmarkChat(b *testing.B) {
	m := withTemplate(b, "smollm2", chats().Template, nil)
	messages := []Message{{"system", "Be brief."}, {"user", "What is the capital of France?"}}
	for b.Loop() {
		_, err := m.Chat(messages, ChatOptions{AddGenerationPrompt: true})
		check(b, err)
	}
}
