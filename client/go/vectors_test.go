package colibri

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"os"
	"reflect"
	"testing"
)

// vectors is tests/golden/protocol/vectors.json; its README describes the fields.
type vectors struct {
	Messages []struct {
		Name   string
		Tag    uint64
		ID     uint64
		Fields json.RawMessage
		Hex    string
	}
	Refused []struct {
		Name  string
		Code  string
		Fault bool
		Field string
		Index *uint64
		Hex   string
	}
}

func loadVectors(t testing.TB) (v vectors) {
	t.Helper()
	data, err := os.ReadFile("../../tests/golden/protocol/vectors.json")
	if err == nil {
		err = json.Unmarshal(data, &v)
	}
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func unhex(t testing.TB, text string) []byte {
	t.Helper()
	data, err := hex.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// decodeStream reads one frame and its message.
func decodeStream(data []byte) (Message, uint64, error) {
	payload, err := NewFrameReader(bytes.NewReader(data), MaxFrame).Next()
	if err != nil {
		return nil, 0, err
	}
	return Decode(payload)
}

func TestBytesMeanTheFields(t *testing.T) {
	seen := map[uint64]int{}
	for _, vector := range loadVectors(t).Messages {
		seen[vector.Tag]++
		t.Run(vector.Name, func(t *testing.T) {
			message, id, err := decodeStream(unhex(t, vector.Hex))
			if err != nil {
				t.Fatal(err)
			}
			if message.Tag() != vector.Tag || id != vector.ID {
				t.Fatalf("tag %d, id %d", message.Tag(), id)
			}
			if got := hex.EncodeToString(Encode(message, id)); got != vector.Hex {
				t.Errorf("encoded again:\n%s\nnot\n%s", got, vector.Hex)
			}
			want := reflect.New(reflect.TypeOf(message).Elem()).Interface().(Message)
			decoder := json.NewDecoder(bytes.NewReader(vector.Fields))
			decoder.DisallowUnknownFields()
			if err := decoder.Decode(want); err != nil {
				t.Fatal(err)
			}
			if got := hex.EncodeToString(Encode(want, id)); got != vector.Hex {
				t.Errorf("the fields make\n%s\nnot\n%s", got, vector.Hex)
			}
			if asJSON(t, message) != asJSON(t, want) {
				t.Errorf("means %s\nnot %s", asJSON(t, message), asJSON(t, want))
			}
		})
	}
	for tag := range readers {
		if seen[tag] < 2 {
			t.Errorf("message type %d has %d vectors", tag, seen[tag])
		}
	}
}

// asJSON compares messages: nil and empty lists are the same on the wire and differ for reflect.
func asJSON(t testing.TB, message Message) string {
	t.Helper()
	data, err := json.Marshal(message)
	if err != nil {
		t.Fatal(err)
	}
	return string(bytes.ReplaceAll(bytes.ReplaceAll(data, []byte(":null"), []byte(":[]")), []byte(":{}"), []byte(":[]")))
}

func TestBytesAreRefused(t *testing.T) {
	for _, vector := range loadVectors(t).Refused {
		t.Run(vector.Name, func(t *testing.T) {
			_, _, err := decodeStream(unhex(t, vector.Hex))
			var problem *ProtocolError
			if !errors.As(err, &problem) {
				t.Fatalf("%v", err)
			}
			if problem.Code.String() != vector.Code || problem.Fault != vector.Fault {
				t.Errorf("%v, fault %v; not %s, fault %v", problem, problem.Fault, vector.Code, vector.Fault)
			}
			if !vector.Fault && (problem.Field != vector.Field || !reflect.DeepEqual(problem.Index, vector.Index)) {
				t.Errorf("%v: field %q, not %q", problem, problem.Field, vector.Field)
			}
		})
	}
}
