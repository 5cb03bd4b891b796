"""Small parts by themselves: health and its age, the table of numbers, channels."""

from __future__ import annotations

import asyncio
import socket

import pytest
from colibri_daemon.common.counters import Counters
from colibri_daemon.common.metrics import Source
from colibri_daemon.dispatcher.channel import Channel, Outbox
from colibri_daemon.dispatcher.health import STALE_SECONDS, HealthBoard
from colibri_daemon.dispatcher.stats import Stats
from colibri_protocol.errors import Code, ConnectionFault, InvalidMessage
from dispatched import SECONDS, on_uvloop, until

READY = {"ready": True, "state": "ready", "reason": "", "workers": [{"slot": 0, "up": True}]}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_news_that_are_old_mean_not_ready() -> None:
    clock = Clock()
    board = HealthBoard(clock)
    board.update(READY)
    clock.now += STALE_SECONDS - 0.5
    assert (board.reply().ready, board.reply().age_ms) == (True, 1500)
    clock.now += 1
    assert (board.reply().ready, board.reply().live, board.reply().state) == (False, True, "ready")
    assert "2.5 s" in board.reply().reason


def test_news_that_make_no_sense_are_no_news() -> None:
    clock = Clock()
    board = HealthBoard(clock)
    board.update(READY)
    clock.now += 1
    board.update({"ready": "yes"})
    assert (board.reply().state, board.reply().age_ms) == ("ready", 1000)


def test_draining_is_not_ready_and_failed_is_for_good() -> None:
    board = HealthBoard(Clock())
    board.update(READY)
    assert board.failed() is None
    board.draining = True
    assert (board.reply().ready, board.reply().state) == (False, "draining")
    board.update({"ready": False, "state": "failed", "reason": ""})
    assert board.failed() == "loading failed"


def test_every_number_starts_at_0_and_fits_into_an_answer() -> None:
    stats = Stats(Counters.private(Source.DISPATCHER))
    assert set(stats.numbers().values()) == {0}
    assert len(stats.numbers() | Counters.private(Source.KVPOOL).numbers()) <= 256  # what STATS_REPLY can carry
    for unknown in ({"name": "made_up"}, {"name": "connections_total", "result": "made up"}):
        with pytest.raises(KeyError):
            stats.add(**unknown)


@pytest.mark.parametrize("code", [code for code in Code if code != Code.INTERNAL])
def test_any_error_can_be_counted(code: Code) -> None:
    stats = Stats(Counters.private(Source.DISPATCHER))
    stats.refused(InvalidMessage(code, ""))
    stats.fault(ConnectionFault(code, ""))
    assert stats.numbers()[f'request_errors_total{{code="{code.name}"}}'] == 2


def test_what_a_dispatcher_took_with_it_has_ended() -> None:
    """Its page goes to the next one: what was started is what has ended, once nothing is live."""
    counters = Counters.private(Source.DISPATCHER)
    first = Stats(counters)
    for _ in range(5):
        first.started(10)
    first.finished("stop", None)
    first.finished("error", InvalidMessage(Code.INTERNAL, ""))
    for _ in range(2):  # each later one finds nothing to add
        numbers = Stats(counters).numbers()
        assert numbers["requests_started_total"] == 5
        assert numbers['request_success_total{finished_reason="error"}'] == 4
        assert numbers['request_success_total{finished_reason="stop"}'] == 1


class Owner:
    def __init__(self) -> None:
        self.got, self.ends, self.crowds = b"", [], 0  # type: ignore[var-annotated]

    def received(self, data: bytes) -> None:
        self.got += data

    def ended(self, error: OSError | None) -> None:
        self.ends.append(error)

    def crowded(self) -> None:
        self.crowds += 1


def channel(high: int = 1 << 20) -> tuple[Channel, Owner, socket.socket]:
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    owner = Owner()
    return Channel(Outbox(loop, loop.time), ours, owner, high), owner, theirs


@on_uvloop
async def test_a_turns_messages_go_out_in_one_write() -> None:
    made, _, peer = channel()
    with peer:
        peer.setblocking(False)
        for n in range(5):
            made.write(b"%d" % n)
        with pytest.raises(BlockingIOError):
            peer.recv(1)
        await until(lambda: not made.marked)
        assert peer.recv(100) == b"01234"
        made.close()


async def crowd(made: Channel, owner: Owner, size: int, times: int) -> bytes:
    """Writes messages of that size until the owner has heard so many times that they are a crowd; all of them."""
    sent = b""
    for n in range(1000):
        if owner.crowds >= times:
            return sent
        message = bytes([n % 251]) * size
        sent += message
        made.write(message)
        await until(lambda: not made.marked)
    raise AssertionError(f"{len(sent)} bytes were a crowd {owner.crowds} times, not {times}")


async def everything(peer: socket.socket) -> bytes:
    """To the end of input."""
    peer.setblocking(False)
    heard = b""
    while data := await asyncio.wait_for(asyncio.get_running_loop().sock_recv(peer, 1 << 16), SECONDS):
        heard += data
    return heard


@on_uvloop
async def test_what_the_kernel_does_not_take_goes_later_in_order() -> None:
    made, owner, peer = channel(high=1000)
    with peer:
        sent = await crowd(made, owner, 10_000, 3)
        assert made.buffered > 1000
        made.finish()
        assert await everything(peer) == sent
        assert made.closed
        assert owner.ends == []


@on_uvloop
async def test_only_whole_messages_are_dropped() -> None:
    made, owner, peer = channel(high=1000)
    with peer:
        await crowd(made, owner, 50_000, 5)
        made.drop_unsent()
        made.write(b"last words")
        made.finish()
        heard = await everything(peer)
        assert heard.endswith(b"last words")
        assert (len(heard) - len(b"last words")) % 50_000 == 0


@on_uvloop
async def test_the_end_of_input_and_then_a_broken_pipe() -> None:
    made, owner, peer = channel()
    peer.close()
    await until(lambda: owner.ends == [None])
    assert not made.closed
    made.write(b"x")
    await until(lambda: made.closed)
    assert [type(end) for end in owner.ends] == [type(None), BrokenPipeError]
    made.write(b"y")
    await until(lambda: not made.marked)
    assert len(owner.ends) == 2
