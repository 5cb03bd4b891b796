"""Progress pages shared between processes, and the request a worker is given, as it travels."""

from __future__ import annotations

import os
from typing import Any

import msgpack
import pytest
from colibri_daemon.common import ipc
from colibri_daemon.common.facts import FileFacts, ModelFacts
from colibri_daemon.common.job import Job
from colibri_daemon.common.pages import MAX_KEYS, PAGE, Field, State, make_pages
from hypothesis import given
from hypothesis import strategies as st

# ---- pages ---------------------------------------------------------------------------------------------------------
WORDS = st.integers(0, (1 << 64) - 1)


@given(index=st.integers(0, PAGE // 8 - 1), value=WORDS)
def test_a_word_is_its_own(index: int, value: int) -> None:
    first, page, last = make_pages(3)
    page[index] = value
    assert page[index] == value
    assert [page[i] for i in range(PAGE // 8) if i != index and page[i]] == []
    assert bytes(first.memory) == bytes(last.memory) == bytes(PAGE)
    page.clear()
    assert bytes(page.memory) == bytes(PAGE)


def test_pages_are_shared_with_children() -> None:
    """And stored as the engine reads and writes them: native 64-bit words."""
    pages = make_pages(2)
    pages[1][Field.TO_LOAD] = 7
    if not (pid := os.fork()):
        pages[1][Field.STEPS] = pages[1][Field.TO_LOAD] << 40
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert pages[1][Field.STEPS] == 7 << 40
    assert bytes(pages[1].memory[8 * Field.STEPS : 8 * Field.STEPS + 8]) == (7 << 40).to_bytes(8, "little")


def test_all_fields_have_room() -> None:
    assert len(set(Field)) == len(Field.__members__)
    assert max(field for field in Field if field is not Field.KEYS) < Field.KEYS
    assert 8 * (Field.KEYS + MAX_KEYS) <= PAGE
    assert State.STARTING == 0  # a cleared page


@pytest.mark.parametrize("value", [-1, 1 << 64, 1.5, None])
def test_no_word_no_store(value: Any) -> None:
    (page,) = make_pages(1)
    with pytest.raises((ValueError, TypeError)):
        page[Field.BUSY] = value
    assert page[Field.BUSY] == 0


# ---- jobs ----------------------------------------------------------------------------------------------------------
IDS = st.lists(st.integers(0, (1 << 32) - 1), max_size=8).map(
    lambda ids: b"".join(i.to_bytes(4, "little") for i in ids))
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
COUNTS = st.integers(0, (1 << 32) - 1)
JOBS = st.builds(
    Job, IDS, max_tokens=COUNTS, min_tokens=COUNTS, temperature=FLOATS, top_k=COUNTS, top_p=FLOATS, min_p=FLOATS,
    repetition_penalty=FLOATS, presence_penalty=FLOATS, frequency_penalty=FLOATS,
    logit_bias=st.dictionaries(COUNTS, FLOATS, max_size=4), seed=st.integers(0, (1 << 64) - 1), stop_ids=IDS,
    eos_ids=IDS, stop_seqs=st.lists(IDS, max_size=3).map(tuple), logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20), score_from=st.none() | COUNTS, generated=IDS, pinned=COUNTS,
    window=COUNTS, positions=st.sampled_from(("cache", "absolute")),
)  # fmt: skip


@given(JOBS)
def test_a_job_arrives_as_it_was_sent(job: Job) -> None:
    ((_, _, body),) = ipc.Unframer().feed(ipc.pack([ipc.ASSIGN, 1, job.to_wire()]))
    assert Job.from_wire(body) == job


def test_defaults_are_not_sent() -> None:
    assert Job(b"\1\0\0\0").to_wire() == {"tokens": b"\1\0\0\0"}
    assert Job(b"", logprobs=0, seed=0, top_p=1.0).to_wire() == {"tokens": b"", "logprobs": 0}


def test_jobs_do_not_share_their_bias() -> None:
    first, second = Job.from_wire({"tokens": b""}), Job.from_wire({"tokens": b""})
    first.logit_bias[1] = 2.0
    assert second.logit_bias == {}
    assert Job(b"").logit_bias == {}


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="bogus"):
        Job.from_wire({"tokens": b"", "bogus": 1})


# ---- facts ---------------------------------------------------------------------------------------------------------
FILE = st.builds(FileFacts, st.text(), COUNTS, COUNTS, COUNTS, COUNTS)
TYPES = {"str": st.text(), "int": COUNTS, "tuple[int, ...]": st.lists(COUNTS).map(tuple),
         "tuple[FileFacts, ...]": st.lists(FILE, max_size=3).map(tuple)}


@given(st.builds(ModelFacts, **{name: TYPES[kind] for name, kind in ModelFacts.__annotations__.items()}))
def test_facts_arrive_as_they_were_sent(facts: ModelFacts) -> None:
    assert ModelFacts.from_wire(msgpack.unpackb(msgpack.packb(facts.to_wire()))) == facts
