// Package config is the gateway's settings: flags, and a TOML file with the same names. Each setting is one line in
// settings; help, the check of the file and the defaults follow from it.
package config

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"github.com/BurntSushi/toml"
)

// Config is what was asked for.
type Config struct {
	Listen        string
	ListenMode    fileMode
	MetricsListen string
	TLSCert       string
	TLSKey        string

	Socket      string
	Connections int
	ModelFolder string

	APIKeys string

	MaxBody     int64
	MaxChoices  int
	MaxRequests int
	BodyTime    time.Duration
	WriteTime   time.Duration

	DrainDelay   time.Duration
	DrainTimeout time.Duration

	LogFormat string
	LogLevel  string

	File    string
	Version bool
}

// ErrHelp: help was asked for and has been printed.
var ErrHelp = flag.ErrHelp

// Parse reads flags, and the file that --config names. Help goes to out.
func Parse(arguments []string, out io.Writer) (*Config, error) {
	c := &Config{}
	f := declare(c)
	f.SetOutput(io.Discard)
	f.Usage = func() { printHelp(out, c) }
	if err := f.Parse(arguments); err != nil {
		return nil, err
	}
	if f.NArg() > 0 {
		return nil, fmt.Errorf("%q is not a flag; --help lists them", f.Arg(0))
	}
	if c.File != "" {
		if err := readFile(f, c.File); err != nil {
			return nil, err
		}
	}
	return c, c.check()
}

// readFile sets what no flag has set.
func readFile(f *flag.FlagSet, path string) error {
	var values map[string]any
	if _, err := toml.DecodeFile(path, &values); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	given := map[string]bool{"config": true, "version": true}
	f.Visit(func(flag *flag.Flag) { given[flag.Name] = true })
	for name, value := range values {
		if f.Lookup(name) == nil || name == "config" || name == "version" {
			return fmt.Errorf("%s: %s is not a setting; --help lists them", path, name)
		}
		if given[name] {
			continue
		}
		if err := f.Set(name, fmt.Sprint(value)); err != nil {
			return fmt.Errorf("%s: %s: %w", path, name, err)
		}
	}
	return nil
}

func (c *Config) check() error {
	positive := map[string]bool{
		"max-body": c.MaxBody > 0, "max-choices": c.MaxChoices > 0, "max-requests": c.MaxRequests > 0,
		"body-time": c.BodyTime > 0, "write-time": c.WriteTime > 0, "drain-timeout": c.DrainTimeout > 0,
		"drain-delay": c.DrainDelay >= 0, "connections": c.Connections >= 0,
	}
	for name, ok := range positive {
		if !ok {
			return fmt.Errorf("%s must be positive", name)
		}
	}
	if (c.TLSCert == "") != (c.TLSKey == "") {
		return errors.New("tls-cert and tls-key go together")
	}
	if c.LogFormat != "text" && c.LogFormat != "json" {
		return fmt.Errorf("log-format is text or json, not %q", c.LogFormat)
	}
	_, err := c.level()
	return err
}

// fileMode is written in octal digits.
type fileMode os.FileMode

func (m *fileMode) String() string { return fmt.Sprintf("%04o", uint32(*m)) }

func (m *fileMode) Set(digits string) error {
	mode, err := strconv.ParseUint(digits, 8, 32)
	if err != nil || mode > 0o777 {
		return errors.New("must be octal digits, 0000 to 0777")
	}
	*m = fileMode(mode)
	return nil
}
