// Package serve is how the gateway meets the outside: listening, TLS, and stopping without cutting anybody off.
package serve

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// Listen opens what an address names: host:port, unix:PATH, or systemd, the socket that systemd passed. mode is the
// file mode of a Unix socket.
func Listen(address string, mode os.FileMode) (net.Listener, error) {
	listener, err := open(address, mode)
	if err != nil {
		return nil, err
	}
	return Bounded(listener), nil
}

// Bounded makes a listener whose connections hold little that was not read. The kernel would let a stream that nobody
// reads grow to megabytes.
func Bounded(l net.Listener) net.Listener { return bounded{l} }

type bounded struct{ net.Listener }

const sendBuffer = 64 << 10

func (b bounded) Accept() (net.Conn, error) {
	conn, err := b.Listener.Accept()
	if c, ok := conn.(interface{ SetWriteBuffer(int) error }); ok {
		_ = c.SetWriteBuffer(sendBuffer) // a connection that has ended already says so when it is read
	}
	return conn, err
}

func open(address string, mode os.FileMode) (net.Listener, error) {
	if address == "systemd" {
		return inherited(0)
	}
	path, isUnix := strings.CutPrefix(address, "unix:")
	if !isUnix {
		return net.Listen("tcp", address)
	}
	if err := clear(path); err != nil {
		return nil, err
	}
	// The socket must not be there with another mode, however briefly.
	old := syscall.Umask(int(0o777 &^ mode))
	defer syscall.Umask(old)
	listener, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	return listener, os.Chmod(path, mode)
}

// clear removes a socket that nobody answers on; anything else at path is somebody's.
func clear(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode().Type() != os.ModeSocket {
		return fmt.Errorf("%s exists and is not a socket; remove it or listen elsewhere", path)
	}
	if conn, err := net.Dial("unix", path); err == nil {
		conn.Close()
		return fmt.Errorf("%s is in use by another process", path)
	} else if !errors.Is(err, syscall.ECONNREFUSED) {
		return err
	}
	return os.Remove(path)
}

// inherited is the n-th socket from systemd (sd_listen_fds(3)).
func inherited(n int) (net.Listener, error) {
	const first = 3
	count, _ := strconv.Atoi(os.Getenv("LISTEN_FDS"))
	if pid, _ := strconv.Atoi(os.Getenv("LISTEN_PID")); pid != os.Getpid() || n >= count {
		return nil, errors.New("systemd passed no socket: is there a .socket unit for this service?")
	}
	file := os.NewFile(uintptr(first+n), "systemd")
	defer file.Close()
	return net.FileListener(file)
}
