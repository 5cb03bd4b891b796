package text

/*
#cgo CFLAGS: -I${SRCDIR}/native
#cgo LDFLAGS: ${SRCDIR}/native/target/release/libcolibri_text.a -lm -ldl -lpthread
#include "colibri_text.h"
*/
import "C"

import (
	"errors"
	"runtime"
	"unsafe"
)

// This file is the Go side of colibri_text.h: bytes in, bytes out, nothing of C beyond it. An object is freed when
// nothing holds it any more.

// encoder is a tokenizer.json at work.
type encoder struct {
	c *C.colibri_tokenizer
}

func newEncoder(tokenizerJSON string) (*encoder, error) {
	var out C.colibri_bytes
	source, size := pointer(tokenizerJSON)
	c := C.colibri_tokenizer_new(source, size, &out)
	if message := take(out); c == nil {
		return nil, errors.New(string(message))
	}
	e := &encoder{c}
	runtime.AddCleanup(e, func(c *C.colibri_tokenizer) { C.colibri_tokenizer_drop(c) }, c)
	return e, nil
}

// encode wants UTF-8.
func (e *encoder) encode(text string, addSpecial bool) ([]uint32, error) {
	defer runtime.KeepAlive(e)
	var out C.colibri_bytes
	add := C.int(0)
	if addSpecial {
		add = 1
	}
	source, size := pointer(text)
	if C.colibri_tokenizer_encode(e.c, source, size, add, &out) != 0 {
		return nil, errors.New(string(take(out)))
	}
	defer C.colibri_text_free(out)
	ids := unsafe.Slice((*uint32)(unsafe.Pointer(out.data)), int(out.len)/4)
	return append(make([]uint32, 0, len(ids)), ids...), nil
}

// decode leaves special tokens and unknown ids out.
func (e *encoder) decode(ids []uint32) (string, error) {
	defer runtime.KeepAlive(e)
	var out C.colibri_bytes
	failed := C.colibri_tokenizer_decode(e.c, (*C.uint32_t)(unsafe.SliceData(ids)), C.size_t(len(ids)), &out)
	text := string(take(out))
	if failed != 0 {
		return "", errors.New(text)
	}
	return text, nil
}

// token is how the vocabulary writes a token.
func (e *encoder) token(id uint32) (piece string, known bool) {
	defer runtime.KeepAlive(e)
	var out C.colibri_bytes
	missing := C.colibri_tokenizer_token(e.c, C.uint32_t(id), &out)
	return string(take(out)), missing == 0
}

// renderer is a chat template at work.
type renderer struct {
	c *C.colibri_template
}

// newRenderer: steps bounds the instructions of one rendering.
func newRenderer(source string, steps uint64) (*renderer, error) {
	var out C.colibri_bytes
	data, size := pointer(source)
	c := C.colibri_template_new(data, size, C.uint64_t(steps), &out)
	if message := take(out); c == nil {
		return nil, errors.New(string(message))
	}
	r := &renderer{c}
	runtime.AddCleanup(r, func(c *C.colibri_template) { C.colibri_template_drop(c) }, c)
	return r, nil
}

// render: limit bounds the bytes of the result.
func (r *renderer) render(variablesJSON string, limit int) (string, error) {
	defer runtime.KeepAlive(r)
	var out C.colibri_bytes
	data, size := pointer(variablesJSON)
	failed := C.colibri_template_render(r.c, data, size, C.size_t(limit), &out)
	text := string(take(out))
	if failed != 0 {
		return "", errors.New(text)
	}
	return text, nil
}

// pointer is text as C takes it.
func pointer(text string) (*C.char, C.size_t) {
	return (*C.char)(unsafe.Pointer(unsafe.StringData(text))), C.size_t(len(text))
}

// take copies what a function gave and frees it.
func take(out C.colibri_bytes) []byte {
	defer C.colibri_text_free(out)
	return C.GoBytes(unsafe.Pointer(out.data), C.int(out.len))
}
