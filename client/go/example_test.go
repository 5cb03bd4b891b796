package colibri_test

import (
	"fmt"
	"log"
	"net"
	"os"
	"testing"

	colibri "colibri/client/go"
)

func ask(socket string) {
	conn, err := net.Dial("unix", socket)
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	request := colibri.NewGenerate()
	request.Tokens, request.MaxTokens = colibri.TokenIDs{1, 415, 565}, 16
	conn.Write(colibri.Encode(&colibri.Hello{ProtoMin: 1, ProtoMax: 1}, 0))
	conn.Write(colibri.Encode(&request, 1))
	frames := colibri.NewFrameReader(conn, 1<<20)
	for {
		payload, err := frames.Next()
		if err != nil {
			log.Fatal(err)
		}
		message, _, err := colibri.Decode(payload)
		if err != nil {
			log.Fatal(err)
		}
		switch m := message.(type) {
		case *colibri.TokensOut:
			fmt.Println(m.IDs)
		case *colibri.Done:
			fmt.Println(m.FinishReason)
			return
		case *colibri.Error:
			log.Fatal(m)
		}
	}
}

// README.md shows ask; tests/integration/test_readme.py runs it against a daemon.
func TestAsk(t *testing.T) {
	if socket := os.Getenv("COLIBRI_SOCKET"); socket != "" {
		ask(socket)
	}
}
