"""The KV pool's core against a plain model: workers and requests do everything in any order, die, lie, and the pool
itself is killed; with all policies, with hashes of 8 bits, with few nodes. Once as Hypothesis chooses, which finds
short ways to break it, and once at random for long, which reaches the states that take many steps."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import pytest
from colibri_daemon.kvpool.messages import PeerFault, Request, WorkerId
from colibri_daemon.kvpool.policies import POLICIES
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from reference.pool_world import SCRIBBLE, SLABS, Job, Peer, T, World


class Variant(NamedTuple):
    """is_calm: no fault and no death of the pool, so that each hit is as long as it can be."""

    policy: str
    hash_bits: int
    ghosts: int
    is_calm: bool = False


SLOTS, LONGEST, MOST_JOBS = 3, 9, 9
ATTENTIONS = [(2, 2, "cache"), (0, 3, "cache"), (0, 0, "cache"), (1, 4, "cache"), (2, 2, "absolute")]
TEXTS = [(0,) * 12, (0, 0, 0, 0, 0, 1) + (1,) * 6, (1, 0) * 6]  # prompts begin as one of these
ALL = 10_000  # nodes without a slab: more than there will be
VARIANTS = [
    *(Variant(policy, 256, ALL, is_calm) for policy in POLICIES for is_calm in (False, True)),
    *(Variant("lru", 8, ALL), Variant("lru", 256, 2), Variant("lfu", 8, 1)),
]
BEHAVIOUR = settings(max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
STEPS, MANY_STEPS = 600, int(os.environ.get("COLIBRI_EXAMPLES", 100)) * 300  # the latter under `-m full`
V = TypeVar("V")


class Acts(World):
    """What can happen. All choices are made by ``choose(n)``, which gives a number below n."""

    def __init__(self, choose: Callable[[int], int], variant: Variant) -> None:
        super().__init__(variant.policy, variant.hash_bits, variant.ghosts)
        self.choose, self.is_calm, self.epochs, self.last_key = choose, variant.is_calm, [0] * SLOTS, 0
        self.start()

    def one_of(self, among: Sequence[V]) -> V:
        return among[self.choose(len(among))]

    def seldom(self) -> bool:
        return self.choose(4) == 3

    def start(self) -> None:
        slot = self.one_of([slot for slot in range(SLOTS) if slot not in [worker[0] for worker in self.peers]])
        self.epochs[slot] += 1
        self.peers[slot, self.epochs[slot]] = Peer()
        self.pool.declare((slot, self.epochs[slot]), [], {}, self.now)

    def alloc(self) -> None:
        self.alloc_for(self.one_of(self.speaking), 1 + self.choose(3))

    def alloc_for(self, worker: WorkerId, n: int) -> None:
        used = self.quarantined | self.leased() | {slab for holds in self.holds() for slab in holds.values()}
        granted = self.pool.alloc(worker, n)
        assert len(granted) == len(set(granted)) == (0 if self.silent else min(n, SLABS - len(used)))
        assert not used & set(granted)
        self.peers[worker].leased |= set(granted)
        self.findable -= set(granted)
        self.content |= dict.fromkeys(granted, SCRIBBLE)

    def give(self) -> None:
        worker = self.one_of(self.speaking)
        back = [slab for slab in sorted(self.peers[worker].leased) if self.choose(2)]
        self.pool.give(worker, back)
        self.peers[worker].leased -= set(back)

    def attach_new(self) -> None:
        text, salt = self.one_of(TEXTS)[: 1 + self.choose(12)], b"b" if self.seldom() else b"a"
        self.add(Job(0, salt, not self.seldom(), self.one_of(ATTENTIONS), list(text)))

    def attach_like(self) -> None:
        """A request like another one, or the next turn of it."""
        old = self.one_of(list(self.jobs.values()))
        job = Job(0, old.salt, old.use, old.attention, list(old.tokens))
        job.grow_to(len(job.tokens) + self.choose(4))
        self.add(job)

    def add(self, job: Job) -> None:
        self.last_key += 1
        job.key = self.last_key
        self.jobs[job.key] = job
        self.attach(self.one_of(self.speaking), job.key)

    def attach_again(self) -> None:
        """After a preemption, or its worker's death."""
        self.attach(self.one_of(self.speaking), self.one_of(self.queued))

    def attach_elsewhere(self) -> None:
        """Its worker is about to die, or to let it go."""
        key = self.one_of(self.carried)[1]
        others = [worker for worker in self.speaking if worker not in self.has(key)]
        if others and self.seldom():
            self.attach(self.one_of(others), key)

    def commits(self) -> None:
        worker, key = self.one_of(self.carried)
        for _ in range(1 + self.choose(6)):
            if not self.peers[worker].leased:
                self.alloc_for(worker, 1)
            if key in self.peers[worker].held and self.peers[worker].leased and self.peers[worker].next[key] < LONGEST:
                ordinal = self.write(worker, key, self.one_of(sorted(self.peers[worker].leased)))
                self.commit(worker, key, ordinal)

    def leave(self) -> None:
        self.release(*self.one_of(self.carried + self.waiting))

    def finish(self) -> None:
        worker, key = self.one_of(self.carried)
        self.release(worker, key)
        self.drop_this(key)

    def drop(self) -> None:
        """The request is at an end. Some worker may not know that yet."""
        key = self.one_of(sorted(self.jobs))
        if not self.has(key) or self.seldom():
            self.drop_this(key)

    def drop_this(self, key: int) -> None:
        if key not in [waiting for _, waiting in self.waiting]:
            self.pool.drop(key, self.now)
            self.orphans.pop(key, None)
            self.dropped.add(key)
            if not self.has(key):
                del self.jobs[key]

    def worker_dies(self) -> None:
        """After a fault that had written all over the arena, or without."""
        worker = self.one_of(list(self.peers))
        fault = worker not in self.killed and self.seldom() and not self.is_calm
        if fault:
            self.content[self.choose(SLABS)] = SCRIBBLE
            self.is_exact = False
        self.die(worker, self.now - self.choose(20) if fault else None)

    def worker_is_killed(self) -> None:
        self.kill(self.one_of([worker for worker in self.peers if worker not in self.killed]))

    def pool_dies(self) -> None:
        """Perhaps in the middle of a commit."""
        if not self.seldom():
            return
        worker, key = self.one_of(self.carried or [(None, 0)])
        if worker and self.peers[worker].leased:
            ordinal, before = self.write(worker, key, min(self.peers[worker].leased)), bytes(self.memory)
            slab = self.peers[worker].held[key][ordinal]
            self.pool.commit(worker, key, ordinal, slab, self.jobs[key].packed(ordinal), slab, self.now)
            self.findable |= {slab} if self.jobs[key].use else set()
            cut = self.choose(len(before) + 1)
            self.memory[cut:] = before[cut:]
            self.peers[worker].unanswered = key, ordinal
        self.restart_pool()

    def worker_declares(self) -> None:
        self.declare(self.one_of(self.declaring))

    def lie(self) -> None:
        """Refused, and nothing changes."""
        worker = self.one_of(self.speaking)
        slab, ordinal, key = self.choose(SLABS + 3) - 1, self.choose(8) - 1, self.choose(30) - 1
        before = self.picture()
        for verb, *arguments in self.lies(worker, slab, ordinal, key):
            with pytest.raises(PeerFault):
                verb(*arguments)
        held = [slab for holds in self.peers[worker].held.values() for slab in holds.values()]
        if 0 <= slab < SLABS and slab not in held:
            self.pool.bad(worker, slab)
        assert self.picture() == before

    def lies(self, worker: WorkerId, slab: int, ordinal: int, key: int) -> list[tuple[Any, ...]]:
        peer, pool, tokens, (slot, epoch) = self.peers[worker], self.pool, bytes(T * 4), worker
        lies: list[tuple[Any, ...]] = [
            (pool.give, (slot, epoch - 1), []), (pool.alloc, (slot, epoch + 1), 1), (pool.alloc, worker, -1),
            (pool.declare, worker, [], {}, 0.0), (pool.declare, (slot, epoch + 1), [slab], {}, 0.0),
            (pool.commit, worker, key, ordinal, slab, tokens[1:], 0, 0.0), (pool.release, worker, [key], 0.0),
        ]  # fmt: skip
        if slab not in peer.leased:
            lies += [(pool.give, worker, [slab]), (pool.give, worker, [*peer.leased, slab])]
            lies += [(pool.commit, worker, k, peer.next[k], slab, tokens, 0, 0.0) for k in peer.held]
        lies += [(pool.give, worker, [leased, leased]) for leased in peer.leased]
        lies += [(pool.commit, worker, k, peer.next[k] + 1, slab, tokens, 0, 0.0) for k in peer.held]
        lies += [(pool.attach, worker, k, Request(), 0.0) for k in (*peer.held, *peer.waiting, -1)]
        if key not in peer.held and key not in peer.waiting:
            lies += [(pool.release, worker, key, 0.0), (pool.commit, worker, key, 0, slab, tokens, 0, 0.0)]
        return lies

    def picture(self) -> Any:
        slabs = [(slab.state, slab.holders, slab.worker, slab.ordinal, slab.crc) for slab in self.pool.ledger.table.all]
        return slabs, self.pool.counts(), self.pool.leases(), bytes(self.memory), len(self.pool.ledger.index.nodes)

    @property
    def queued(self) -> list[int]:
        return [key for key in self.jobs if not self.has(key)]

    @property
    def waiting(self) -> list[tuple[WorkerId, int]]:
        return [(worker, key) for worker in self.speaking for key in self.peers[worker].waiting]


# What can happen, how often in the random run, and when.
ACTS: list[tuple[Callable[[Acts], None], int, Callable[[Acts], Any]]] = [
    (Acts.start, 2, lambda world: len(world.peers) < SLOTS),
    (Acts.alloc, 3, lambda world: world.speaking),
    (Acts.give, 1, lambda world: world.speaking),
    (Acts.attach_new, 4, lambda world: world.speaking and len(world.jobs) < MOST_JOBS),
    (Acts.attach_like, 4, lambda world: world.speaking and 0 < len(world.jobs) < MOST_JOBS),
    (Acts.attach_again, 3, lambda world: world.speaking and world.queued),
    (Acts.attach_elsewhere, 2, lambda world: world.carried),
    (Acts.commits, 8, lambda world: world.carried),
    (Acts.leave, 2, lambda world: world.carried),
    (Acts.finish, 3, lambda world: world.carried),
    (Acts.drop, 2, lambda world: world.jobs),
    (Acts.worker_dies, 1, lambda world: len(world.peers) > 1),
    (Acts.worker_is_killed, 1, lambda world: len(world.peers.keys() - world.killed) > 1),
    (Acts.pool_dies, 1, lambda world: not world.silent and not world.is_calm),
    (Acts.worker_declares, 9, lambda world: world.declaring),
    (Acts.lie, 2, lambda world: world.speaking),
]


class Machine(RuleBasedStateMachine):
    variant: Variant

    def __init__(self) -> None:
        super().__init__()
        self.world = Acts(lambda n: 0, self.variant)

    @invariant()
    def holds(self) -> None:
        self.world.now += 1.0
        self.world.check()

    def teardown(self) -> None:
        self.world.end()


def rule_of(act: Callable[[Acts], None], possible: Callable[[Acts], Any]) -> Callable[..., None]:
    def step(self: Machine, data: st.DataObject) -> None:
        self.world.choose = lambda n: data.draw(st.integers(0, n - 1))
        act(self.world)

    step.__name__ = act.__name__
    return precondition(lambda self: possible(self.world))(rule(data=st.data())(step))


for act, _, possible in ACTS:
    setattr(Machine, act.__name__, rule_of(act, possible))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_pool_is_as_the_model(variant: Variant) -> None:
    run_state_machine_as_test(type("Variant", (Machine,), {"variant": variant}), settings=BEHAVIOUR)


def live_long(variant: Variant, seed: int, steps: int) -> None:
    world = Acts(random.Random(seed).randrange, variant)
    for _ in range(steps):
        possible = [(act, weight) for act, weight, is_possible in ACTS if is_possible(world)]
        pick = world.choose(sum(weight for _, weight in possible))
        for act, weight in possible:
            if pick < weight:
                act(world)
                break
            pick -= weight
        world.now += 1.0
        world.check()
        if len(world.quarantined) > SLABS // 2:
            break
    world.end()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", range(3))
def test_a_long_life(variant: Variant, seed: int) -> None:
    live_long(variant, seed, STEPS)


@pytest.mark.full
@pytest.mark.parametrize("variant", VARIANTS)
def test_many_long_lives(variant: Variant) -> None:
    for seed in range(3, 3 + MANY_STEPS // STEPS):
        live_long(variant, seed, STEPS)
