package unixsock

import (
	"fmt"
	"net"
	"os"

	colibri "colibri/client/go"
)

// Echo listens until the program ends, on a socket without a file, and answers each request with its prompt: the daemon
// of the examples.
func Echo() (path string) {
	path = fmt.Sprintf("@colibri-example-%d", os.Getpid())
	listener, err := net.Listen("unix", path)
	if err != nil {
		panic(err)
	}
	go func() {
		for conn, err := listener.Accept(); err == nil; conn, err = listener.Accept() {
			go greeting(echo)(&peer{conn: conn, frames: colibri.NewFrameReader(conn, colibri.MaxFrame)})
		}
	}()
	return path
}
