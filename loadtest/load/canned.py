"""A server that answers at once with a stream made beforehand, so that what is measured is the generator."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

MODELS = b'{"object":"list","data":[{"id":"canned","object":"model"}]}'
EVENT = b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" word"}]}\n\n'
END = b'data: {"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d}}\n\ndata: [DONE]\n\n'


@contextmanager
def serving(tokens: int) -> Iterator[str]:
    """The URL of a running one, in a process of its own. tokens: of each answer."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_main, args=(there, tokens), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        process.terminate()
        process.join()


def _main(pipe: Connection, tokens: int) -> None:
    asyncio.run(_serve(pipe, tokens))


async def _serve(pipe: Connection, tokens: int) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(line[15:]) for line in head.lower().split(b"\r\n")
                               if line.startswith(b"content-length:")), 0)  # fmt: skip
                await reader.readexactly(length)
                if head.startswith(b"GET"):
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                                 % (len(MODELS), MODELS))  # fmt: skip
                else:
                    for part in parts:  # one by one, as tokens come
                        writer.write(part)
                        await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    chunks = [EVENT] * tokens + [END % (64, tokens)]
    parts = [b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
             *(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks), b"0\r\n\r\n"]
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()
