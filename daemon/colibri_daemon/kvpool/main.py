"""The pool's process: takes the arena's pages, makes the pool from what its journal knows, serves its peers.

It may be killed at any moment, and that is how it ends when it is asked to: what counts is in the journal and in the
workers' hands. One thread around poll(2): there are few peers, and their messages are short.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

from ..common import ipc, log
from ..common.arena import Arena
from ..common.counters import Counters
from ..common.exit_codes import Exit
from ..common.facts import ModelFacts
from ..common.link import Link
from ..common.metrics import Source
from ..common.pages import Field, Page, State
from ..common.settings import Settings
from .journal import Journal
from .messages import WorkerId
from .pool import Pool
from .server import Peer, Server

TURN_SECONDS = 0.5  # at least so often the loop turns, to show that it does
UNSENT_BYTES = 64 << 20  # a peer that has so much to read does not read at all
_log = log.get("kvpool")


def run(control: socket.socket, page: Page, settings: Settings, facts: ModelFacts, arena: Arena, journal: int) -> int:
    """The process's exit code. control is non-blocking; page is this process's own. journal: descriptor of memory that
    the supervisor keeps, empty at first."""
    page[Field.STATE], page[Field.SLABS] = State.LOADING, arena.slabs
    peers = _peers(control)
    if peers is None:
        return Exit.STOPPED
    usable = peers.get("usable", arena.slabs)
    try:
        _reserve(arena, usable, page)
        memory = _map(journal, Journal.size(arena.slabs, arena.slab_tokens))
    except (OSError, ValueError) as e:
        reason = f"the KV cache of {arena.size >> 20} MiB cannot be had: {e}; lower kv_bytes"
        _log.error("no memory", reason=reason)
        ipc.send_control(control, {"t": "failed", "reason": reason})
        return Exit.CANNOT_LOAD
    workers = [(slot, epoch) for slot, epoch in peers["workers"]]
    begun = time.monotonic()
    book = Journal(memory, arena.slabs, arena.slab_tokens, identity(facts))
    if reason := book.why_not():
        _log.warning("the journal is not used, the KV cache begins empty", reason=reason)
    pool = Pool(arena.slabs, arena.slab_tokens, settings.kv_eviction, identity(facts), book, workers, begun,
                usable=usable, counters=Counters(page.counters, Source.KVPOOL))  # fmt: skip
    _log.info("pool ready", **pool.counts(), settling=len(workers), ms=round(1000 * (time.monotonic() - begun), 1))
    server = Server(pool, arena.geometry, begun, settings.hang_seconds)
    if (fault := peers.get("fault")) is not None:
        server.missed(fault)
    return Loop(control, page, server, arena, usable).run()


def identity(facts: ModelFacts) -> bytes:
    """What decides, with the tokens, which bytes are in a slab."""
    return "\0".join((facts.id, facts.fingerprint, facts.kv_format)).encode()


def _reserve(arena: Arena, slabs: int, page: Page) -> None:
    page[Field.TO_LOAD] = slabs * arena.slab_bytes

    def advance(done: int) -> None:
        page[Field.LOADED] = done
        page[Field.PROGRESS] += 1

    arena.reserve(advance, slabs)


def _map(journal: int, size: int) -> memoryview:
    if os.fstat(journal).st_size != size:
        os.ftruncate(journal, size)
        os.posix_fallocate(journal, 0, size)
    return memoryview(mmap.mmap(journal, size))


def _peers(control: socket.socket) -> dict[str, Any] | None:
    """The supervisor's first words. None if it has ended."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.poll()
    packet = ipc.receive_control(control)
    return None if packet is None else packet[0]


class Loop:
    """Links to the peers and what goes over them; the arena's pages. usable: slabs that have them."""

    def __init__(self, control: socket.socket, page: Page, server: Server, arena: Arena, usable: int) -> None:
        self._control, self._page, self._server = control, page, server
        self._arena, self._usable, self._goal = arena, usable, usable
        self._links: dict[Peer, Link] = {}
        self._peers: dict[int, Peer] = {}  # by descriptor
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def run(self) -> Exit:
        """Until the supervisor is gone."""
        page = self._page
        page[Field.STATE] = State.READY
        ipc.send_control(self._control, {"t": "ready"})
        while True:
            page[Field.PROGRESS] += 1
            page[Field.BEAT_NS] = time.monotonic_ns()
            for fd, events in self._poll.poll(self._timeout()):
                if fd != self._control.fileno():
                    self._serve(fd, events)
            # After the peers: whoever attaches because a worker is dead was told so after us.
            if self._supervisor_gone():
                return Exit.STOPPED
            for worker in self._server.killed:
                self._hear_out(worker)
            self._grow()
            self._arena.give_back(self._server.turn(time.monotonic()))
            self._send()

    def _timeout(self) -> int:
        """Milliseconds, rounded up."""
        if self._usable < self._goal:
            return 0
        wait = max(0.0, min(TURN_SECONDS, self._server.due - time.monotonic()))
        return -int(-1000 * wait // 1)

    def _grow(self) -> None:
        """A slice of what may be used from now on, if there is something."""
        if self._usable >= self._goal:
            return
        try:
            self._usable = self._arena.extend(self._usable, self._goal)
        except OSError as e:
            _log.error("no memory for all of the KV cache, it stays smaller", slabs=self._usable, error=str(e))
            self._goal = self._usable
        self._server.grow(self._usable)

    # ---- the supervisor ----

    def _supervisor_gone(self) -> bool:
        """Handles what it says; whether it has ended."""
        try:
            while (packet := ipc.receive_control(self._control)) is not None:
                self._handle(*packet)
        except BlockingIOError:
            return False
        except OSError:  # it ended with messages of ours unread
            pass
        return True

    def _handle(self, message: dict[str, Any], fds: list[int]) -> None:
        match message:
            case {"t": "peer", "kind": "worker", "slot": slot, "epoch": epoch} if fds:
                self._introduce((slot, epoch), fds[0])
            case {"t": "peer", "kind": "dispatcher"} if fds:
                self._introduce(None, fds[0])
            case {"t": "dead", "slot": slot, "epoch": epoch, "fault": fault}:
                self._bury((slot, epoch), fault)
            case {"t": "usable", "slabs": int(slabs)}:
                self._goal = max(self._goal, min(slabs, self._arena.slabs))
            case {"t": "retire"}:
                self._server.retire()
            case {"t": "log_level", "level": level}:
                log.set_level(level)
            case _:
                _log.error("unexpected message", message=str(message), descriptors=len(fds))

    def _introduce(self, peer: Peer, fd: int) -> None:
        self._hear_out(peer)  # an earlier dispatcher
        link = Link(socket.socket(fileno=fd))
        link.sock.setblocking(False)
        self._links[peer], self._peers[fd] = link, peer
        self._poll.register(fd, select.POLLIN)
        self._server.introduce(peer)

    def _bury(self, worker: WorkerId, fault: bool) -> None:
        """The process is reaped; what it had said before counts."""
        self._hear_out(worker)
        self._server.dead(worker, fault, time.monotonic())

    # ---- the peers ----

    def _serve(self, fd: int, events: int) -> None:
        peer = self._peers.get(fd)
        link = self._links.get(peer)
        if link is None or link.sock.fileno() != fd:  # closed earlier in this turn
            return
        if events & select.POLLOUT:
            link.flush()
            self._watch(link)
        if events & ~select.POLLOUT:
            self._hear(peer, link.receive())
        if link.closed:
            self._lose(peer)

    def _hear(self, peer: Peer, messages: Iterator[Any]) -> None:
        now, end = time.monotonic(), object()
        while True:
            try:
                message = next(messages, end)
            except ValueError as e:
                return self._server.refuse(peer, str(e))
            if message is end:
                return
            self._server.hear(peer, message, now)

    def _hear_out(self, peer: Peer) -> None:
        """All that is left on a link into which nothing more comes."""
        if (link := self._links.get(peer)) is not None:
            self._hear(peer, link.receive_all())
            self._lose(peer)

    def _lose(self, peer: Peer) -> None:
        self._close(peer)
        self._server.lose(peer, time.monotonic())

    def _close(self, peer: Peer) -> None:
        if (link := self._links.pop(peer, None)) is not None:
            self._poll.unregister(link.sock)
            del self._peers[link.sock.fileno()]
            link.close()

    # ---- what is to be sent ----

    def _send(self) -> None:
        server = self._server
        out, server.out = server.out, []
        messages: dict[Peer, list[Any]] = {}
        for peer, message in out:
            messages.setdefault(peer, []).append(message)
        for peer, said in messages.items():
            if (link := self._links.get(peer)) is None:
                continue
            link.send(*said)
            if link.unsent:
                self._watch(link)
                if link.unsent > UNSENT_BYTES:
                    server.refuse(peer, f"leaves {link.unsent} bytes unread")
        self._order()

    def _order(self) -> None:
        orders = self._server.orders
        while orders:
            if orders[0]["t"] == "kill":
                self._close(None if orders[0]["kind"] == "dispatcher" else (orders[0]["slot"], orders[0]["epoch"]))
            if not ipc.send_control(self._control, orders[0]):
                return  # it is behind with its reading: in the next turn
            del orders[0]

    def _watch(self, link: Link) -> None:
        """Wants to know when the peer has room, if there is something to send."""
        self._poll.modify(link.sock, select.POLLIN | (select.POLLOUT if link.unsent else 0))
