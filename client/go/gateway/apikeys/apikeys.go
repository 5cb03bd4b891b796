// Package apikeys knows who may use a gateway and how much: a text file with one key a line, of which only hashes are
// kept.
//
//	# sha256 of the key, a name for logs, and limits
//	9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08 alice tenant=research rps=10 concurrency=4
//
// tenant is what the daemon shares its service out by; without it, it is the name. rps is requests per second, on
// average; concurrency is requests at once; without them there is no such limit. Whoever changes the file sees the
// change within seconds; a file with a mistake in it changes nothing and is logged.
package apikeys

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// Key is a line of the file. It is safe for concurrent use; Name and Tenant do not change.
type Key struct {
	Name   string
	Tenant string

	hash        [sha256.Size]byte
	rps         float64 // 0: no limit
	concurrency int64   // 0: no limit
	use         *use
}

// use is what has been used of a key. It outlives a reload of the file.
type use struct {
	live   atomic.Int64
	bucket bucket
}

// Enter takes one request's share of the key's limits; call leave when the request has ended. If ok is false nothing
// was taken, and wait is when it is worth trying again.
func (k *Key) Enter(now time.Time) (leave func(), wait time.Duration, ok bool) {
	leave = func() { k.use.live.Add(-1) }
	if live := k.use.live.Add(1); k.concurrency > 0 && live > k.concurrency {
		leave()
		return nil, time.Second, false
	}
	if wait := k.use.bucket.take(now, k.rps); wait > 0 {
		leave()
		return nil, wait, false
	}
	return leave, 0, true
}

// Hash is how a key stands in the file.
func Hash(secret string) string {
	sum := sha256.Sum256([]byte(secret))
	return hex.EncodeToString(sum[:])
}

// New is a key that nobody can guess.
func New() string {
	var random [32]byte
	_, _ = rand.Read(random[:]) // never fails
	return "ck-" + base64.RawURLEncoding.EncodeToString(random[:])
}

// ValidName says whether a key can be called that.
func ValidName(name string) bool { return namePattern.MatchString(name) }

var namePattern = regexp.MustCompile(`^[A-Za-z0-9._@-]{1,128}$`)

// find goes through all keys, however early it finds one: the time does not tell how much of a key was right.
func find(keys []*Key, secret string) *Key {
	var found *Key
	sum := sha256.Sum256([]byte(secret))
	for _, key := range keys {
		if subtle.ConstantTimeCompare(key.hash[:], sum[:]) == 1 {
			found = key
		}
	}
	return found
}

// parse reads the file's text. Names and keys are unique.
func parse(text string) ([]*Key, error) {
	var keys []*Key
	names := map[string]bool{}
	hashes := map[[sha256.Size]byte]bool{}
	for i, line := range strings.Split(text, "\n") {
		line, _, _ = strings.Cut(line, "#")
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		key, err := parseLine(words)
		switch {
		case err != nil:
		case names[key.Name]:
			err = fmt.Errorf("the name %s is there twice", key.Name)
		case hashes[key.hash]:
			err = fmt.Errorf("the key of %s has another name too", key.Name)
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", i+1, err)
		}
		names[key.Name], hashes[key.hash] = true, true
		keys = append(keys, key)
	}
	return keys, nil
}

func parseLine(words []string) (*Key, error) {
	key := &Key{use: &use{}}
	sum, err := hex.DecodeString(words[0])
	if err != nil || len(sum) != sha256.Size {
		return nil, fmt.Errorf("must begin with the 64 hex digits that hash-key prints")
	}
	copy(key.hash[:], sum)
	if len(words) < 2 || !ValidName(words[1]) {
		return nil, fmt.Errorf("must have a name after the hash: letters, digits and . _ @ -")
	}
	key.Name, key.Tenant = words[1], words[1]
	for _, word := range words[2:] {
		name, value, _ := strings.Cut(word, "=")
		set, known := settings[name]
		if !known {
			return nil, fmt.Errorf("%q is none of tenant=, rps= and concurrency=", name)
		}
		if err := set(key, value); err != nil {
			return nil, fmt.Errorf("%s=%s: %w", name, value, err)
		}
	}
	return key, nil
}

var settings = map[string]func(*Key, string) error{
	"tenant": func(k *Key, value string) error {
		if k.Tenant = value; !ValidName(value) {
			return fmt.Errorf("must have letters, digits and . _ @ - only")
		}
		return nil
	},
	"rps": func(k *Key, value string) (err error) {
		if k.rps, err = strconv.ParseFloat(value, 64); err != nil || !(k.rps > 0 && k.rps <= 1e6) {
			return fmt.Errorf("must be a number above 0")
		}
		return nil
	},
	"concurrency": func(k *Key, value string) (err error) {
		if k.concurrency, err = strconv.ParseInt(value, 10, 32); err != nil || k.concurrency < 1 {
			return fmt.Errorf("must be a whole number above 0")
		}
		return nil
	},
}
