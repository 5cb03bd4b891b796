"""What peers say to the pool and are answered. Messages in, messages out; sockets are main.py's.

    server.introduce(worker)                   the supervisor has sent a link
    server.hear(worker, [ALLOC, 3], now)       for each message, in order
    server.turn(now)                           at the end of each turn of the loop
    server.out, server.orders                  what is to be sent: taken by the caller, which empties them

A peer that says what a right one never says is not heard any more, and the supervisor is asked to kill it: what it has
returns by dead(), when nothing can write to it any longer. Anything else that goes wrong here is a fault of ours, and
ends the process: the next one makes the pool again from the journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..common import log, pool_ipc
from .messages import U32, Attached, PeerFault, Request, WorkerId, whole
from .pool import Pool
from .stats import Calls, show, stats
from .withheld import give_up, grow, held

Peer = WorkerId | None  # None: the dispatcher
STATS_SECONDS = 0.02
EOF_SECONDS = 1.0  # from the end of a link to the end of its process; a worker that dies may write down why
SUSPECT_SECONDS = 2.0  # before a worker's end by a fault, in which it may have written where it must not: several steps
NEVER = float("inf")
_log = log.get("kvpool")


class Server:
    """out: (peer, message). orders: messages for the supervisor. killed: workers that were, in this turn; before turn()
    the rest of what they had said is to be heard. due: when turn() has something to do even if nothing is heard."""

    def __init__(self, pool: Pool, geometry: dict[str, Any], now: float, settle_seconds: float) -> None:
        """settle_seconds: how long a worker of the pool's former life may take to declare what it has."""
        self.pool, self._geometry, self._calls = pool, geometry, Calls(pool.counters)
        self.out: list[tuple[Peer, list[Any]]] = []
        self.orders: list[dict[str, Any]] = []
        self._heard: set[Peer] = set()  # introduced, and in good standing
        self._ending: dict[WorkerId, float] = {}  # since when they have closed their links and are not reaped
        self.killed: list[WorkerId] = []
        self._unverified: set[WorkerId] = set()  # are to be told of a fault once they have declared
        self._attaches: list[tuple[WorkerId, Any, Request]] = []  # heard in this turn, or while somebody is ending
        self._wanted: dict[WorkerId, int] = {}  # slabs still to be granted
        self._short: dict[WorkerId, int] = {}  # as the dispatcher was told
        self._late: dict[Peer, tuple[float, str]] = dict.fromkeys(
            pool.undeclared, (now + settle_seconds, "has not declared what it has"))
        self._told: dict[str, float] = {}  # as the dispatcher was
        self._stats_from = now  # not before this
        self._changed = True  # something may have, since

    # ---- what happens ------------------------------------------------------------------------------------------------

    def introduce(self, peer: Peer) -> None:
        """A link from a peer, which is a new one of its kind and slot, or old and we are new."""
        self._heard.add(peer)
        self._changed = True
        if peer is None:
            self._short, self._told = {}, {}

    def hear(self, peer: Peer, message: Any, now: float) -> None:
        if peer not in self._heard:
            return
        try:
            handler, fields = _handler(_OF_DISPATCHER if peer is None else _OF_WORKER, message)
            if (op := _TIMED.get(message[0])) is not None:
                self._calls.timed(op, handler, self, peer, now, *fields)
            else:
                handler(self, peer, now, *fields)
            self._changed = True
        except PeerFault as e:
            self.refuse(peer, str(e))

    def refuse(self, peer: Peer, reason: str) -> None:
        """The peer is at fault: it is not heard any more and must end."""
        self._heard.discard(peer)
        self._wanted.pop(peer, 0) if peer is not None else None
        self._late.pop(peer, None)
        self.pool.counters.add("kv_invariant_violations_total", kind="peer")
        slot, epoch = peer or (0, 0)
        kind = "dispatcher" if peer is None else "worker"
        _log.error("a peer broke the pool's protocol", kind=kind, slot=slot, epoch=epoch, reason=reason)
        self.orders.append({"t": "kill", "kind": kind, "slot": slot, "epoch": epoch, "reason": reason})

    def lose(self, peer: Peer, now: float) -> None:
        """The link has ended. A worker lives until it is dead; a dispatcher's requests end here."""
        if peer not in self._heard:
            return
        self._heard.discard(peer)
        if peer is None:
            self.pool.dispatcher_dead(now)
        else:
            self._ending[peer] = now
            self._late[peer] = (now + EOF_SECONDS, "has closed its link")

    def dead(self, worker: WorkerId, fault: bool, now: float) -> None:
        """The process is reaped. fault: by a signal after which all it could write to is suspect."""
        self._changed = True
        ended = self._ending.get(worker, now)
        self._forget(worker)
        if fault:
            self.pool.suspect(ended - SUSPECT_SECONDS)
            self._unverified |= self.pool.undeclared
        leased = self.pool.counts()["leased"]
        self._answer(self.pool.worker_dead(worker, now))
        back = leased - self.pool.counts()["leased"]
        _log.info("a dead worker's leases are free", slot=worker[0], epoch=worker[1], slabs=back, fault=fault)
        for other in self.pool.workers if fault else ():
            self._verify(other)

    def missed(self, fault: float) -> None:
        """Said once, before anybody is heard: there was no pool to be told that a worker died by a fault, then."""
        self.pool.suspect(fault - SUSPECT_SECONDS)
        self._unverified = set(self.pool.undeclared)

    def grow(self, usable: int) -> None:
        """The first so many slabs have their pages."""
        grow(self.pool.ledger.table, usable)
        self._changed = True

    def retire(self) -> None:
        """Nothing new comes to this pool: it gives back what it can, and says so."""
        self.pool.retired = self._changed = True
        self._tell_held()

    def _tell_held(self) -> None:
        self.orders.append({"t": "held", "slabs": held(self.pool.ledger.table)})

    def _verify(self, worker: WorkerId) -> None:
        self.out.append((worker, [pool_ipc.VERIFY, self.pool.to_verify(worker)]))

    # ---- at the end of a turn ----------------------------------------------------------------------------------------

    @property
    def due(self) -> float:
        tells = self._changed and None in self._heard and not self.pool.settling
        return min([self._stats_from if tells else NEVER, *(deadline for deadline, _ in self._late.values())])

    def turn(self, now: float) -> list[int]:
        """Returns slabs whose pages are to be given back."""
        self._orphan(now)
        self._attach_all(now)
        self._grant()
        unused = give_up(self.pool)
        if unused:
            self._changed = True
            self._tell_held()
        for peer, (deadline, reason) in list(self._late.items()):
            if now >= deadline:
                self.refuse(peer, reason)
        if None in self._heard and not self.pool.settling:  # before, the numbers mean nothing
            self._tell_shortage()
            self._tell_stats(now)
        show(self.pool)
        return unused

    def _orphan(self, now: float) -> None:
        """Those who were killed leave their requests to others. It was no fault: nothing need be verified before."""
        killed, self.killed = self.killed, []
        for worker in killed:
            self._forget(worker)
            self._answer(self.pool.worker_killed(worker, now))

    def _forget(self, worker: WorkerId) -> None:
        self._heard.discard(worker)
        self._ending.pop(worker, None)
        self._wanted.pop(worker, 0)
        self._late.pop(worker, None)

    def _attach_all(self, now: float) -> None:
        """Not while a worker is ending: if it does so by a fault, what it may have damaged must be verified, above all
        by those who take its requests over. A request that another worker still has waits for that one's word or end:
        its link may end after the dispatcher's, by which others know."""
        if self._ending:
            return
        attaches, self._attaches = self._attaches, []
        for worker, key, request in attaches:
            if worker not in self._heard:
                continue
            if self.pool.has_elsewhere(worker, key):
                self._attaches.append((worker, key, request))
                continue
            try:
                answer = self._calls.timed("attach", self.pool.attach, worker, key, request, now)
            except PeerFault as e:
                self.refuse(worker, str(e))
                continue
            if isinstance(answer, Attached):
                self._answer([answer])

    def _grant(self) -> None:
        """Shares what there is among all who want some, evenly, and nobody gets more than he wants."""
        waiting = sorted(self._wanted, key=self._wanted.__getitem__)
        for index, worker in enumerate(waiting):
            share = -(-self.pool.available // (len(waiting) - index))
            slabs = self._calls.timed("alloc", self.pool.alloc, worker, min(share, self._wanted[worker]))
            self._wanted[worker] -= len(slabs)
            if not self._wanted[worker]:
                del self._wanted[worker]
            if slabs:
                self.out.append((worker, [pool_ipc.GRANT, slabs]))

    def _tell_shortage(self) -> None:
        short = dict(self._wanted)
        for worker, n in short.items():
            if self._short.get(worker) != n:
                self.out.append((None, [pool_ipc.SHORT, worker, n]))
        for worker in self._short.keys() - short.keys():
            self.out.append((None, [pool_ipc.RELIEVED, worker]))
        self._short = short

    def _tell_stats(self, now: float) -> None:
        if not self._changed or now < self._stats_from:
            return
        current, self._changed = stats(self.pool), False
        if current != self._told:
            self._told, self._stats_from = current, now + STATS_SECONDS
            self.out.append((None, [pool_ipc.STATS, current]))

    # ---- workers' messages -------------------------------------------------------------------------------------------

    def _hello(self, worker: WorkerId, now: float, body: Any) -> None:
        if type(body) is not dict or body.keys() != {"slot", "epoch", "geometry", "leased", "held"}:
            raise PeerFault(f"no hello: {str(body)[:200]}")
        if (body["slot"], body["epoch"]) != worker:
            raise PeerFault(f"it is {worker}, but says it is {body['slot']!r}, {body['epoch']!r}")
        if body["geometry"] != self._geometry:
            raise PeerFault(f"its arena is {body['geometry']}, not {self._geometry}")
        self.pool.declare(worker, _list(body["leased"]), _held(body["held"]), now)
        self._late.pop(worker, None)
        if worker in self._unverified:
            self._unverified.remove(worker)
            self._verify(worker)

    def _alloc(self, worker: WorkerId, now: float, n: Any) -> None:
        self.pool.alloc(worker, 0)  # it is one who may
        self._wanted[worker] = self._wanted.get(worker, 0) + whole(n, U32, "n")

    def _attach(self, worker: WorkerId, now: float, key: Any, body: Any) -> None:
        """The answer comes at the end of the turn: what else is heard in it may be somebody's end."""
        self._attaches.append((worker, key, _request(body)))

    def _commit(self, worker: WorkerId, now: float, key: Any, ordinal: Any, slab: Any, tokens: Any, crc: Any) -> None:
        done = self.pool.commit(worker, key, ordinal, slab, tokens, crc, now)
        self.out.append((worker, [pool_ipc.COMMITTED, key, done.released]))
        self._answer(done.woken)

    def _release(self, worker: WorkerId, now: float, key: Any) -> None:
        self._answer(self.pool.release(worker, key, now))

    def _give(self, worker: WorkerId, now: float, slabs: Any) -> None:
        self.pool.give(worker, _list(slabs))

    def _bad(self, worker: WorkerId, now: float, slab: Any) -> None:
        self.pool.bad(worker, slab)

    def _verified(self, worker: WorkerId, now: float) -> None:
        self.pool.verified(worker)

    def _answer(self, attached: Iterable[Attached]) -> None:
        for a in attached:
            self.out.append((a.worker, [pool_ipc.ATTACHED, a.key, a.n, a.slabs]))

    # ---- the dispatcher's messages -----------------------------------------------------------------------------------

    def _drop(self, peer: None, now: float, key: Any) -> None:
        self.pool.drop(whole(key, 1 << 64, "key"), now)

    def _lookup(self, peer: None, now: float, id: Any, body: Any) -> None:
        self.out.append((None, [pool_ipc.LOOKED, whole(id, 1 << 64, "id"), self.pool.lookup(_request(body))]))

    def _evict(self, peer: None, now: float, id: Any, owner: Any) -> None:
        if owner is not None and type(owner) is not bytes:
            raise PeerFault(f"no owner: {str(owner)[:200]}")
        self.out.append((None, [pool_ipc.EVICTED, whole(id, 1 << 64, "id"), self.pool.evict(owner)]))

    def _killed(self, peer: None, now: float, worker: Any) -> None:
        if type(worker) is not list or len(worker) != 2:
            raise PeerFault(f"no worker: {str(worker)[:200]}")
        slot, epoch = worker
        self.killed.append((whole(slot, U32, "slot"), whole(epoch, U32, "epoch")))


Handler = Callable[..., None]
# tag → (handler, number of fields behind the tag)
_OF_WORKER: dict[int, tuple[Handler, int]] = {
    pool_ipc.HELLO: (Server._hello, 1),
    pool_ipc.ALLOC: (Server._alloc, 1),
    pool_ipc.ATTACH: (Server._attach, 2),
    pool_ipc.COMMIT: (Server._commit, 5),
    pool_ipc.RELEASE: (Server._release, 1),
    pool_ipc.GIVE: (Server._give, 1),
    pool_ipc.BAD: (Server._bad, 1),
    pool_ipc.VERIFIED: (Server._verified, 0),
}
_OF_DISPATCHER: dict[int, tuple[Handler, int]] = {
    pool_ipc.DROP: (Server._drop, 1),
    pool_ipc.LOOKUP: (Server._lookup, 2),
    pool_ipc.EVICT: (Server._evict, 2),
    pool_ipc.KILLED: (Server._killed, 1),
}


_TIMED = {pool_ipc.COMMIT: "commit", pool_ipc.RELEASE: "release", pool_ipc.LOOKUP: "lookup"}


def _handler(table: dict[int, tuple[Handler, int]], message: Any) -> tuple[Handler, list[Any]]:
    if type(message) is not list or not message or type(message[0]) is not int or message[0] not in table:
        raise PeerFault(f"no message for the pool: {str(message)[:200]}")
    handler, count = table[message[0]]
    if len(message) != count + 1:
        raise PeerFault(f"message {message[0]} with {len(message) - 1} fields, not {count}")
    return handler, message[1:]


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise PeerFault(f"no list of slabs: {str(value)[:200]}")
    return value


def _request(body: Any) -> Request:
    try:
        return Request.from_wire(body)
    except TypeError:  # a list or map where a word should be
        raise PeerFault(f"no request: {str(body)[:200]}") from None


def _held(body: Any) -> dict[int, tuple[Request, list[Any]]]:
    try:
        return {key: (_request(request), _list(slabs)) for key, (request, slabs) in body.items()}
    except (AttributeError, TypeError, ValueError):
        raise PeerFault(f"no map of requests and their slabs: {str(body)[:200]}") from None
