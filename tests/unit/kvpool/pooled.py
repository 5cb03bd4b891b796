"""The KV pool's server with its peers at the other end. Messages only, no sockets."""

from __future__ import annotations

from typing import Any

import numpy as np
from colibri_daemon.common import pool_ipc
from colibri_daemon.kvpool.check import check
from colibri_daemon.kvpool.journal import Journal
from colibri_daemon.kvpool.pool import Pool
from colibri_daemon.kvpool.server import Server

T, SLABS = 16, 8
GEOMETRY = {"slabs": SLABS, "slab_bytes": 4096, "slab_tokens": T, "kv_format": "f16"}
A, B = (0, 1), (1, 1)  # two workers
DISPATCHER = None
SETTLE = 5.0
TAGS = [value for name, value in vars(pool_ipc).items() if name.isupper()]


def ids(slabs: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).integers(0, 1000, slabs * T, "<u4").tobytes()


def wanted(tokens: bytes, **changes: Any) -> dict[str, Any]:
    return {"tokens": tokens, "salt": b"s", "use": True, "pinned": 0, "window": 0, "positions": "cache",
            "limit": max(0, len(tokens) // 4 - 1)} | changes  # fmt: skip


class Peers:
    """A server with its peers at the other end. now: the time, moved by hand."""

    def __init__(self, journal: Journal | None = None, survivors: tuple[tuple[int, int], ...] = (),
                 usable: int | None = None) -> None:
        self.now = 100.0
        self.pool = Pool(SLABS, T, "lru", b"identity", journal, survivors, self.now, usable=usable)
        self.server = Server(self.pool, GEOMETRY, self.now, SETTLE)

    def say(self, peer: Any, *messages: list[Any]) -> list[Any]:
        """Says it, ends the turn and returns what is sent to whom."""
        for message in messages:
            self.server.hear(peer, message, self.now)
        return self.turn()

    def turn(self, wait: float = 0.0) -> list[Any]:
        """unused: slabs whose pages were to be given back."""
        self.now += wait
        self.unused = self.server.turn(self.now)
        out, self.server.out = self.server.out, []
        assert check(self.pool) == []
        return [(peer, message) for peer, message in out if message[0] != pool_ipc.STATS]

    def join(self, worker: tuple[int, int], leased: Any = (), held: Any = None) -> list[Any]:
        self.server.introduce(worker)
        return self.say(worker, hello(worker, leased=list(leased), held=held or {}))

    def killed(self) -> list[tuple[str, int, int]]:
        """Whom the supervisor is asked to kill."""
        orders = [(order["kind"], order["slot"], order["epoch"]) for order in self.server.orders]
        self.server.orders.clear()
        return orders

    def granted(self, worker: tuple[int, int], n: int) -> list[int]:
        ((peer, (tag, slabs)),) = self.say(worker, [pool_ipc.ALLOC, n])
        assert (peer, tag) == (worker, pool_ipc.GRANT)
        return slabs


def hello(worker: tuple[int, int], **changes: Any) -> list[Any]:
    body = {"slot": worker[0], "epoch": worker[1], "geometry": GEOMETRY, "leased": [], "held": {}}
    return [pool_ipc.HELLO, body | changes]


def compute(peers: Peers, worker: tuple[int, int], key: int, tokens: bytes, slabs: int) -> list[int]:
    """A request that computes so many slabs; which."""
    peers.say(worker, [pool_ipc.ATTACH, key, wanted(tokens)])
    used = peers.granted(worker, slabs)
    for ordinal, slab in enumerate(used):
        chunk = tokens[ordinal * T * 4 : (ordinal + 1) * T * 4]
        assert peers.say(worker, [pool_ipc.COMMIT, key, ordinal, slab, chunk, 7]) == [
            (worker, [pool_ipc.COMMITTED, key, []])]  # fmt: skip
    return used


REQUEST = wanted(ids(2))
