"""The worker's loop: takes messages between steps, computes one step after another, tells of each in one message.

With nothing to compute, or with a dispatcher that does not read, it sleeps until a descriptor says something, and turns
all the same twice a second to show that it can. Requests join, leave and pause between any two steps; what becomes of
one never changes another's tokens. A dispatcher that ends takes its requests with it; the supervisor then sends the
link to the next one, and the model stays loaded. No step waits for the KV pool: a request joins when that has answered,
and one without a slab for its next token sits out.
"""

from __future__ import annotations

import select
import socket
import time
from array import array
from collections.abc import Collection
from typing import Any

from colibri_engine import Engine
from colibri_engine.batch import Batch, Lane
from colibri_protocol.errors import Code

from ..common import ipc, log
from ..common.counters import Counters
from ..common.exit_codes import Exit
from ..common.job import Job
from ..common.link import Link
from ..common.metrics import Source
from ..common.pages import MAX_KEYS, Field, Page
from .meter import Meter
from .neighbours import begun, coming
from .pool_kv import PoolKv
from .request import Request, Row, failed
from .scheduler import Plan, Scheduler

MOMENT = 0.05  # share of a step that the next one waits for newcomers
TELL_NS = 1_000_000  # steps shorter than this share a message: each one wakes the dispatcher and its clients
IDLE_MS = 500  # longest sleep: whoever beats less often is taken for stopped (supervisor/health.py)
FULL_BYTES = 1 << 20  # output that the dispatcher has not read from which the worker waits instead of making more
_log = log.get("requests")


class Loop:
    """One worker's requests. Single-threaded; all state is between two steps when a message is handled."""

    def __init__(self, engine: Engine, batch: Batch, kv: PoolKv, link: Link, control: socket.socket,
                 stop: socket.socket, page: Page, scheduler: Scheduler[Lane], greeting: list[Any]) -> None:
        """control ends the loop at its end of file, stop when it is readable. greeting: said first on every link."""
        self._engine, self._batch, self._kv, self._link, self._greeting = engine, batch, kv, link, greeting
        self._control, self._stop, self._page, self._scheduler = control, stop, page, scheduler
        routes = engine.info.layers * engine.info.top_k
        self._meter = Meter(Counters(page.counters, Source.WORKER), routes)
        self._slab_tokens = engine.info.slab_tokens
        kv.listener = self
        self._requests: dict[int, Request] = {}
        self._fresh: list[Request] = []  # that the pool was asked about since the last step
        self._placed: dict[int, Request] = {}  # that have their place in the KV cache and are not in the batch yet
        self._step_ns = 0
        self._rows: list[Row] = []  # to be told
        self._computed = self._busy_ns = self._told_ns = 0  # rows and time of steps not told; when was told last
        self._steps = self._misses = self._arrivals = 0
        self._starved = False  # nothing can be computed before the pool says something
        self._keys = array("Q")  # as in the page
        self._page_keys = page.memory.cast("Q")[Field.KEYS : Field.KEYS + MAX_KEYS]
        self._watched: set[Link] = set()  # that have output to send
        self._poll = select.poll()
        for source in (link.sock, control, stop):
            self._poll.register(source, select.POLLIN)

    def run(self) -> Exit:
        """Until told to stop, or until the supervisor is gone; then the links are closed."""
        page = self._page
        self._link.send(self._greeting)
        while True:
            page[Field.BEAT_NS] = time.monotonic_ns()
            self._admit()
            self._meter.show(len(self._requests), self._kv.leased)
            page[Field.BUSY] = runnable = 0 if self._starved or self._full else len(self._scheduler.running)
            if not runnable:
                self._prefetch()
            if self._receive(wait=not (runnable or self._rows)):
                self._link.close()
                self._drop_pool()
                return Exit.STOPPED
            if self._rows and not runnable:
                self._report()
            if self._scheduler.running and not self._full:
                self._await_places()
                self._step()

    @property
    def _full(self) -> bool:
        return self._link.unsent >= FULL_BYTES

    # ---- messages ----

    def _receive(self, wait: bool) -> bool:
        """Handles what has come. True if the worker is to end."""
        self._watch(self._link)
        if self._kv.link is not None:
            self._kv.flush()
            self._watch(self._kv.link)
        for fd, events in self._poll.poll(IDLE_MS if wait else 0):
            if fd == self._stop.fileno() or (fd == self._control.fileno() and self._supervisor_gone()):
                return True
            if fd == self._link.sock.fileno():
                self._serve_link(events)
            elif self._kv.link is not None and fd == self._kv.link.sock.fileno():
                self._serve_pool(events)
        return False

    def _watch(self, link: Link) -> None:
        """Wants to know when there is room, if there is something to send."""
        if not link.closed and (link in self._watched) != bool(link.unsent):
            self._watched ^= {link}
            self._poll.modify(link.sock, select.POLLIN | (select.POLLOUT if link.unsent else 0))

    def _supervisor_gone(self) -> bool:
        """Handles what the supervisor says; whether it has ended."""
        try:
            while (packet := ipc.receive_control(self._control)) is not None:
                self._obey(*packet)
            return True
        except BlockingIOError:
            return False
        except (OSError, ValueError):  # it ended with messages of ours unread, or it is not our supervisor
            return True

    def _obey(self, message: dict[str, Any], fds: list[int]) -> None:
        match message:
            case {"t": "link"} if fds:
                self._change_link(fds[0])
            case {"t": "pool", "slot": slot, "epoch": epoch} if fds:
                self._drop_pool()
                link = self._open(fds[0])
                self._kv.connect(link, slot, epoch)
            case {"t": "log_level", "level": level}:
                log.set_level(level)

    def _open(self, fd: int) -> Link:
        sock = socket.socket(fileno=fd)
        sock.setblocking(False)
        self._poll.register(sock, select.POLLIN)
        return Link(sock)

    def _close(self, link: Link) -> None:
        self._poll.unregister(link.sock)
        self._watched.discard(link)
        link.close()

    def _change_link(self, fd: int) -> None:
        """To a new dispatcher; what the old one wanted is forgotten."""
        self._drop_link()
        self._link = self._open(fd)
        self._link.send(self._greeting)

    def _drop_link(self) -> None:
        if self._link.sock.fileno() < 0:
            return
        self._close(self._link)
        for request in list(self._requests.values()):
            self._leave(request, None)
        self._rows.clear()

    def _serve_link(self, events: int) -> None:
        if events & select.POLLOUT:
            self._link.flush()
        if events & ~select.POLLOUT:
            for tag, key, *body in self._link.receive():
                _HANDLERS[tag](self, key, *body)
            self._prefetch()
        if self._link.closed:
            self._drop_link()

    def _serve_pool(self, events: int) -> None:
        link = self._kv.link
        assert link is not None  # noqa: S101 - by _receive()
        if events & select.POLLOUT:
            link.flush()
        if events & ~select.POLLOUT:
            self._kv.receive()
        if link.closed:
            self._drop_pool()

    def _await_places(self) -> None:
        """Gives the pool a moment, at most MOMENT of the last step, to say where newcomers have their places: then they
        join the next step and not the one after."""
        until = time.monotonic() + MOMENT * self._step_ns / 1e9
        fresh, self._fresh = self._fresh, []
        while any(request.key in self._requests and not request.attached and request.key not in self._placed
                  for request in fresh):  # fmt: skip
            self._kv.flush()
            left = until - time.monotonic()
            if self._kv.link is None or left <= 0 or not select.select([self._kv.link.sock], [], [], left)[0]:
                return
            self._serve_pool(select.POLLIN)

    def _drop_pool(self) -> None:
        """Goes on with what is here until the supervisor sends the next link."""
        if self._kv.link is not None:
            self._close(self._kv.link)
            self._kv.disconnect()

    # ---- what the dispatcher wants ----

    def _assign(self, key: int, body: dict[str, Any]) -> None:
        self._arrivals += 1
        try:
            request = Request(key, Job.from_wire(body), self._engine.info, self._engine.max_context, self._arrivals)
        except (ValueError, TypeError) as e:
            _log.warning("request failed", key=key, code=Code.INVALID_ARGUMENT.name, reason=str(e),
                         **{name: body[name] for name in ("trace", "request_id") if name in body})
            self._rows.append(failed(key, Code.INVALID_ARGUMENT, str(e), 0))
            return
        if request.finished:
            self._rows.append(request.end())
            return
        self._requests[key] = request
        self._fresh.append(request)
        self._kv.attach(request.lane, request.salt, request.cache)

    def _cancel(self, key: int, finish: str) -> None:
        if request := self._requests.get(key):
            self._leave(request, request.end(finish))

    def _preempt(self, key: int) -> None:
        if request := self._requests.get(key):
            self._leave(request, request.preempt())

    def _pause(self, key: int) -> None:
        if request := self._requests.get(key):
            request.paused = True
            self._hold_back(request)

    def _resume(self, key: int) -> None:
        if request := self._requests.get(key):
            request.paused = False
            self._scheduler.resume(request.lane)

    def _hold_back(self, request: Request) -> None:
        if request.is_held_back:
            self._scheduler.pause(request.lane)

    def _leave(self, request: Request, row: Row | None) -> None:
        """The request ends here, with this row."""
        self._note(request, row)
        if row is not None:
            self._rows.append(row)
        del self._requests[request.key]
        self._placed.pop(request.key, None)
        self._meter.left(request.key)
        if request.attached:
            self._scheduler.finish(request.lane)
        self._kv.release(request.key)

    @staticmethod
    def _note(request: Request, row: Row | None) -> None:
        """The request's line in the log. What the dispatcher logs has times, and whose they are is told by the key."""
        error = (row[2] or {}).get("error") if row is not None else None
        if error is None:
            _log.debug("request left", **request.about)
        else:
            _log.warning("request failed", code=Code(error[0]).name, reason=error[1], **request.about)

    # ---- what the pool says ----

    def attached(self, key: int, position: int, slabs: list[tuple[int, int]]) -> None:
        request = self._requests[key]
        if request.doubts:
            _log.warning("request is computed again", cached=position, **request.about)
        request.lane.start(position, slabs)
        self._placed[key] = request

    def hidden(self, key: int, ordinals: list[int]) -> None:
        for ordinal in ordinals:
            self._requests[key].lane.drop_slab(ordinal)

    def damaged(self, key: int, slabs: Collection[int]) -> None:
        self._begin_again(self._requests[key], slabs)

    def _begin_again(self, request: Request, bad: Collection[int]) -> None:
        """Behind what can be trusted. bad: as in damaged()."""
        self._placed.pop(request.key, None)
        if request.attached:
            self._scheduler.finish(request.lane)
            request.rewind()
        self._kv.attach_again(request.lane, request.salt, request.cache, bad, request.doubts)

    def suspected(self, key: int, position: int) -> None:
        self._requests[key].lane.redo(position)

    def _prefetch(self) -> None:
        """Asks for slabs before they are needed."""
        scheduler = self._scheduler
        targets = [request.lane.target for request in self._requests.values() if not request.attached]
        self._kv.want(scheduler.wanted(targets), spare=len(scheduler.running))

    # ---- steps ----

    def _admit(self) -> None:
        """Those with a place join the batch, unless a neighbour is about to compute what they can copy then."""
        for key, request in list(self._placed.items()):
            if coming(request, [self._requests[lane.id] for lane in self._scheduler.running]):
                continue
            del self._placed[key]
            if self._kv.free and (found := begun(request, self._requests.values())):
                self._kv.copy(request.lane, *found)
            request.begin(request.lane.position)
            self._scheduler.admit(request.lane, request.arrival, request.owner)
            self._hold_back(request)

    def _step(self) -> None:
        self._admit()
        plan = self._scheduler.plan(self._kv.free)
        self._misses += plan.missed
        self._meter.missed(plan.missed)
        self._starved = not plan.work
        if plan.work:
            plan.work.sort(key=_first_slab)  # attention reads once what neighbours share
            self._compute(plan)

    def _compute(self, plan: Plan[Lane]) -> None:
        slab_tokens, begin = self._slab_tokens, time.monotonic_ns()
        grown = []  # lanes that will have filled a slab
        rows = 0
        for lane, count in plan.work:
            rows += count
            end = lane.position + count
            if end > lane.n_slabs * slab_tokens:
                self._kv.take(lane, -(-end // slab_tokens) - lane.n_slabs)
            if end // slab_tokens > lane.position // slab_tokens:
                grown.append(lane)
        self._prefetch()
        self._kv.flush()
        self._show_keys(plan)
        self._meter.begin(plan.work)
        outcomes = self._batch.run(plan.work)
        self._steps += 1
        self._page[Field.STEPS] = self._steps
        self._page[Field.KEYS] = 0
        for (lane, _), outcome in zip(plan.work, outcomes, strict=True):
            if outcome is not None:
                self._take(self._requests[lane.id], outcome)
        now = time.monotonic_ns()
        self._step_ns = now - begin
        self._scheduler.took(self._step_ns / 1e9)
        self._computed += rows
        self._busy_ns += now - begin
        self._meter.end(rows, (now - begin) / 1e9)
        if grown or now - self._told_ns >= TELL_NS:
            self._report()
        for lane in grown:  # tokens are sent before their slab is committed
            if lane.id in self._requests:
                self._kv.commit(lane)

    def _show_keys(self, plan: Plan[Lane]) -> None:
        """Who is to blame if this step ends the process."""
        keys = array("Q", [lane.id for lane, _ in plan.work[:MAX_KEYS]])
        if keys != self._keys:
            self._keys = keys
            self._page_keys[: len(keys)] = memoryview(keys)
            if len(keys) < MAX_KEYS:
                self._page_keys[len(keys)] = 0
        self._page_keys[0] = keys[0]

    def _take(self, request: Request, outcome: Any) -> None:
        if request.doubt(outcome):
            return self._begin_again(request, ())
        row = request.take(outcome)
        if request.finished:
            self._kv.commit(request.lane)  # leaves with the next flush, after the row
            self._leave(request, row)
            return
        if row is not None:
            self._rows.append(row)
        self._hold_back(request)

    def _report(self) -> None:
        free = self._kv.free
        self._page[Field.FREE_SLABS] = free
        message = [ipc.STEP, self._steps, self._rows, {"free": free, "rows": self._computed,
                   "us": self._busy_ns // 1000, "misses": self._misses}]  # fmt: skip
        self._rows, self._computed, self._busy_ns, self._told_ns = [], 0, 0, time.monotonic_ns()
        self._link.send(message)


def _first_slab(entry: tuple[Lane, int]) -> int:
    return entry[0].first_slab


_HANDLERS = {ipc.ASSIGN: Loop._assign, ipc.CANCEL: Loop._cancel, ipc.PREEMPT: Loop._preempt, ipc.PAUSE: Loop._pause,
             ipc.RESUME: Loop._resume}  # fmt: skip
