package apikeys

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// write replaces a file as people do, by renaming.
func write(t *testing.T, path string, lines ...string) {
	t.Helper()
	if err := os.WriteFile(path+".new", []byte(strings.Join(lines, "\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

func open(t *testing.T, lines ...string) (*File, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "keys")
	write(t, path, lines...)
	f, err := Open(path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return f, path
}

func TestFind(t *testing.T) {
	f, _ := open(t, "# ours", "", Hash("one")+" alice", Hash("two")+"  bob tenant=lab # theirs")
	if key := f.Find("one"); key == nil || key.Name != "alice" || key.Tenant != "alice" {
		t.Error(key)
	}
	if key := f.Find("two"); key == nil || key.Name != "bob" || key.Tenant != "lab" {
		t.Error(key)
	}
	for _, secret := range []string{"", "three", Hash("one")} {
		if key := f.Find(secret); key != nil {
			t.Error(secret, key)
		}
	}
}

func TestMistakes(t *testing.T) {
	for _, line := range []string{"x", "abcd alice", Hash("a"), Hash("a") + " al/ice", Hash("a") + " alice rps=0",
		Hash("a") + " alice rps=NaN", Hash("a") + " alice concurrency=-1", Hash("a") + " alice color=red",
		Hash("a") + " alice tenant=", Hash("a") + " alice\n" + Hash("b") + " alice",
		Hash("a") + " alice\n" + Hash("a") + " bob"} {
		if keys, err := parse(line); err == nil || !strings.HasPrefix(err.Error(), "line ") {
			t.Errorf("%q: %v, %v", line, keys, err)
		}
	}
	if _, err := Open(filepath.Join(t.TempDir(), "none"), slog.New(slog.DiscardHandler)); err == nil {
		t.Error("a file that is not there was read")
	}
}

func TestRate(t *testing.T) {
	f, _ := open(t, Hash("a")+" alice rps=2")
	key, now := f.Find("a"), time.Unix(1000, 0)
	for i, want := range []struct {
		after time.Duration
		wait  time.Duration
	}{{0, 0}, {0, 0}, {0, 500 * time.Millisecond}, {400 * time.Millisecond, 100 * time.Millisecond},
		{100 * time.Millisecond, 0}, {0, 500 * time.Millisecond}, {time.Hour, 0}, {0, 0}, {0, 500 * time.Millisecond}} {
		now = now.Add(want.after)
		if _, wait, ok := key.Enter(now); wait != want.wait || ok != (want.wait == 0) {
			t.Errorf("%d: wait %v, not %v", i, wait, want.wait)
		}
	}
}

func TestConcurrency(t *testing.T) {
	f, path := open(t, Hash("a")+" alice concurrency=2")
	enter := func() (func(), bool) {
		leave, _, ok := f.Find("a").Enter(time.Now())
		return leave, ok
	}
	leave, _ := enter()
	_, second := enter()
	_, third := enter()
	if !second || third {
		t.Error(second, third)
	}
	leave()
	if _, ok := enter(); !ok {
		t.Error("nothing was given back")
	}
	write(t, path, Hash("a")+" alice concurrency=3")
	if err := f.Reload(); err != nil {
		t.Fatal(err)
	}
	_, third = enter()
	if _, fourth := enter(); !third || fourth {
		t.Error("the requests that are running were forgotten by a reload")
	}
}

func TestWatch(t *testing.T) {
	f, path := open(t, Hash("a")+" alice")
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { f.Watch(ctx, time.Millisecond); close(done) }()
	defer func() { cancel(); <-done }()
	until := func(what string, condition func() bool) {
		for deadline := time.Now().Add(10 * time.Second); !condition(); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal(what)
			}
		}
	}
	write(t, path, Hash("b")+" bob")
	until("the new key does not come", func() bool { return f.Find("b") != nil && f.Find("a") == nil })
	write(t, path, "nonsense")
	until("the bad file was not seen", func() bool { return !f.changed() })
	if f.Find("b") == nil {
		t.Error("a bad file changed the keys")
	}
	os.Remove(path)
	write(t, path, Hash("c")+" carol")
	until("the file that came back was not read", func() bool { return f.Find("c") != nil })
}

func TestNew(t *testing.T) {
	if a, b := New(), New(); a == b || len(a) != len("ck-")+43 {
		t.Error(a, b)
	}
	if got := fmt.Sprint(Hash("abc")); got != "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad" {
		t.Error(got)
	}
}
