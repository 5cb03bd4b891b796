"""The worker's loop: takes messages between steps, computes one step after another, tells of each in one message.

With nothing to compute, or with a dispatcher that does not read, it sleeps until a descriptor says something. Requests
join, leave and pause between any two steps; what becomes of one never changes another's tokens. A dispatcher that ends
takes its requests with it; the supervisor then sends the link to the next one, and the model stays loaded.
"""

from __future__ import annotations

import select
import socket
import time
from array import array
from typing import Any

from colibri_engine import Engine
from colibri_engine.batch import Batch, Lane
from colibri_protocol.errors import Code

from ..common import ipc
from ..common.exit_codes import Exit
from ..common.job import Job
from ..common.pages import MAX_KEYS, Field, Page
from .kv import Kv
from .link import Link
from .request import Request, Row, failed
from .scheduler import Plan, Scheduler


class Loop:
    """One worker's requests. Single-threaded; all state is between two steps when a message is handled."""

    def __init__(self, engine: Engine, batch: Batch, kv: Kv, link: Link, control: socket.socket, stop: socket.socket,
                 page: Page, scheduler: Scheduler[Lane], greeting: list[Any]) -> None:
        """control ends the loop at its end of file, stop when it is readable. greeting: said first on every link."""
        self._engine, self._batch, self._kv, self._link, self._greeting = engine, batch, kv, link, greeting
        self._control, self._stop, self._page = control, stop, page
        self._slab_tokens, self._scheduler = engine.info.slab_tokens, scheduler
        self._requests: dict[int, Request] = {}
        self._rows: list[Row] = []  # to be told
        self._steps = 0
        self._keys = array("Q")  # as in the page
        self._page_keys = page.memory.cast("Q")[Field.KEYS : Field.KEYS + MAX_KEYS]
        self._poll = select.poll()
        for source in (link.sock, control, stop):
            self._poll.register(source, select.POLLIN)
        self._watching_output = False

    def run(self) -> Exit:
        """Until told to stop, or until the supervisor is gone; then the link is closed."""
        page = self._page
        self._link.send(self._greeting)
        while True:
            page[Field.BEAT_NS] = time.monotonic_ns()
            page[Field.BUSY] = runnable = 0 if self._link.full else len(self._scheduler.running)
            if self._receive(wait=not (runnable or self._rows)):
                self._link.sock.close()
                return Exit.STOPPED
            if self._rows:
                self._report(0, 0)  # what ended without a step does not wait for the next one
            if self._scheduler.running and not self._link.full:
                self._step()

    # ---- messages ----

    def _receive(self, wait: bool) -> bool:
        """Handles what has come. True if the worker is to end."""
        if self._watching_output != bool(self._link.unsent) and not self._link.closed:
            self._watching_output = bool(self._link.unsent)
            events = select.POLLIN | (select.POLLOUT if self._watching_output else 0)
            self._poll.modify(self._link.sock, events)
        for fd, events in self._poll.poll(None if wait else 0):
            if fd == self._stop.fileno() or (fd == self._control.fileno() and self._supervisor_gone()):
                return True
            if fd == self._link.sock.fileno():
                self._serve_link(events)
        return False

    def _supervisor_gone(self) -> bool:
        """Handles what the supervisor says; whether it has ended."""
        try:
            while (packet := ipc.receive_control(self._control)) is not None:
                message, fds = packet
                if message.get("t") == "link" and len(fds) == 1:
                    self._change_link(Link(socket.socket(fileno=fds[0])))
            return True
        except BlockingIOError:
            return False
        except (OSError, ValueError):  # it ended with messages of ours unread, or it is not our supervisor
            return True

    def _change_link(self, link: Link) -> None:
        """To a new dispatcher; what the old one wanted is forgotten."""
        self._drop_link()
        self._link, self._watching_output = link, False
        link.sock.setblocking(False)
        self._poll.register(link.sock, select.POLLIN)
        link.send(self._greeting)

    def _drop_link(self) -> None:
        if self._link.sock.fileno() < 0:
            return
        self._poll.unregister(self._link.sock)
        self._link.sock.close()
        for request in list(self._requests.values()):
            self._leave(request, None)
        self._rows.clear()

    def _serve_link(self, events: int) -> None:
        if events & select.POLLOUT:
            self._link.flush()
        if events & ~select.POLLOUT:
            for tag, key, *body in self._link.receive():
                _HANDLERS[tag](self, key, *body)
        if self._link.closed:
            self._drop_link()

    def _assign(self, key: int, body: dict[str, Any]) -> None:
        try:
            request = Request(key, Job.from_wire(body), self._engine.info, self._engine.max_context)
        except (ValueError, TypeError) as e:
            self._rows.append(failed(key, Code.INVALID_ARGUMENT, str(e), 0))
            return
        if request.finished:
            self._rows.append(request.end())
            return
        self._requests[key] = request
        self._attach(request.lane)
        request.cached = request.lane.position
        self._scheduler.admit(request.lane)

    def _attach(self, lane: Lane) -> None:
        """Opens the lane's sequence in the KV cache, behind whatever prefix that knows."""
        lane.add_slabs(self._kv.attach(lane.id, lane.tokens[: lane.length], lane.attention))
        lane.position = lane.n_slabs * self._slab_tokens

    def _cancel(self, key: int, finish: str) -> None:
        if request := self._requests.get(key):
            self._leave(request, request.end(finish))

    def _pause(self, key: int) -> None:
        if request := self._requests.get(key):
            self._scheduler.pause(request.lane)

    def _resume(self, key: int) -> None:
        if request := self._requests.get(key):
            self._scheduler.resume(request.lane)

    # ---- steps ----

    def _step(self) -> None:
        plan = self._scheduler.plan(self._kv.free)
        for lane in plan.preempted:
            self._kv.release(lane.id)
            lane.rewind()
            self._attach(lane)
        if plan.misfit:
            request = self._requests[plan.misfit.id]
            self._leave(request, request.fail(Code.KV_EXHAUSTED, f"needs more than all {self._kv.total} KV slabs of a "
                                              "worker; raise kv_bytes"))  # fmt: skip
        if plan.work:
            self._compute(plan)

    def _compute(self, plan: Plan[Lane]) -> None:
        slab_tokens, begin = self._slab_tokens, time.monotonic_ns()
        grown = []  # lanes that will have filled a slab
        rows = 0
        for lane, count in plan.work:
            rows += count
            end = lane.position + count
            if end > lane.n_slabs * slab_tokens:
                lane.add_slabs(self._kv.take(lane.id, -(-end // slab_tokens) - lane.n_slabs))
            if end // slab_tokens > lane.position // slab_tokens:
                grown.append(lane)
        self._show_keys(plan)
        outcomes = self._batch.run(plan.work)
        self._steps += 1
        self._page[Field.STEPS] = self._steps
        self._page[Field.KEYS] = 0
        for (lane, _), outcome in zip(plan.work, outcomes, strict=True):
            if outcome is not None:
                self._take(self._requests[lane.id], outcome)
        self._report(rows, time.monotonic_ns() - begin)
        for lane in grown:  # tokens are sent before their slab is committed
            if lane.id in self._requests:
                for index in self._kv.commit(lane.id, lane.position):
                    lane.drop_slab(index)

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
        row = request.take(outcome)
        if request.finished:
            self._leave(request, row)
        elif row is not None:
            self._rows.append(row)

    def _leave(self, request: Request, row: Row | None) -> None:
        """The request ends here, with this row."""
        if row is not None:
            self._rows.append(row)
        del self._requests[request.key]
        self._scheduler.finish(request.lane)
        self._kv.release(request.key)

    def _report(self, computed: int, duration_ns: int) -> None:
        free = self._kv.free
        self._page[Field.FREE_SLABS] = free
        message = [ipc.STEP, self._steps, self._rows, {"free": free, "rows": computed, "us": duration_ns // 1000}]
        self._rows = []
        self._link.send(message)


_HANDLERS = {ipc.ASSIGN: Loop._assign, ipc.CANCEL: Loop._cancel, ipc.PAUSE: Loop._pause, ipc.RESUME: Loop._resume}
