package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	colibri "colibri/client/go"
	"colibri/client/go/text"
)

// served is the model that the daemon serves, with its text side.
type served struct {
	info    *colibri.ModelInfo
	text    *text.Model // nil if textErr
	textErr error
	since   time.Time
}

// models keeps the tokenizer of the model that is served now. A daemon that has reloaded another model says so, and the
// next request finds its tokenizer.
type models struct {
	client colibri.Client
	folder string // instead of the daemon's

	mu  sync.Mutex // held while a tokenizer is read: everybody waits for the same one
	now *served
}

func (m *models) current(ctx context.Context) (*served, error) {
	info, err := m.client.Model(ctx)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.now != nil && m.now.info.ID == info.ID && m.now.info.Name == info.Name {
		return m.now, nil
	}
	m.now = &served{info: info, since: time.Now()}
	m.now.text, m.now.textErr = m.open(info)
	return m.now, nil
}

func (m *models) open(info *colibri.ModelInfo) (*text.Model, error) {
	folder := m.folder
	if folder == "" {
		if info.Folder == nil {
			return nil, errors.New("the daemon does not tell its model folder; set model-folder")
		}
		folder = *info.Folder
	}
	return text.Open(folder)
}

// named is the current model if the request's name, when it has one, is its.
func (m *models) named(ctx context.Context, name string) (*served, error) {
	model, err := m.current(ctx)
	if err != nil {
		return nil, err
	}
	if name != "" && name != model.info.Name {
		return nil, modelNotFound(name, model.info.Name)
	}
	return model, nil
}

// withText is named for requests that need a tokenizer.
func (m *models) withText(ctx context.Context, name string) (*served, error) {
	model, err := m.named(ctx, name)
	if err != nil {
		return nil, err
	}
	if model.text == nil {
		return nil, fmt.Errorf("%w: %w", errNoText, model.textErr)
	}
	return model, nil
}

var errNoText = newError(http.StatusNotImplemented, "no_tokenizer",
	"the model has no tokenizer that can be used here; /v1/generate and /v1/score take token ids")

type modelEntry struct {
	ID          string `json:"id"`
	Object      string `json:"object"`
	Created     int64  `json:"created"`
	OwnedBy     string `json:"owned_by"`
	MaxLen      uint64 `json:"max_model_len"`
	VocabSize   uint64 `json:"vocab_size"`
	Fingerprint string `json:"system_fingerprint"`
}

func (s *served) entry() modelEntry {
	return modelEntry{s.info.Name, "model", s.since.Unix(), "colibri", s.info.MaxLen, s.info.VocabSize, s.fingerprint()}
}

// fingerprint: the same one means the same answer to the same request with the same seed.
func (s *served) fingerprint() string {
	return "fp_" + short(s.info.ID) + short(s.info.Fingerprint)
}

func short(digits string) string { return digits[:min(len(digits), 8)] }

func listModels(d *deps, x *exchange) error {
	model, err := d.models.current(x.r.Context())
	if err != nil {
		return err
	}
	return x.json(http.StatusOK, map[string]any{"object": "list", "data": []modelEntry{model.entry()}})
}

func oneModel(d *deps, x *exchange) error {
	model, err := d.models.named(x.r.Context(), x.r.PathValue("model"))
	if err != nil {
		return err
	}
	return x.json(http.StatusOK, model.entry())
}
