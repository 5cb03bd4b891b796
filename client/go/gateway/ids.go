package gateway

import (
	"crypto/rand"
	"encoding/hex"
	"regexp"
)

// newID is for requests that bring none.
func newID() string {
	var random [16]byte
	_, _ = rand.Read(random[:]) // never fails
	return hex.EncodeToString(random[:])
}

// idPattern: what others chose and what gets into logs, headers and answers.
var idPattern = regexp.MustCompile(`^[A-Za-z0-9._:-]{1,128}$`)

func validID(id string) bool { return idPattern.MatchString(id) }

// tracePattern is a W3C traceparent of version 00; ids of zeros only are not valid.
var tracePattern = regexp.MustCompile(`^00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}$`)

func validTrace(parent string) bool {
	found := tracePattern.FindStringSubmatch(parent)
	const zeros = "00000000000000000000000000000000"
	return found != nil && found[1] != zeros && found[2] != zeros[:16]
}
