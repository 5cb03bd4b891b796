"""What serves one configuration: its rules of admission, those who wait for it, its workers and the pool they share.

    coming ──serve──> serving ──a later one serves──> emptying ──its last request ends──> empty, then forgotten

A reload makes the next generation. Where both use the same pool the KV slabs are the same too: requests move from the
old one to the new one, and go on there with the same bits. Else they end where they began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from colibri_protocol.errors import Code, InvalidMessage
from colibri_protocol.messages import Receipt

from ..common.facts import ModelFacts
from ..common.settings import Settings
from .admission import Admission, Capacity
from .channel import Outbox
from .fairness import FairShare
from .placing import Placing
from .pool_link import PoolLink
from .queue import RequestQueue
from .streams import Stream
from .workers import Worker, WorkerPool


class Generation:
    """number: as in WELCOME. streams: the live requests that it has to serve, by key."""

    def __init__(self, number: int, settings: Settings, facts: ModelFacts, pool: PoolLink, workers: WorkerPool,
                 share: FairShare, draw_seed: Callable[[], int], now: float) -> None:
        self.number, self.settings, self.facts = number, settings, facts
        self.pool, self.workers = pool, workers
        self.admission = Admission(facts, frozenset(settings.trusted_uids), draw_seed)
        self.queue: RequestQueue[Stream] = RequestQueue(settings.queue_limit, settings.queue_tokens, now,
                                                     settings.queue_seconds, share)
        self.placing = Placing(self.queue, workers, pool, self.admission)
        self.streams: dict[int, Stream] = {}
        pool.users.append(workers)

    @property
    def empty(self) -> bool:
        """Nothing is left for it to do."""
        return not self.streams and not any(worker.running for worker in self.workers)

    def leave(self) -> None:
        """Its processes are gone, or never came."""
        self.workers.close()
        self.pool.users.remove(self.workers)

    def learn_capacity(self, worker: Worker) -> None:
        """What a worker has reported and the pool may know better."""
        self.admission.capacity = Capacity(self.pool.usable or worker.slabs, worker.chunk)

    def can_have_made(self, receipt: Receipt) -> bool:
        """Given that P, W and the position mode are the request's own."""
        facts = self.facts
        return (receipt.model_id, receipt.fingerprint, receipt.kv_format) == (facts.id, facts.fingerprint,
                                                                              facts.kv_format)

    def takes_over(self, stream: Stream) -> bool:
        """Whether a request of another generation can go on here."""
        return stream.generation.pool is self.pool and stream.length <= self.facts.max_len


class Generations:
    """All there are, and the pools, which are known by number too. numbers: of the first one and its pool. serving: the
    one that new requests go to. distrust(worker) is called for one that broke the link's protocol, loaded(worker) for
    one that can work now."""

    def __init__(self, outbox: Outbox, clock: Callable[[], float], draw_seed: Callable[[], int],
                 distrust: Callable[[Worker], None], loaded: Callable[[Worker], None], numbers: tuple[int, int],
                 settings: Settings, facts: ModelFacts) -> None:
        self._outbox, self._clock, self._draw_seed = outbox, clock, draw_seed
        self._distrust, self._loaded = distrust, loaded
        self._share = FairShare()
        self._pools: dict[int, PoolLink] = {}
        self._all: dict[int, Generation] = {}
        self.made: Callable[[Generation], None] = lambda _: None  # called with each new one
        self.serving = self.add(*numbers, settings, facts)

    def __iter__(self) -> Iterator[Generation]:
        """The oldest first: what was admitted first."""
        return iter(self._all.values())

    def workers(self) -> Iterator[Worker]:
        for generation in self._all.values():
            yield from generation.workers

    def heed(self, up: dict[int | None, bool]) -> bool:
        """Which workers can work, by pid, as the supervisor sees it. Whether one goes on that stood still."""
        woken = False
        for worker in self.workers():
            stands_still = not up.get(worker.pid, True)
            woken |= worker.stands_still and not stands_still
            worker.stands_still = stands_still
        return woken

    def of(self, worker: Worker) -> Generation | None:
        """The one whose worker it is or was; None if that is forgotten."""
        return next((generation for generation in self if generation.workers.had(worker)), None)

    def get(self, number: int) -> Generation | None:
        return self._all.get(number)

    def pool(self, number: int) -> PoolLink:
        """Made when it is first spoken of."""
        if number not in self._pools:
            self._pools[number] = PoolLink(self._outbox)
        return self._pools[number]

    def add(self, number: int, pool: int, settings: Settings, facts: ModelFacts) -> Generation:
        workers = WorkerPool(self._outbox, self._distrust, self._loaded)
        made = Generation(number, settings, facts, self.pool(pool), workers, self._share, self._draw_seed,
                          self._clock())
        self._all[number] = made
        self.made(made)
        return made

    def forget(self, number: int) -> None:
        """Idempotent. The serving one cannot be forgotten."""
        gone = self._all.get(number)
        if gone is None or gone is self.serving:
            return
        del self._all[number]
        gone.leave()
        for pool in [pool for pool, link in self._pools.items() if link is gone.pool and not link.users]:
            self._pools.pop(pool).close()

    def to_resume(self, receipt: Receipt | None) -> Generation:
        """The newest that can go on with what was made as the receipt says; the serving one if that is not said."""
        if receipt is None:
            return self.serving
        for generation in reversed(self._all.values()):
            if generation.number <= self.serving.number and generation.can_have_made(receipt):
                return generation
        raise InvalidMessage(Code.MODEL_MISMATCH, "what made the tokens so far is served no more: another model, "
                             "numerics or KV format is; ask again without resume", "resume.receipt")

    def close(self) -> None:
        """Without telling anyone: the process ends."""
        for generation in self._all.values():
            generation.workers.close()
        for pool in self._pools.values():
            pool.close()
