package unixsock_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	colibri "colibri/client/go"
	"colibri/client/go/unixsock"
)

var socket = unixsock.Echo()

func Example() {
	client := unixsock.New(socket) // "" is $COLIBRI_SOCKET, or /run/colibri/colibri.sock
	defer client.Close()

	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	request := colibri.NewGenerate()
	request.Tokens, request.MaxTokens = colibri.TokenIDs{1, 415, 565}, 16
	stream, err := client.Generate(ctx, &request)
	if err != nil {
		log.Fatal(err)
	}
	for chunk, err := range stream.All() {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(chunk.IDs)
	}
	fmt.Println(stream.Done().FinishReason)

	// Output:
	// [1 415 565]
	// stop
}

func ExampleClient_Generate_errors() {
	client := unixsock.New("/nowhere/colibri.sock")
	defer client.Close()

	request := colibri.NewGenerate()
	request.Tokens = colibri.TokenIDs{1}
	_, err := client.Generate(context.Background(), &request)
	var refusal *colibri.Error
	var failed *colibri.ConnectionError
	switch {
	case errors.As(err, &refusal):
		fmt.Println("refused, HTTP status", colibri.Code(refusal.Code).HTTP())
	case errors.As(err, &failed):
		fmt.Println(failed)
	}

	// Output:
	// /nowhere/colibri.sock: there is no socket here; is the daemon running (colibrid serve), and is this its --socket?
}
