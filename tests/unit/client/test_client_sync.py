"""The blocking client: threads, Ctrl-C, forks, the interpreter's exit."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from colibri_client import Client, errors
from colibri_protocol.messages import Bye, Cancel, Generate, Health, HealthReply, LimitInfo, Score, Scores
from fixtures.scripted_server import MODEL, Peer, Server, floats, never_done, oracle, serve, until

PROMPT = [1, 2, 3]


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.to_thread(function, *arguments)


async def test_stream_and_completion(path: Path) -> None:
    def use() -> None:
        with Client(path) as client:
            assert (client.path, client.model, client.server) == (str(path), MODEL, "scripted 1")
            assert client.limits.requests == 64
            stream = client.generate(PROMPT, max_tokens=3000, seed=4)
            assert list(stream) == oracle(PROMPT, 4, 3000)
            assert list(stream) == []
            assert (stream.result.finish_reason, stream.result.seed) == ("length", 4)
            assert client.complete(PROMPT, max_tokens=2000, seed=4).tokens == oracle(PROMPT, 4, 2000)
            assert 0 < client.ping() < 10

    async with Server(path, serve) as server:
        await in_thread(use)
        assert len(server.peers) == 1


async def test_the_other_calls(path: Path) -> None:
    async def script(peer: Peer) -> None:
        await peer.welcome()
        _, key = await peer.expect(Score)
        peer.send(Scores(index=1, logprobs=floats(-1.0, -2.0)), key)
        peer.done(key)
        _, key = await peer.expect(Health)
        peer.send(HealthReply(live=True, ready=True, state="ready"), key)
        await peer.expect(Bye)

    def use() -> None:
        with Client(path) as client:
            assert list(client.score(PROMPT)) == [-1.0, -2.0]
            assert client.health().state == "ready"

    async with Server(path, script):
        await in_thread(use)


def read_in_threads(path: Path, count: int, length: int) -> dict[int, list[int]]:
    """One stream per thread, by its seed."""
    results: dict[int, list[int]] = {}
    with Client(path) as client:

        def read(seed: int) -> None:
            results[seed] = list(client.generate(PROMPT, max_tokens=length, seed=seed))

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return results


async def test_many_threads_share_one_client(path: Path) -> None:
    async with Server(path, partial(serve, limits=LimitInfo(frame=1 << 20, requests=8, credit=32))) as server:
        results = await in_thread(read_in_threads, path, 12, 1500)
        assert results == {seed: oracle(PROMPT, seed, 1500) for seed in range(12)}
        assert len(server.peers) == 1


async def test_lost_connections_are_taken_up(path: Path) -> None:
    async with Server(path, *[partial(serve, dies_after=97)] * 6, serve) as server:
        results = await in_thread(read_in_threads, path, 4, 300)
        assert results == {seed: oracle(PROMPT, seed, 300) for seed in range(4)}
        assert len(server.peers) == 7


def leave_by_break(client: Client) -> None:
    for token in client.generate(PROMPT):
        if token.index == 5:
            break


def leave_the_block(client: Client) -> None:
    with client.generate(PROMPT) as stream:
        next(stream)
    assert list(stream) == []
    client.kept = stream  # type: ignore[attr-defined]


def leave_by_cancel(client: Client) -> None:
    stream = client.generate(PROMPT)
    assert [next(stream) for _ in range(10)] == list(range(10))
    stream.cancel()
    assert list(stream) == []
    assert stream.result.finish_reason == "abort"


def leave_by_timeout(client: Client) -> None:
    stream = client.generate(PROMPT, timeout=0.05)
    assert [next(stream) for _ in range(10)] == list(range(10))
    with pytest.raises(errors.TimeoutExceeded):
        next(stream)


def leave_a_completion_by_timeout(client: Client) -> None:
    with pytest.raises(errors.TimeoutExceeded):
        client.complete(PROMPT, timeout=0.05)


@pytest.mark.parametrize("leave", [leave_by_break, leave_the_block, leave_by_cancel, leave_by_timeout,
                                   leave_a_completion_by_timeout])
async def test_leaving_early_cancels(path: Path, leave: Callable[[Client], None]) -> None:
    async with Server(path, never_done) as server:
        client = await in_thread(Client, path)
        await in_thread(leave, client)
        await until(lambda: server.peers[0].count(Cancel) == 1)
        await in_thread(client.close)


async def test_errors_come_through(path: Path) -> None:
    def use() -> None:
        with pytest.raises(errors.ConnectionFailed, match="no socket here"):
            Client(path.with_name("other"))
        client = Client(path)
        with pytest.raises(errors.PromptEmpty):
            client.generate([])
        with pytest.raises(errors.InvalidArgument):
            client.complete(PROMPT, temperature=-1)
        stream = client.generate(PROMPT)
        assert [next(stream) for _ in range(10)] == list(range(10))
        client.close()
        client.close()
        with pytest.raises(errors.ClientClosed):
            next(stream)
        for call in (client.health, lambda: client.generate(PROMPT)):
            with pytest.raises(errors.ClientClosed):
                call()

    async with Server(path, never_done):
        await in_thread(use)


async def test_a_forgotten_client_ends_its_thread(path: Path) -> None:
    def use() -> None:
        client = Client(path)
        names = [thread.name for thread in threading.enumerate()]
        assert "colibri-client" in names
        stream = client.generate(PROMPT)
        del client
        gc.collect()
        assert next(stream) == 0  # which holds it
        stream.close()
        del stream
        gc.collect()

    async with Server(path, never_done) as server:
        await in_thread(use)
        await until(lambda: "colibri-client" not in [thread.name for thread in threading.enumerate()])
        assert server.peers[0].count(Cancel) == 1


# ---- in processes of their own ----


async def python(code: str, path: Path) -> asyncio.subprocess.Process:
    """Runs code with `client`, an open Client; warnings are errors."""
    start = f"from colibri_client import Client, errors\nclient = Client({str(path)!r})\n"
    return await asyncio.create_subprocess_exec(sys.executable, "-W", "error", "-X", "dev", "-c", start + code,
                                                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)


async def output(process: asyncio.subprocess.Process) -> tuple[str, str]:
    out, err = await asyncio.wait_for(process.communicate(), 30)
    return out.decode(), err.decode()


CTRL_C = {
    "waiting for a token": "for token in client.generate([1]):\n    print(token, flush=True)",
    "in a block": "with client.generate([1]) as stream:\n    for token in stream:\n        print(token, flush=True)",
    "waiting for a completion": "print(*range(10), sep='\\n', flush=True)\nclient.complete([1])",
}


@pytest.mark.parametrize("code", CTRL_C)
async def test_ctrl_c_cancels(path: Path, code: str) -> None:
    caught = "\n".join("    " + line for line in CTRL_C[code].splitlines())
    code = f"try:\n{caught}\nexcept KeyboardInterrupt:\n    print('stopped', client.ping() > 0)\nclient.close()\n"
    async with Server(path, never_done) as server:
        process = await python(code, path)
        assert process.stdout is not None
        for index in range(10):
            assert int(await process.stdout.readline()) == index
        await until(lambda: server.peers and server.peers[0].count(Generate))
        process.send_signal(signal.SIGINT)
        await until(lambda: server.peers[0].count(Cancel) == 1)
        assert await output(process) == ("stopped True\n", "")


@pytest.mark.parametrize("end", ["", "import sys; sys.exit(0)", "stream.cancel()", "client.close()"])
async def test_leaving_the_interpreter_in_mid_stream(path: Path, end: str) -> None:
    async with Server(path, never_done):
        process = await python(f"stream = client.generate([1])\nprint(next(stream))\n{end}", path)
        assert await output(process) == ("0\n", "")
        assert process.returncode == 0


async def test_a_client_does_not_survive_a_fork(path: Path) -> None:
    code = """
import os
stream = client.generate([1])
next(stream)
pid = os.fork()
if pid == 0:
    for call in (lambda: client.health(), lambda: client.generate([1]), lambda: [next(stream) for _ in range(99)]):
        try:
            call()
        except errors.ClientClosed as e:
            print(e, flush=True)
    client.close()
    raise SystemExit(0)
assert os.waitpid(pid, 0)[1] == 0
print(next(stream), client.ping() > 0)
stream.cancel()
client.close()
"""
    async with Server(path, never_done):
        out, err = await output(await python(code, path))
    assert err == ""
    assert out.count("belongs to the parent process; make one here") == 3
    assert out.endswith("1 True\n")
