package config

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

func file(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "gateway.toml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestFlagsWinOverFile(t *testing.T) {
	path := file(t, "listen = 'unix:/run/x'\nlisten-mode = '0600'\nmax-body = 1000\nwrite-time = '5s'\n")
	c, err := Parse([]string{"--config", path, "--max-body", "2000"}, &bytes.Buffer{})
	if err != nil {
		t.Fatal(err)
	}
	if c.Listen != "unix:/run/x" || c.ListenMode != 0o600 || c.MaxBody != 2000 || c.WriteTime != 5*time.Second ||
		c.DrainTimeout != 30*time.Second {
		t.Errorf("%+v", c)
	}
}

func TestRefused(t *testing.T) {
	for _, arguments := range [][]string{
		{"--no-such"}, {"word"}, {"--max-body", "0"}, {"--max-body", "x"}, {"--listen-mode", "999"}, {"--log-level",
			"loud"},
		{"--log-format", "xml"}, {"--tls-cert", "x"}, {"--write-time", "5"}, {"--drain-delay", "-1s"}, {"--config",
			"/nonexistent"},
		{"--config", file(t, "nosuch = 1")}, {"--config", file(t, "max-body = 'x'")}, {"--config", file(t,
			"version = true")},
		{"--config", file(t, "not toml")},
	} {
		if c, err := Parse(arguments, &bytes.Buffer{}); err == nil {
			t.Errorf("%v gives %+v", arguments, c)
		}
	}
}

func TestHelp(t *testing.T) {
	var out bytes.Buffer
	if _, err := Parse([]string{"--help"}, &out); !errors.Is(err, ErrHelp) {
		t.Fatal(err)
	}
	for _, word := range []string{"--listen ADDRESS", "--socket PATH", "--api-keys FILE", "Exit codes",
		"Default: 127.0.0.1:8080."} {
		if !strings.Contains(out.String(), word) {
			t.Errorf("%q is not in the help:\n%s", word, out.String())
		}
	}
}

// TestExample: deploy's example has every setting, at its default.
func TestExample(t *testing.T) {
	const path = "../../../../deploy/colibri-gateway.toml"
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	uncommented := regexp.MustCompile(`(?m)^#([a-z-]+ = )`).ReplaceAllString(string(text), "$1")
	got, err := Parse([]string{"--config", file(t, uncommented)}, &bytes.Buffer{})
	if err != nil {
		t.Fatal(err)
	}
	want, _ := Parse(nil, &bytes.Buffer{})
	got.File = ""
	if *got != *want {
		t.Errorf("example: %+v\ndefaults: %+v", got, want)
	}
	f := declare(&Config{})
	for _, line := range strings.Split(uncommented, "\n") {
		if name, _, found := strings.Cut(line, " = "); found && f.Lookup(name) == nil {
			t.Errorf("%s is no setting", name)
		}
	}
}

func TestLogger(t *testing.T) {
	for format, want := range map[string]string{"json": `"msg":"hello"`, "text": "msg=hello"} {
		c, err := Parse([]string{"--log-format", format, "--log-level", "warn"}, &bytes.Buffer{})
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		log := c.Logger(&out)
		log.Info("unseen")
		log.Warn("hello")
		if !strings.Contains(out.String(), want) || strings.Contains(out.String(), "unseen") {
			t.Error(out.String())
		}
	}
}
