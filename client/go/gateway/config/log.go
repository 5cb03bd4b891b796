package config

import (
	"fmt"
	"io"
	"log/slog"
)

func (c *Config) level() (level slog.Level, err error) {
	if err := level.UnmarshalText([]byte(c.LogLevel)); err != nil {
		return level, fmt.Errorf("log-level is debug, info, warn or error, not %q", c.LogLevel)
	}
	return level, nil
}

// Logger is the one that was asked for.
func (c *Config) Logger(out io.Writer) *slog.Logger {
	level, _ := c.level() // checked by Parse
	options := &slog.HandlerOptions{Level: level}
	if c.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(out, options))
	}
	return slog.New(slog.NewTextHandler(out, options))
}
