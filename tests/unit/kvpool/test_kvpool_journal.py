"""The journal: a record cut off at any byte is none, and what is not ours is not read."""

from __future__ import annotations

import pytest
from colibri_daemon.kvpool.journal import Entry, Journal

T, SLABS = 4, 3
OLD = Entry(1, b"\1" * 32, b"\2" * 32, 7, 6, 3, 99, 1.5, True, b"m" * 9, b"old tokens      ")
NEW = Entry(1, b"\3" * 32, b"\4" * 32, 9, 8, 5, 1 << 31, 2.5, False, b"n" * 9, b"new tokens      ")


def journal(memory: bytearray, slabs: int = SLABS, slab_tokens: int = T, identity: bytes = b"model") -> Journal:
    return Journal(memoryview(memory), slabs, slab_tokens, identity)


@pytest.fixture
def memory() -> bytearray:
    memory = bytearray(Journal.size(SLABS, T))
    journal(memory).format()
    return memory


def test_records_are_read_as_written(memory: bytearray) -> None:
    journal(memory).write(OLD)
    journal(memory).write(Entry(2, quarantined=True))
    quarantined = Entry(2, bytes(32), bytes(32), tokens=bytes(T * 4), quarantined=True)
    assert journal(memory).load() == [OLD, quarantined]
    journal(memory).erase(1)
    assert [entry.slab for entry in journal(memory).load()] == [2]


def test_why_another_life_s_records_are_none(memory: bytearray) -> None:
    assert journal(memory).why_not() == ""
    assert Journal(memory, SLABS, T, b"other").why_not() == "it is of another identity"
    assert Journal(memory, SLABS - 1, T, b"other").why_not() == "it is of another slabs and identity"
    memory[40] += 1
    assert journal(memory).why_not() == "it is of another version"
    memory[40] -= 1
    memory[44] = 0  # of the magic number: cut off while it was being formatted
    assert journal(memory).why_not() == "its header is not whole"
    assert Journal(bytearray(len(memory)), SLABS, T, b"model").why_not() == ""  # new memory


class KilledError(Exception):
    pass


class Memory(bytearray):
    """Stores byte by byte; the writer is killed before the one behind ``left``."""

    left = 0

    def __setitem__(self, where: slice, data: bytes) -> None:  # type: ignore[override]
        for at, byte in enumerate(data, where.start):
            if not self.left:
                raise KilledError
            self.left -= 1
            super().__setitem__(at, byte)


def test_a_record_cut_off_at_any_byte_is_none(memory: bytearray) -> None:
    journal(memory).write(OLD)
    outcomes, stores = [], 4 + len(NEW.digest + NEW.parent + NEW.mask + NEW.tokens) + 33 + 4 + 4
    for n in range(stores):
        torn = Memory(memory)
        torn.left = n
        with pytest.raises(KilledError):
            Journal(torn, SLABS, T, b"model").write(NEW)  # type: ignore[arg-type]
        outcomes.append(journal(torn).load())
    assert outcomes == [[OLD]] + [[]] * (stores - 1)
    torn.left = stores
    Journal(torn, SLABS, T, b"model").write(NEW)  # type: ignore[arg-type]
    assert journal(torn).load() == [NEW]


def test_a_record_with_any_wrong_byte_is_none(memory: bytearray) -> None:
    journal(memory).write(NEW)
    found = set()
    for at in range(len(memory)):
        torn = bytearray(memory)
        torn[at] ^= 1
        found |= {(entry.slab, entry) for entry in journal(torn).load()}
    assert found == {(1, NEW)}


@pytest.mark.parametrize("other", [{"identity": b"other"}, {"slab_tokens": 2}, {"slabs": 2}])
def test_other_identities_and_geometries_are_not_ours(memory: bytearray, other: dict) -> None:
    journal(memory).write(OLD)
    assert not journal(memory, **other).is_ours()
    assert journal(memory, **other).load() == []
    journal(memory, **other).format()
    assert not journal(memory).is_ours()


def test_a_short_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="are needed"):
        journal(bytearray(Journal.size(SLABS, T) - 1))
