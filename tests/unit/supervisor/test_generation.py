"""What a pool can be shared by, and how much memory two of them take."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from colibri_daemon.common import memory
from colibri_daemon.common.pages import make_pages
from colibri_daemon.common.settings import Settings, load_settings
from colibri_daemon.supervisor.children import Goal
from colibri_daemon.supervisor.generation import Pool
from colibri_daemon.supervisor.kv_memory import KvMemory
from colibri_daemon.supervisor.lifecycle import NEVER, State
from colibri_daemon.supervisor.reloading import refusals
from colibri_daemon.supervisor.roles import Roles
from fixtures.descriptors import descriptors
from supervised import FACTS

SLAB = FACTS.slab_bytes
LEAST = 2  # slabs of the longest request


def settings(**values: object) -> Settings:
    return load_settings({"model": "m", "kv_bytes": str(10 * SLAB)} | values, {})


@pytest.fixture
def make() -> Iterator[Callable[..., Pool]]:
    made = []

    def pool(taken: int = 0, **values: object) -> Pool:
        chosen = settings(**values)
        made.append(KvMemory.make(chosen, FACTS, taken))
        return Pool(Roles().kvpool, make_pages(1)[0], itertools.count(1), False, 1, made[-1], chosen, FACTS, taken)

    yield pool
    for one in made:
        one.close()


@pytest.mark.parametrize(
    ("values", "fits"),
    [
        ({}, True),
        ({"workers": 3, "max_seqs": 2, "log_level": "error", "kv_eviction": "lfu"}, True),
        ({"kv_bytes": str(10 * SLAB + 5)}, True),  # as many slabs
        ({"kv_bytes": str(11 * SLAB)}, False),
        ({"kv_bytes": None}, False),
    ],
)
def test_who_can_share_a_pool(make, values, fits):
    assert make().fits(settings(**values), FACTS) is fits


@pytest.mark.parametrize(
    "values", [{"id": "x"}, {"fingerprint": "x"}, {"kv_format": "f32"}, {"slab_bytes": 2048}, {"slab_tokens": 128}]
)
def test_slabs_that_mean_something_else_cannot_be_shared(make, values):
    assert not make().fits(settings(), replace(FACTS, **values))
    assert make().fits(settings(), replace(FACTS, name="renamed", max_len=7, window=1))


def test_a_default_is_not_decided_anew(make):
    assert make(kv_bytes=None).fits(settings(kv_bytes=None, workers=5), FACTS)


def test_what_goes_is_not_shared(make):
    retired, stopped = make(), make()
    retired.retired = True
    stopped.aim(Goal.STOP)
    assert not retired.fits(settings(), FACTS)
    assert not stopped.fits(settings(), FACTS)


def test_what_needs_another_process(make):
    pool = make()
    assert not pool.adopt(settings(workers=3))
    assert pool.adopt(settings(kv_eviction="lfu"))
    assert not pool.adopt(settings(kv_eviction="lfu"))
    assert pool.adopt(settings(kv_eviction="lfu", hang_seconds="3"))


@pytest.mark.parametrize(("taken", "usable"), [(0, 10), (1, 9), (4 * SLAB, 6), (9 * SLAB, LEAST), (99 * SLAB, LEAST)])
def test_what_arenas_take_together(make, taken, usable):
    """No more than kv_bytes, but for what one request of full length needs."""
    pool = make(taken)
    assert (pool.usable, pool.held, pool.bytes) == (usable, usable, usable * SLAB)


def test_it_grows_into_what_others_give_back_and_never_shrinks(make):
    pool = make(99 * SLAB)
    grown = [pool.widen(taken * SLAB) for taken in (9, 8, 5, 5, 7, 0, 0)]
    assert grown == [False, False, True, False, False, True, False]
    assert (pool.usable, pool.bytes) == (10, 10 * SLAB)
    retired = make(99 * SLAB)
    retired.retired = True
    assert not retired.widen(0)


def test_too_little_memory_for_a_second_arena(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: LEAST * SLAB - 1)
    with pytest.raises(ValueError, match="for one request of full length.*lower max_tokens_total, or restart"):
        KvMemory.make(settings(), FACTS, taken=10 * SLAB)
    monkeypatch.setattr(memory, "available", lambda: LEAST * SLAB)
    KvMemory.make(settings(), FACTS, taken=10 * SLAB).close()
    with pytest.raises(ValueError, match="lower kv_bytes"):  # the first one must fit as a whole
        KvMemory.make(settings(), FACTS)


@pytest.mark.parametrize(
    ("faulted", "ended", "missed"),
    [(NEVER, NEVER, None), (5.0, NEVER, None), (NEVER, 5.0, None), (5.0, 5.5, 5.0), (5.0, 6.5, None), (7.0, 5.0, 7.0)],
)
def test_a_fault_that_the_former_process_may_have_missed(make, faulted, ended, missed):
    pool = make()
    pool.faulted, pool.ended = faulted, ended
    assert pool.missed_fault == missed


def test_what_the_next_life_is_to_doubt(make):
    """A second before now, if the pool hears everything; else what it has not heard of."""
    pool = make()
    assert pool.missed_fault is None
    assert pool.doubt(100.0) == 99.0
    pool.faulted, pool.ended = 50.0, 50.5
    assert pool.doubt(100.0) == 50.0
    pool.life = replace(pool.life, state=State.READY)  # it was told at its start
    assert pool.doubt(100.0) == 99.0


def test_the_next_life_doubts_it(make):
    pool = make()
    pool.memory.note.beat(0.5, served=True)
    after = Pool(Roles().kvpool, make_pages(1)[0], itertools.count(1), False, 1, pool.memory, settings(), FACTS, 0)
    assert after.missed_fault == 0.5
    pool.memory.note.end()
    after = Pool(Roles().kvpool, make_pages(1)[0], itertools.count(1), False, 1, pool.memory, settings(), FACTS, 0)
    assert after.missed_fault is None


def test_what_cannot_be_changed_is_named_with_where_it_stands(tmp_path):
    file = tmp_path / "config"
    file.write_text('model = "m"\nsocket = "/x"\nsocket_mode = "0600"\nworkers = 3\n')
    old, new = load_settings({"model": "m", "socket": "/y"}, {}), load_settings({}, {}, file)
    found = refusals(old, new)
    assert [line.split(": ")[0] for line in found] == [f"{file}:2", f"{file}:3"]
    assert "socket cannot be changed" in found[0]
    assert "restart it, or set it back to /y" in found[0]
    assert refusals(new, load_settings({"workers": "7"}, {}, file)) == []
    file.write_text("")
    assert refusals(old, load_settings({"socket": "/y"}, {}, file)) == ["model: is not set"]


def test_descriptors_of_pages_end_with_the_pages():
    before = descriptors()
    pages = make_pages(3)
    assert descriptors() > before
    del pages
    assert descriptors() == before
