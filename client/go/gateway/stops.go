package gateway

import "strings"

// stopStrings cuts streamed text at the first stop string: the one that is complete first, of several the longest.
// Text that could be the beginning of one is held back until that is decided. The result does not depend on how the
// text comes in pieces.
type stopStrings struct {
	stops []string // none empty
	held  string
	hit   bool
}

// push takes the next piece and returns what can be given out; nothing after a hit.
func (s *stopStrings) push(piece string) string {
	if len(s.stops) == 0 {
		return piece
	}
	if s.hit || piece == "" {
		return ""
	}
	all := s.held + piece
	if start := s.find(all); start >= 0 {
		s.hit, s.held = true, ""
		return all[:start]
	}
	end := len(all) - s.undecided(all)
	s.held = all[end:]
	return all[:end]
}

// flush is what was held back, when no more text comes.
func (s *stopStrings) flush() string {
	held := s.held
	s.held = ""
	return held
}

// find is where the stop string that ends first starts, or -1.
func (s *stopStrings) find(text string) int {
	start, end := -1, len(text)+1
	for _, stop := range s.stops {
		at := strings.Index(text, stop)
		if at < 0 {
			continue
		}
		if over := at + len(stop); over < end || over == end && at < start {
			start, end = at, over
		}
	}
	return start
}

// undecided is the length of the longest end of text that a stop string begins with.
func (s *stopStrings) undecided(text string) int {
	longest := 0
	for _, stop := range s.stops {
		for n := min(len(stop)-1, len(text)); n > longest; n-- {
			if strings.HasPrefix(stop, text[len(text)-n:]) {
				longest = n
				break
			}
		}
	}
	return longest
}
