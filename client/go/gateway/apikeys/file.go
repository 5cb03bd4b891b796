package apikeys

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// File is the keys of a file, as they are now.
type File struct {
	path string
	log  *slog.Logger
	keys atomic.Pointer[[]*Key]

	mu   sync.Mutex // of reading
	seen stamp
}

// stamp tells one version of a file from another.
type stamp struct {
	changed time.Time
	size    int64
	inode   os.FileInfo
}

// Open reads the file. A file without keys lets nobody in.
func Open(path string, log *slog.Logger) (*File, error) {
	f := &File{path: path, log: log}
	if err := f.Reload(); err != nil {
		return nil, err
	}
	return f, nil
}

// Find is the key that secret is, or nil.
func (f *File) Find(secret string) *Key { return find(*f.keys.Load(), secret) }

// Reload reads the file now. Keys that are still there keep what was used of them.
func (f *File) Reload() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	info, err := os.Stat(f.path)
	if err != nil {
		return fmt.Errorf("the API key file cannot be read: %w", err)
	}
	f.seen = stampOf(info)
	text, err := os.ReadFile(f.path)
	if err != nil {
		return fmt.Errorf("the API key file cannot be read: %w", err)
	}
	keys, err := parse(string(text))
	if err != nil {
		return fmt.Errorf("%s: %w", f.path, err)
	}
	if old := f.keys.Load(); old != nil {
		inherit(keys, *old)
	}
	f.keys.Store(&keys)
	f.log.Info("API keys read", "file", f.path, "keys", len(keys))
	return nil
}

func inherit(keys, old []*Key) {
	for _, key := range keys {
		for _, before := range old {
			if key.hash == before.hash {
				key.use = before.use
			}
		}
	}
}

// Watch looks for changes until ctx ends.
func (f *File) Watch(ctx context.Context, every time.Duration) {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if !f.changed() {
			continue
		}
		if err := f.Reload(); err != nil {
			f.log.Error("API keys stay as they were", "error", err)
		}
	}
}

// changed is false for a file that is not there: it may be about to be replaced.
func (f *File) changed() bool {
	info, err := os.Stat(f.path)
	if err != nil {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	now := stampOf(info)
	return !now.changed.Equal(f.seen.changed) || now.size != f.seen.size || !os.SameFile(now.inode, f.seen.inode)
}

func stampOf(info os.FileInfo) stamp { return stamp{info.ModTime(), info.Size(), info} }
