"""The KV arena's memory: its size, its seals, who sees it; how many slabs it gets."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from colibri_daemon.common import memory
from colibri_daemon.common.arena import Arena, choose_slabs
from colibri_daemon.common.facts import ModelFacts
from colibri_daemon.common.kv import slabs_needed
from colibri_daemon.common.settings import Settings

MIB = 1 << 20
FACTS = ModelFacts("folder", "made up", "id", "fingerprint", "llama", "q4", 100, 4096, 4096, (1,), 64, 448, "cache",
                   "f16", 64, 5000, 10 * MIB)  # fmt: skip


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.make(100, FACTS)
    yield made
    made.close()


def test_what_it_is(arena):
    assert arena.size == 500_000
    assert arena.geometry == {"slabs": 100, "slab_bytes": 5000, "slab_tokens": 64, "kv_format": "f16"}
    with arena.map() as mapped:
        assert arena.size <= len(mapped) < arena.size + mmap.PAGESIZE
        assert mapped[:] == bytes(len(mapped))


def test_all_who_map_it_see_the_same(arena):
    with arena.map() as one, arena.map() as other:
        one[499_000:500_000] = bytes(range(250)) * 4
        assert other[499_000:500_000] == one[499_000:500_000]


def test_a_child_that_keeps_the_descriptor_sees_it(arena):
    with arena.map() as mapped:
        child = os.fork()
        if child == 0:
            with arena.map() as theirs:
                theirs[7] = 42
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert mapped[7] == 42


@pytest.mark.parametrize("size", [0, 499_000, 1 << 20])
def test_its_size_cannot_be_changed(arena, size):
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, size)


def test_its_pages_are_taken_once(arena):
    told: list[int] = []
    arena.reserve(told.append)
    assert os.fstat(arena.fd).st_blocks * 512 >= arena.size
    assert told[-1] >= arena.size
    with arena.map() as mapped:
        mapped[0] = 1
        arena.reserve(told.append)
        assert mapped[0] == 1
    assert told[-1] == told[-2]


def test_progress_of_reserving():
    """A large one in slices, each of which is told."""
    made = Arena.make(40, replace(FACTS, slab_bytes=4 * MIB))
    told: list[int] = []
    made.reserve(told.append)
    made.close()
    assert told[0] == 64 * MIB
    assert told == sorted(told)
    assert told[-1] == 160 * MIB


def test_pages_are_taken_and_given_back_by_slab():
    """A slab of 1.5 pages here: a page that two slabs share stays."""
    page = mmap.PAGESIZE
    made = Arena.make(6, replace(FACTS, slab_bytes=3 * page // 2))

    def pages() -> int:
        return os.fstat(made.fd).st_blocks * 512 // page

    assert made.extend(0, 2) == 2
    assert pages() == 3
    made.reserve(lambda done: None, 4)
    assert pages() == 6
    with made.map() as mapped:
        mapped[:] = b"x" * len(mapped)
        made.give_back([1, 2])
        assert mapped[3 * page // 2 : 9 * page // 2] == b"x" * (page // 2) + bytes(2 * page) + b"x" * (page // 2)
        assert mapped[: 3 * page // 2] + mapped[9 * page // 2 :] == b"x" * 6 * page
    made.close()


def test_a_large_arena_grows_by_slices():
    made = Arena.make(40, replace(FACTS, slab_bytes=4 * MIB))
    assert [made.extend(0, 40), made.extend(16, 40), made.extend(32, 40)] == [16, 32, 40]
    made.close()


def test_other_memory_is_refused(arena):
    """Too small, too large, not sealed: whoever maps it must be able to rely on what was checked."""
    fd = os.memfd_create("other")
    for size in (400_000, 503_808, 600_000):
        os.ftruncate(fd, size)
        with pytest.raises(ValueError, match="the KV arena has"):
            replace(arena, fd=fd).map()
    os.close(fd)
    with pytest.raises(ValueError, match="the KV arena has"):
        replace(arena, slabs=99).map()


def test_nothing_is_left_when_all_have_closed_it(arena):
    mapped, inode = arena.map(), os.fstat(arena.fd).st_ino
    spare = replace(arena, fd=os.dup(arena.fd))

    def is_mapped() -> bool:
        return str(inode) in Path("/proc/self/maps").read_text()

    assert is_mapped()
    mapped.close()
    spare.close()
    assert not is_mapped()


@pytest.mark.parametrize(
    ("free", "promised", "is_huge"), [(0, 0, False), (3, 0, True), (2, 0, False), (5, 2, True), (5, 3, False)]
)
def test_huge_pages_are_used_if_enough_are_free(monkeypatch, free, promised, is_huge):
    """5 MiB here. The kernel takes no page before reserve(), so that there may be none in fact."""
    lines = {"HugePages_Free:": free, "HugePages_Rsvd:": promised, "Hugepagesize:": 2048}
    monkeypatch.setattr(memory, "machine", lines.__getitem__)
    made = Arena.make(5, replace(FACTS, slab_bytes=MIB))
    assert (made.page, os.fstat(made.fd).st_size) == ((2 * MIB, 6 * MIB) if is_huge else (mmap.PAGESIZE, 5 * MIB))
    made.close()


@pytest.mark.skipif(memory.machine("HugePages_Free:") < 2, reason="the system has no huge pages")
def test_huge_pages(arena):
    assert arena.page == 1024 * memory.machine("Hugepagesize:")
    arena.reserve(lambda done: None)
    with arena.map() as mapped:
        assert len(mapped) == arena.page


# ---- how many slabs ------------------------------------------------------------------------------------------------


def test_slabs_as_configured():
    assert choose_slabs(Settings(kv_bytes=1_000_000), FACTS, 2_000_000) == 200
    assert choose_slabs(Settings(kv_bytes=1_004_999, workers=3), FACTS, 2_000_000) == 200


@pytest.mark.parametrize(
    ("kv_bytes", "words"), [(4999, "one slab of 64 tokens takes 5000: raise kv_bytes"), (3 * MIB, "lower kv_bytes")]
)
def test_what_cannot_be(kv_bytes, words):
    with pytest.raises(ValueError, match=words):
        choose_slabs(Settings(kv_bytes=kv_bytes), FACTS, 2 * MIB)


def test_slabs_by_itself():
    each = slabs_needed(4096, 64, 448, 512, 64)
    assert choose_slabs(Settings(max_seqs=3, workers=2), FACTS, 1 << 40) == 6 * each
    assert choose_slabs(Settings(), FACTS, 12 * MIB) == MIB // 5000  # half of what the weights leave
    with pytest.raises(ValueError, match="give the daemon more memory"):
        choose_slabs(Settings(), FACTS, 10 * MIB)


def test_lines_of_meminfo(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("HugePages_Free:      12\nHugepagesize:       2048 kB\n")
    assert memory.machine("HugePages_Free:", tmp_path) == 12
    assert memory.machine("Hugepagesize:", tmp_path) == 2048
    assert memory.machine("HugePages_Rsvd:", tmp_path) == 0
