"""A KV cache that comes back from the former life of the service: what is used, what is refused and why."""

from __future__ import annotations

import fcntl
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from colibri_daemon.common.settings import Settings, load_settings
from colibri_daemon.supervisor.fdstore import ARENA, JOURNAL, NOTE, FdStore
from colibri_daemon.supervisor.kv_memory import MOST_STARTS, KvMemory
from colibri_daemon.supervisor.kv_note import SIZE, Note, about, refusal
from supervised import FACTS
from test_fdstore import Told

SLAB = FACTS.slab_bytes
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def settings(**values: object) -> Settings:
    return load_settings({"model": "m", "kv_bytes": str(10 * SLAB)} | values, {})


class Life:
    """What one life leaves, by kind."""

    def __init__(self) -> None:
        self.memory = KvMemory.make(settings(), FACTS)
        self.memory.arena.reserve(lambda done: None)
        self.fds = {ARENA: self.memory.arena.fd, JOURNAL: self.memory.journal, NOTE: self.memory.note.fd}

    def next(self, chosen: Settings | None = None) -> tuple[KvMemory | None, Told]:
        told = Told()
        store = FdStore(told, [(kind, os.dup(fd)) for kind, fd in self.fds.items()])
        return KvMemory.kept(store, chosen or settings(), FACTS), told


@pytest.fixture
def life() -> Iterator[Life]:
    made = Life()
    yield made
    for fd in made.fds.values():
        os.close(fd)


def test_it_is_used_as_it_is(life):
    os.pwrite(life.memory.arena.fd, b"keys", 3 * SLAB)
    kept, told = life.next()
    assert told.messages == []  # and stays in the store
    assert kept.arena.geometry == life.memory.arena.geometry
    assert os.pread(kept.arena.fd, 4, 3 * SLAB) == b"keys"
    assert kept.usable(0) == 10
    kept.close()


def test_nothing_is_there():
    assert KvMemory.kept(FdStore(Told()), settings(), FACTS) is None


# ---- what it was made for --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("then", "now", "facts", "reason"),
    [
        ({}, {}, {}, ""),
        ({}, {"log_level": "error", "workers": 3}, {}, ""),
        ({}, {"kv_bytes": str(10 * SLAB + 5)}, {}, ""),  # as many slabs
        ({}, {"kv_bytes": str(11 * SLAB)}, {}, "its slabs is 10, not 11"),
        ({}, {"kv_bytes": None}, {}, f"its kv_bytes is {10 * SLAB}, not 0"),
        ({"kv_bytes": None}, {"kv_bytes": None}, {}, ""),
        ({"kv_bytes": None}, {}, {}, ""),
        ({"kv_bytes": None}, {"kv_bytes": None, "max_seqs": 5}, {}, "its most is"),
        ({}, {}, {"id": "other"}, "its model is"),
        ({}, {}, {"fingerprint": "other"}, "its fingerprint is"),
        ({}, {}, {"kv_format": "f32"}, "its kv_format is"),
        ({}, {}, {"slab_tokens": 128}, "its slab_tokens is"),
        ({}, {}, {"slab_bytes": 2 * SLAB}, "its slab_bytes is"),
    ],
)
def test_what_it_was_made_for(then, now, facts, reason):
    kept = json.loads(json.dumps(about(settings(**then), FACTS, 10)))
    found = refusal(kept, settings(**now), replace(FACTS, **facts))
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


@pytest.mark.parametrize("slabs", [None, 0, -1, 1.0, True, "10", [10], 1 << 40, 1e400])
def test_no_number_of_slabs(slabs):
    kept = about(settings(), FACTS, 10) | {"slabs": slabs}
    assert refusal(kept, settings(), FACTS).startswith("its note names")


@pytest.mark.parametrize("kept", [{}, {"slabs": 10}, {"slabs": 10, "form": [], "model": {}}])
def test_a_note_of_something_else(kept):
    assert refusal(kept, settings(), FACTS)


# ---- what it must be -------------------------------------------------------------------------------------------------


def memfd(size: int, seals: int = 0) -> int:
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def note(text: bytes) -> int:
    fd = memfd(SIZE)
    os.pwrite(fd, text, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


def read_only(fd: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)


Maker = Callable[[Life], int]
HOSTILE: list[tuple[str, Maker, str]] = [
    (ARENA, lambda life: memfd(10 * SLAB), "the KV arena has"),
    (ARENA, lambda life: memfd(9 * SLAB, SEALS), "the KV arena has"),
    (ARENA, lambda life: memfd(0, SEALS), "the KV arena has 0 bytes"),
    (ARENA, lambda life: memfd(10 * SLAB, SEALS | fcntl.F_SEAL_WRITE), "its arena cannot be written"),
    (ARENA, lambda life: read_only(life.fds[ARENA]), "its arena cannot be written"),
    (ARENA, lambda life: os.open(os.devnull, os.O_RDWR), "its arena is no memory file"),
    (ARENA, lambda life: os.pipe()[0], "its arena is no memory file"),
    (ARENA, lambda life: os.open("/", os.O_RDONLY), "its arena is no memory file"),
    (JOURNAL, lambda life: memfd(100, SEALS), "its journal cannot be written"),
    (JOURNAL, lambda life: os.dup(life.fds[ARENA]), "its journal cannot be written"),
    (JOURNAL, lambda life: read_only(life.fds[JOURNAL]), "its journal cannot be written"),
    (JOURNAL, lambda life: os.open(__file__, os.O_RDONLY), "its journal is no memory file"),
    (NOTE, lambda life: memfd(SIZE), "its note has 4096 bytes and seals 0x0"),
    (NOTE, lambda life: memfd(SIZE - 1, SEALS), "its note has 4095 bytes"),
    (NOTE, lambda life: os.dup(life.fds[JOURNAL]), "its note has 0 bytes"),
    (NOTE, lambda life: note(b""), "its note cannot be read"),
    (NOTE, lambda life: note(b"[" * 4000), "its note cannot be read"),
    (NOTE, lambda life: note(b"[1]\n"), "its note cannot be read"),
    (NOTE, lambda life: note(b"9" * 4080), "its note cannot be read"),
    (NOTE, lambda life: note(random.Random(2).randbytes(SIZE)), "its note cannot be read"),
    (NOTE, lambda life: note(b"{}\n"), "its note names None slabs"),
]


@pytest.mark.parametrize(("kind", "make", "reason"), HOSTILE)
def test_what_is_not_right_is_refused(life, caplog, kind, make, reason):
    """With the reason, out of the store, and with its memory free at once; what lies on a disk is not touched."""
    stood = os.stat(__file__).st_size
    fd = make(life)
    os.close(life.fds[kind]) if life.fds[kind] != fd else None
    life.fds[kind] = fd
    kept, told = life.next()
    assert kept is None
    assert [message["FDNAME"] for message, _ in told.messages if "FDSTOREREMOVE" in message] == [ARENA, JOURNAL, NOTE]
    assert reasons(caplog) == [reason] or reasons(caplog)[0].startswith(reason)
    if kind != ARENA:
        assert os.fstat(life.fds[ARENA]).st_blocks == 0
    assert os.stat(__file__).st_size == stood


def reasons(caplog: Any) -> list[str]:
    return [record.__dict__.get("fields", record.__dict__).get("reason", "") for record in caplog.records]


@pytest.mark.parametrize("missing", [ARENA, JOURNAL, NOTE])
def test_one_is_missing(life, caplog, missing):
    fd = life.fds.pop(missing)
    kept, _ = life.next()
    os.close(fd)
    assert kept is None
    assert reasons(caplog) == [f"{missing} is not there"]


def test_what_no_start_comes_of_is_given_up(life, caplog):
    """Something in it may be why."""
    for _ in range(MOST_STARTS):
        kept, _ = life.next()
        kept.close()
    assert life.next()[0] is None
    assert reasons(caplog) == ["the service has not become ready with it 2 times in a row"]


def test_a_start_that_served_does_not_count(life):
    for _ in range(MOST_STARTS + 2):
        kept, _ = life.next()
        kept.note.beat(time.monotonic(), served=True)
        kept.close()


# ---- the note's numbers ----------------------------------------------------------------------------------------------


def test_what_the_next_life_doubts():
    made = Note.make({})
    again = Note(os.dup(made.fd))
    assert again.doubt is None
    now = time.monotonic()
    made.beat(now, served=False)
    assert again.doubt == pytest.approx(now)
    made.beat(now + 1e6, served=False)  # not of this boot, or nonsense: all of it
    assert again.doubt == 0.0
    made.beat(0.0, served=False)
    assert again.doubt == pytest.approx(0.0, abs=1e-6)
    made.end()
    assert again.doubt is None
    again.close()
    made.close()


def test_a_note_that_is_too_long():
    with pytest.raises(ValueError, match="a note of"):
        Note.make({"x": "y" * SIZE})
