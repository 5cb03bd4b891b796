package colibri_test

import (
	"context"
	"fmt"
	"os"
	"testing"

	colibri "colibri/client/go"
	"colibri/client/go/unixsock"
)

func ask(ctx context.Context, socket string) error {
	client := unixsock.New(socket)
	defer client.Close()
	request := colibri.NewGenerate()
	request.Tokens, request.MaxTokens = colibri.TokenIDs{1, 415, 565}, 16
	stream, err := client.Generate(ctx, &request)
	if err != nil {
		return err
	}
	for chunk, err := range stream.All() {
		if err != nil {
			return err
		}
		fmt.Println(chunk.IDs)
	}
	fmt.Println(stream.Done().FinishReason)
	return nil
}

// README.md shows ask; tests/integration/test_readme.py runs it against a daemon.
func TestAsk(t *testing.T) {
	socket := os.Getenv("COLIBRI_SOCKET")
	if socket == "" {
		t.Skip("needs a daemon: COLIBRI_SOCKET")
	}
	if err := ask(t.Context(), socket); err != nil {
		t.Fatal(err)
	}
}
