"""All that the supervisor has started: generations, the pools they use, the dispatchers in front of them.

It makes and launches them, moves them from one stage of generation.py's course to the next, and lets them go when
nothing needs them. When a process lives and dies is the loop's business (children.py, lifecycle.py).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator

from ..common import ipc, log
from ..common.exit_codes import Exit
from ..common.facts import ModelFacts
from ..common.metrics import Source
from ..common.pages import Book
from ..common.settings import Settings
from . import links
from .census import Census
from .children import Child, Goal, Worker
from .deaths import is_fault
from .exporter import Exporter
from .fdstore import FdStore
from .generation import RETIRED_SECONDS, Dispatcher, Generation, Pool
from .kv_memory import KvMemory
from .lifecycle import State
from .roles import Roles
from .sockets import Listener
from .spawn import Death
from .tasks import package_version
from .weights import REMEDY, WeightFiles

LOOK_SECONDS = 1.0  # between two looks at the weight files
MOST_EMPTYING = 2  # old generations with live requests; a further reload waits


class Fleet:
    """serving: what new requests go to, once the model is known. coming: not yet. emptying: live requests are left.
    leaving: its workers end. version: of the package that this process runs. exporter: the metrics process, if metrics
    are wanted; it begins at once."""

    def __init__(self, roles: Roles, listener: Listener, admin: Listener, metrics: Listener | None,
                 settings: Settings, store: FdStore) -> None:  # fmt: skip
        self.serving: Generation | None = None
        self.coming: Generation | None = None
        self.emptying: list[Generation] = []
        self.leaving: list[Generation] = []
        self.pools: list[Pool] = []
        self.version = package_version()
        self._look_due = 0.0
        self._roles, self._listener, self._admin, self._store = roles, listener, admin, store
        self._log = log.get("fleet")
        self._book = Book.make()
        self.census = Census(self._book)
        self.exporter = metrics and Exporter(roles.metrics, self._book, metrics, settings, self.version)
        if self.exporter:
            self.exporter.aim(Goal.RUN)
        self._generations, self._pool_numbers = itertools.count(1), itertools.count(1)
        self._worker_epochs: defaultdict[int, Iterator[int]] = defaultdict(lambda: itertools.count(1))
        self._pool_epochs, self._dispatcher_epochs = itertools.count(1), itertools.count(1)
        self.dispatcher = self._new_dispatcher(False, self.version)
        self.retired: list[Dispatcher] = []

    # ---- looking ----

    @property
    def generations(self) -> list[Generation]:
        """The oldest first, but for those that leave."""
        chosen = (self.serving, self.coming)
        return [*self.leaving, *self.emptying, *(generation for generation in chosen if generation is not None)]

    @property
    def dispatchers(self) -> list[Dispatcher]:
        coming = self.coming.dispatcher if self.coming else self.dispatcher
        return list(dict.fromkeys((*self.retired, self.dispatcher, coming)))

    @property
    def workers(self) -> list[Worker]:
        return [worker for generation in self.generations for worker in generation.workers]

    @property
    def children(self) -> list[Child]:
        """In the order of their start."""
        exporters = [self.exporter] if self.exporter else []
        return [*exporters, *self.pools, *self.dispatchers, *self.workers]

    def of(self, worker: Worker) -> Generation:
        return next(generation for generation in self.generations if generation.number == worker.generation)

    def users(self, pool: Pool) -> list[Generation]:
        return [generation for generation in self.generations if generation.pool is pool]

    def owner(self, child: Child) -> Generation | None:
        """The generation that its failure hurts most; None if none needs it."""
        chosen = (generation for generation in (self.serving, self.coming) if generation is not None)
        using = (generation for generation in (*chosen, *self.emptying, *self.leaving)
                 if child in (generation.pool, generation.dispatcher, *generation.workers))  # fmt: skip
        return next(using, None)

    def may_start(self, child: Child) -> bool:
        return child.goal is Goal.RUN and not (isinstance(child, Worker) and self.of(child).spoiled)

    # ---- making ----

    def make(self, settings: Settings, facts: ModelFacts, version: str, everything: bool = False) -> Generation:
        """The next generation, with what it cannot share with the serving one; nothing of it is started. version: of
        the package that is installed. everything: dispatcher and pool are replaced as well. ValueError or OSError if
        there is no memory for it, or the weights are no more what was checked."""
        weights = WeightFiles.open(facts)
        try:
            return self._made(settings, facts, weights, version, everything)
        except BaseException:
            weights.close()
            raise

    def _made(self, settings: Settings, facts: ModelFacts, weights: WeightFiles, version: str,
              everything: bool) -> Generation:
        fresh = everything or version != self.version
        renewed = self.serving is not None and (everything or version != self.dispatcher.version)
        present = self.serving.pool if self.serving is not None and not renewed else None
        pool = present if present is not None and present.fits(settings, facts) else None
        pool = pool or self._new_pool(settings, facts, fresh)
        dispatcher = self._new_dispatcher(fresh, version) if renewed else self.dispatcher
        number = next(self._generations)
        workers = [Worker(self._roles.worker, self.census.page(Source.WORKER, slot), self._worker_epochs[slot], fresh,
                          slot, number) for slot in range(settings.workers)]
        return Generation(number, settings, facts, weights, pool, dispatcher, workers)

    def _new_pool(self, settings: Settings, facts: ModelFacts, fresh: bool) -> Pool:
        first = self.serving is None and not self.pools
        memory = KvMemory.kept(self._store, settings, facts) if first else None
        if memory is None:
            memory = KvMemory.make(settings, facts, self._taken())
            if first:
                memory.keep(self._store)
        page = self.census.page(Source.KVPOOL)
        pool = Pool(self._roles.kvpool, page, self._pool_epochs, fresh, next(self._pool_numbers), memory, settings,
                    facts, self._taken())  # fmt: skip
        self.pools.append(pool)
        return pool

    def _new_dispatcher(self, fresh: bool, version: str) -> Dispatcher:
        page = self.census.page(Source.DISPATCHER)
        return Dispatcher(self._roles.dispatcher, page, self._dispatcher_epochs, fresh, version)

    def _taken(self, but: Pool | None = None) -> int:
        """Bytes of all arenas but one."""
        return sum(pool.bytes for pool in self.pools if pool is not but)

    # ---- launching ----

    def launch(self, child: Child, now: float) -> None:
        """Starts its process and gives it its links. OSError if the system has no room."""
        if isinstance(child, Pool):
            memory = child.memory
            child.start(now, child.settings, child.facts, last=(memory.arena, memory.journal), fds=memory.fds)
            links.pool_started(child, self.users(child))
        elif isinstance(child, Dispatcher):
            self._launch_dispatcher(child, now)
        elif isinstance(child, Worker):
            self._launch_worker(child, self.of(child), now)
        elif isinstance(child, Exporter):
            child.launch(now)

    def _launch_dispatcher(self, dispatcher: Dispatcher, now: float) -> None:
        """It is born with what is to serve new requests."""
        leads = self.serving if self.serving and self.serving.dispatcher is dispatcher else self.coming
        assert leads is not None
        dispatcher.drained = False
        dispatcher.start(now, leads.settings, leads.facts, first=(self._listener.sock, self._admin.sock),
                         last=(leads.number, leads.pool.number, self._book))
        coming = self.coming
        others = [coming] if coming and coming is not leads and coming.dispatcher is dispatcher else []
        links.dispatcher_started(dispatcher, leads, others)

    def _launch_worker(self, worker: Worker, generation: Generation, now: float) -> None:
        arena, weights = generation.pool.memory.arena, generation.weights
        theirs, ours = ipc.link()
        try:
            worker.start(now, generation.settings, generation.facts, first=(theirs,), last=(arena, weights.files),
                         fds=(arena.fd, *weights.fds))
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        links.worker_started(worker, generation, ours)

    # ---- from stage to stage ----

    def begin(self, generation: Generation) -> None:
        """The first one, which serves as soon as it can. Its workers wait until the model is verified."""
        self.serving = generation
        generation.pool.aim(Goal.RUN)
        generation.dispatcher.aim(Goal.RUN)

    def prepare(self, generation: Generation) -> None:
        """Starts what it needs but a new dispatcher, which would take clients in."""
        self.coming = generation
        links.introduce(generation)
        generation.pool.aim(Goal.RUN)
        generation.aim(Goal.RUN)

    def switch(self) -> None:
        """Starts the dispatcher of the coming generation, if that has one of its own."""
        assert self.coming is not None
        self.coming.dispatcher.aim(Goal.RUN)

    def serve(self, now: float) -> None:
        """The coming generation takes over."""
        new, old = self.coming, self.serving
        assert new is not None
        assert old is not None
        self.serving, self.coming = new, None
        self.emptying.append(old)
        if new.dispatcher is not self.dispatcher:
            self.dispatcher.tell({"t": "retire"})
            self.dispatcher.retires = now + RETIRED_SECONDS
            self.retired.append(self.dispatcher)
            self.dispatcher = new.dispatcher
            if self.exporter:
                self.exporter.follow(new.dispatcher.version)
        else:
            self.dispatcher.tell({"t": "serve", "generation": new.number})
        if old.pool is not new.pool:
            new.pool.memory.keep(self._store)
            old.pool.retired = True
            old.pool.tell({"t": "retire"})
        elif new.pool.adopt(new.settings):
            new.pool.replace()  # the journal is all that the next process needs

    def abandon(self) -> None:
        """The coming generation will not serve."""
        if self.coming is None:
            return
        gone, self.coming = self.coming, None
        self._leave(gone, Goal.KILL)
        if gone.dispatcher is not self.dispatcher:
            gone.dispatcher.aim(Goal.KILL)
            self.retired.append(gone.dispatcher)

    def tidy(self, now: float) -> None:
        """Lets go what is not needed any more."""
        for dispatcher in list(self.retired):
            if dispatcher.drained or now >= dispatcher.retires:
                dispatcher.aim(Goal.STOP)
            if not dispatcher.life.running:
                self.retired.remove(dispatcher)
                self.census.gone(dispatcher)
        for generation in list(self.emptying):
            if generation.empty or generation.lost or generation.dispatcher not in self.dispatchers:
                self.emptying.remove(generation)
                self._leave(generation, Goal.STOP)
        for generation in list(self.leaving):
            if not generation.running:
                self._forget(generation)
        for pool in list(self.pools):
            if not self.users(pool):
                self._drop(pool)

    def _leave(self, generation: Generation, goal: Goal) -> None:
        generation.aim(goal)
        self.leaving.append(generation)

    def _forget(self, generation: Generation) -> None:
        self.leaving.remove(generation)
        for worker in generation.workers:
            self.census.gone(worker)
        generation.weights.close()
        if generation.dispatcher is self.dispatcher:
            self.dispatcher.tell({"t": "forget", "generation": generation.number})
        self._log.info("generation gone", generation=generation.number)

    def _drop(self, pool: Pool) -> None:
        pool.aim(Goal.KILL)
        if not pool.life.running:
            self.pools.remove(pool)
            self.census.gone(pool)
            pool.memory.close()
            self.share()

    # ---- what children tell ----

    def emptied(self, dispatcher: Child, number: int) -> None:
        for generation in self.emptying:
            if generation.number == number and generation.dispatcher is dispatcher:
                generation.empty = True

    def held(self, pool: Pool, slabs: int) -> None:
        """A retired pool has given pages back."""
        if pool.retired:
            pool.held = min(pool.held, slabs)
            self.share()

    def share(self) -> None:
        """Lets arenas grow into what others have given back."""
        for pool in self.pools:
            if pool.widen(self._taken(but=pool)):
                pool.tell({"t": "usable", "slabs": pool.usable})

    def buried(self, child: Child, death: Death, now: float) -> None:
        """Its process is reaped; its life has not been told yet."""
        if isinstance(child, Pool):
            if child.life.state is not State.LOADING:  # or it has not got as far as what it was told
                child.ended = now
        elif isinstance(child, Worker):
            generation = self.of(child)
            links.worker_dead(child, generation, death)
            if is_fault(death.code):
                generation.pool.faulted = now
            # Looked at now, so that no other worker is started on changed files.
            if reason := generation.weights.changed():
                self._spoil(generation, reason)
            elif death.code == Exit.WEIGHTS_CHANGED:  # it was changed back
                self._spoil(generation, f"a weight file was changed in place; {REMEDY}")
        elif isinstance(child, Dispatcher):  # with it went its streams
            for generation in self.emptying:
                generation.empty = generation.empty or generation.dispatcher is child
            if child.retired:
                child.aim(Goal.KILL)

    def doom(self, child: Child) -> None:
        """It is about to be signalled by us."""
        if isinstance(child, Worker):
            links.worker_doomed(child, self.of(child))

    def look_at_weights(self, now: float) -> None:
        """Cheap, and no more than once a second."""
        if now < self._look_due:
            return
        self._look_due = now + LOOK_SECONDS
        for generation in self.generations:
            if not generation.spoiled and (reason := generation.weights.changed()):
                self._spoil(generation, reason)

    def _spoil(self, generation: Generation, reason: str) -> None:
        if not generation.spoiled:
            generation.spoiled = reason
            self._log.error("weights changed", generation=generation.number, reason=reason)

    def beat(self, now: float, served: bool) -> None:
        """At each turn of the loop. served: the service has been ready."""
        if self.serving is not None:
            self.serving.pool.memory.note.beat(self.serving.pool.doubt(now), served)
        self._store.flush()

    def close(self, orderly: bool) -> None:
        """orderly: all processes have ended in order."""
        if self.serving is not None and orderly:
            pool = self.serving.pool
            if pool.missed_fault is None:
                pool.memory.note.end()
            else:
                pool.memory.note.beat(pool.missed_fault, False)
        for generation in self.generations:
            generation.weights.close()
        for pool in self.pools:
            pool.memory.close()
