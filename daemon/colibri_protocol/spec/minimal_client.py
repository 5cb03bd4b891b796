import socket
import struct
import sys

import msgpack


def generate(path, prompt, max_tokens):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        stream = sock.makefile("rb")

        def send(kind, request, body):
            payload = msgpack.packb([kind, request, body])
            sock.sendall(struct.pack(">I", len(payload)) + payload)

        send(1, 0, {"proto_min": 1, "proto_max": 1})  # HELLO
        send(3, 1, {"tokens": struct.pack(f"<{len(prompt)}I", *prompt), "max_tokens": max_tokens})  # GENERATE
        while header := stream.read(4):
            kind, request, body = msgpack.unpackb(stream.read(struct.unpack(">I", header)[0]), strict_map_key=False)
            if kind == 5:  # TOKENS
                yield from struct.unpack(f"<{len(body['ids']) // 4}I", body["ids"])
            elif kind == 6:  # DONE
                break
            elif kind == 7:  # ERROR
                raise RuntimeError(f"{body['code']}: {body['message']}")
            elif kind == 10:  # PING
                send(11, request, {"data": body.get("data", b"")})
        stream.close()


if __name__ == "__main__":
    for token in generate(sys.argv[1], [int(token) for token in sys.argv[2:]], 16):
        print(token, flush=True)
