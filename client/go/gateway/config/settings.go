package config

import (
	"flag"
	"fmt"
	"io"
	"strings"
	"time"

	"colibri/client/go/gateway"
	"colibri/client/go/unixsock"
)

// setting is a flag and a name in the file. place is where its value goes, and holds the default. A setting without a
// name is a heading.
type setting struct {
	name, kind string
	place      any
	help       string
}

func heading(title string) setting { return setting{help: title} }

// settings are all there are, in the order of the help. They put the defaults into c.
func settings(c *Config) []setting {
	c.Listen, c.ListenMode, c.Socket = "127.0.0.1:8080", 0o660, unixsock.DefaultSocket
	c.MaxBody, c.MaxChoices, c.MaxRequests = gateway.DefaultMaxBody, gateway.DefaultMaxChoices,
		gateway.DefaultMaxRequests
	c.BodyTime, c.WriteTime, c.DrainTimeout = gateway.DefaultBodyTime, gateway.DefaultWriteTime, 30*time.Second
	c.LogFormat, c.LogLevel = "text", "info"
	return []setting{
		heading("Where it answers"),
		{"listen", "ADDRESS", &c.Listen, "host:port, unix:PATH, or systemd for the socket of a .socket unit."},
		{"listen-mode", "MODE", &c.ListenMode, "File mode of a Unix socket: who may connect."},
		{"metrics-listen", "ADDRESS", &c.MetricsListen,
			"For /metrics and /health alone; then --listen has no /metrics."},
		{"tls-cert", "FILE", &c.TLSCert, "Certificate with its chain, PEM. Needs --tls-key."},
		{"tls-key", "FILE", &c.TLSKey, "Its private key, PEM."},
		heading("The daemon"),
		{"socket", "PATH", &c.Socket, "The daemon's socket."},
		{"connections", "N", &c.Connections, "Most connections to it. 0: one per core."},
		{"model-folder", "FOLDER", &c.ModelFolder,
			"Tokenizer and chat template. Empty: in the folder that the daemon names."},
		heading("Who may ask, and how much"),
		{"api-keys", "FILE", &c.APIKeys,
			"Hashes of API keys, as hash-key prints them; read at each change. Empty: whoever can connect may ask."},
		{"max-body", "BYTES", &c.MaxBody, "Most of a request's body."},
		{"max-choices", "N", &c.MaxChoices, "Most answers to one request: its prompts times n."},
		{"max-requests", "N", &c.MaxRequests, "Most requests at once, of all clients."},
		{"body-time", "TIME", &c.BodyTime, "For a request's body to arrive."},
		{"write-time", "TIME", &c.WriteTime, "After this a client that does not read its answer is given up."},
		heading("Stopping"),
		{"drain-delay", "TIME", &c.DrainDelay,
			"At SIGTERM, between not ready and closed: for a load balancer to notice."},
		{"drain-timeout", "TIME", &c.DrainTimeout, "Then, for requests to be answered to their end."},
		heading("Log and others"),
		{"log-format", "FORMAT", &c.LogFormat, "text or json, on standard error."},
		{"log-level", "LEVEL", &c.LogLevel, "debug, info, warn or error. info has a line for each request."},
		{"config", "FILE", &c.File, "TOML file with these settings by name: max-body = 1048576. Flags win over it."},
		{"version", "", &c.Version, "Print the version and end."},
	}
}

// declare makes the flags.
func declare(c *Config) *flag.FlagSet {
	f := flag.NewFlagSet("colibri-gateway", flag.ContinueOnError)
	for _, s := range settings(c) {
		switch place := s.place.(type) {
		case *string:
			f.StringVar(place, s.name, *place, s.help)
		case *int:
			f.IntVar(place, s.name, *place, s.help)
		case *int64:
			f.Int64Var(place, s.name, *place, s.help)
		case *bool:
			f.BoolVar(place, s.name, *place, s.help)
		case *time.Duration:
			f.DurationVar(place, s.name, *place, s.help)
		case *fileMode:
			f.Var(place, s.name, s.help)
		}
	}
	return f
}

const about = `Usage: colibri-gateway [FLAGS]
       colibri-gateway hash-key NAME

Answers HTTP in the words of OpenAI's API from a Colibri daemon on this host.

  POST /v1/completions  /v1/chat/completions      text, whole or streamed
  POST /v1/generate  /v1/score                    token ids in and out, as lines of JSON
  POST /tokenize  /detokenize       GET /v1/models
  GET  /health/live  /health/ready  /metrics  /openapi.json

SIGTERM or Ctrl-C: not ready at once, closed after drain-delay, ends when every request has been answered or after
drain-timeout; a second one ends at once. SIGHUP reads the certificate and the API keys again.
hash-key reads a key from standard input, or makes one and prints it on standard error, and prints the line for the
file of API keys.

Exit codes: 0 stopped, 2 settings refused, 5 an address cannot be used.
`

func printHelp(out io.Writer, c *Config) {
	fmt.Fprint(out, about)
	f := declare(c)
	for _, s := range settings(c) {
		if s.name == "" {
			fmt.Fprintf(out, "\n%s:\n", s.help)
			continue
		}
		help := s.help
		if value := f.Lookup(s.name).DefValue; value != "" && value != "false" && value != "0" {
			help += " Default: " + value + "."
		}
		flag := strings.TrimSpace("--" + s.name + " " + s.kind)
		fmt.Fprintf(out, "  %-26s %s\n", flag, wrap(help, 29, 120))
	}
}

// wrap breaks lines at spaces; all but the first are indented.
func wrap(text string, indent, width int) string {
	var out strings.Builder
	column := indent
	for i, word := range strings.Fields(text) {
		if i > 0 && column+1+len(word) > width {
			out.WriteString("\n" + strings.Repeat(" ", indent))
			column = indent
		} else if i > 0 {
			out.WriteByte(' ')
			column++
		}
		out.WriteString(word)
		column += len(word)
	}
	return out.String()
}
