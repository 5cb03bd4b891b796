"""What the engine's callbacks give, through the policies and the store of fixtures/policies.py."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from colibri_engine import Engine, EngineError
from colibri_engine._colibri import lib
from colibri_engine.callbacks import Callbacks, keep_words
from colibri_engine.sequence import Sequence
from fixtures.models import TEXT, Models, golden_arrays
from fixtures.policies import (
    SLAB,
    Budget,
    Decoder,
    ExpertStore,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    PinnedWindow,
    PinnedWindowRange,
)


def tiny_text(n: int) -> np.ndarray:
    return golden_arrays(TEXT / "tiny")["long_ids"][:n].astype(np.uint32)


def perplexity(logits: np.ndarray, tokens: np.ndarray) -> float:
    x = logits[:-1].astype(np.float64)
    total = np.log(np.exp(x - x.max(1, keepdims=True)).sum(1)) + x.max(1)
    return float(np.exp(np.mean(total - x[np.arange(len(x)), tokens[1:]])))


# ---- eviction policies -------------------------------------------------------------------------------------------


POLICIES = [LeastRecentlyUsed, LeastFrequentlyUsed]


@pytest.mark.parametrize("policy", [PinnedWindow, PinnedWindowRange])
@pytest.mark.parametrize(("fmt", "pinned", "window"), [("f32", 5, 19), ("f32", 0, 16), ("q4", 32, 33)])
def test_pinned_window_policy_equals_the_engines_own_mask(
    models: Models, policy: type[PinnedWindow | PinnedWindowRange], fmt: str, pinned: int, window: int
) -> None:
    tokens = tiny_text(90)
    with Engine(models.tiny(fmt), slab_tokens=SLAB) as engine:
        own = Decoder(engine, 90, pinned, window).run(tokens)
        full = Decoder(engine, 90).run(tokens)
    with Engine(models.tiny(fmt), slab_tokens=SLAB, callbacks=policy(pinned, window)) as engine:
        assert Decoder(engine, 90).run(tokens).tobytes() == own.tobytes()
    assert own[: pinned + window].tobytes() == full[: pinned + window].tobytes()
    assert own[pinned + window].tobytes() != full[pinned + window].tobytes()


@pytest.mark.parametrize("policy", POLICIES)
def test_budget_is_kept_and_the_text_still_makes_sense(models: Models, policy: type[Budget]) -> None:
    tokens, budget = tiny_text(320), 64
    with Engine(models.tiny(), slab_tokens=SLAB) as engine:
        whole = perplexity(engine.logits(tokens), tokens)
        assert engine.info.numerics_class == "exact"
    watched = policy(budget)
    with Engine(models.tiny(), slab_tokens=SLAB, callbacks=watched) as engine:
        assert engine.info.numerics_class == "evicting"
        logits = Decoder(engine, 320).run(tokens)
    assert np.isfinite(logits).all()
    assert all(alive.sum() == budget for alive in watched.alive.values())
    assert watched.most_visible == budget
    assert perplexity(logits, tokens) < 1.15 * whole  # 1.06 and 0.97; evicting the newest first gives 1.4


@pytest.mark.parametrize("policy", POLICIES)
def test_slabs_of_evicted_positions_can_be_given_back(models: Models, policy: type[Budget]) -> None:
    tokens = tiny_text(320)
    with Engine(models.tiny(), slab_tokens=SLAB, callbacks=policy(24)) as engine:
        kept = Decoder(engine, 320).run(tokens)
    watched = policy(24)
    with Engine(models.tiny(), slab_tokens=SLAB, callbacks=watched) as engine:
        decoder = Decoder(engine, 320)
        rows = []
        for token in tokens:
            rows.append(decoder.step([token]))
            for slab in watched.dead_slabs():
                decoder.sequence.give_back(decoder.arena, slab)
        assert np.concatenate(rows).tobytes() == kept.tobytes()
        assert decoder.arena.free == len(watched.dead_slabs()) > 0


def test_keeping_a_position_without_its_slab_fails(models: Models) -> None:
    hidden = PinnedWindow(0, 8)
    with Engine(models.tiny(), slab_tokens=SLAB, callbacks=hidden) as engine:
        decoder = Decoder(engine, 40)
        decoder.run(tiny_text(36))
        decoder.sequence.give_back(decoder.arena, 0)
        good = decoder.step([7])
        hidden.window = 40
        with pytest.raises(EngineError) as caught:
            decoder.step([7])
        assert caught.value.status == lib.COLIBRI_KV_SLAB
        assert np.isfinite(good).all()


def test_a_step_tells_sequences_apart(models: Models) -> None:
    class HideFromFive(Callbacks):
        def kv_keep(self, id: int, layer: int, n: int) -> np.ndarray | None:
            return np.arange(n) >= n - 4 if id == 5 else None

    tokens = tiny_text(33)
    with Engine(models.tiny()) as engine:
        plain = engine.logits(tokens, 0, 0)[-1]
    with Engine(models.tiny(), callbacks=HideFromFive()) as engine:
        arena = engine.arena(2)
        both = [Sequence(engine.attention(0, 0, "cache"), engine.info.slab_tokens, id) for id in (5, 9)]
        engine.step([(s, tokens[:32], 32) for s in both], arena)
        five, nine = engine.step([(s, tokens[32:], 0) for s in both], arena)
        assert nine.tobytes() == plain.tobytes()
        assert five.tobytes() != plain.tobytes()


@pytest.mark.parametrize("n", [1, 63, 64, 65, 200])
def test_keep_list_forms_are_the_same_bits(n: int) -> None:
    kept = np.random.default_rng(n).random(n) < 0.5
    words = keep_words(kept, n)
    assert [bool(int(words[i // 64]) >> i % 64 & 1) for i in range(n)] == kept.tolist()
    assert keep_words(words.astype(np.uint64), n).tobytes() == words.tobytes()


@pytest.mark.parametrize("wrong", [np.ones(9, bool), np.ones(10, np.int64), np.ones(2, np.uint64), [True] * 11])
def test_keep_lists_of_another_shape_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"must be bool \[10\] or uint64 \[1\]"):
        keep_words(wrong, 10)


# ---- expert fetch ------------------------------------------------------------------------------------------------


@pytest.fixture
def store(models: Models) -> Iterator[ExpertStore]:
    store = ExpertStore(models.tiny("q8"), 8)
    yield store
    store.close()


def test_expert_store_gives_the_bits_of_the_map(models: Models, store: ExpertStore) -> None:
    tokens = tiny_text(60)
    with Engine(models.tiny("q8")) as engine:
        mapped = engine.logits(tokens, chunk=25)
    with Engine(models.tiny("q8"), 2, callbacks=store, expert_tokens=True) as engine:
        assert engine.logits(tokens, chunk=25).tobytes() == mapped.tobytes()
        assert engine.expert_tokens is not None
        assert engine.expert_tokens.sum(1).tolist() == [60 * engine.info.top_k] * engine.info.layers
    assert store.settled()
    assert store.reads > 8, "the store never had to evict"


def test_exactly_the_routed_experts_are_fetched(models: Models, store: ExpertStore) -> None:
    with Engine(models.tiny("q8"), callbacks=store, expert_tokens=True) as engine:
        decoder, counters = Decoder(engine, 30), engine.expert_tokens
        assert counters is not None
        for token in tiny_text(30):
            store.fetched.clear()
            counters[:] = 0
            decoder.step([token])
            assert store.fetched == [(layer, np.flatnonzero(row).tolist()) for layer, row in enumerate(counters)]
            assert (counters.sum(1) == engine.info.top_k).all()
    assert not store.leased


def test_fetched_experts_are_released_on_cancel(models: Models, store: ExpertStore) -> None:
    tokens = tiny_text(20)
    with Engine(models.tiny("q8"), callbacks=store) as engine:
        whole = engine.logits(tokens)
        store.fetched.clear()
        store.released.clear()
        fetch = store.expert_fetch

        def cancelling(layer: int, experts: np.ndarray) -> list[tuple[Any, int]]:
            if layer == 2:
                engine.cancel()
            return fetch(layer, experts)

        store.expert_fetch = cancelling  # type: ignore[method-assign]
        with pytest.raises(EngineError) as caught:
            engine.logits(tokens)
        assert caught.value.status == lib.COLIBRI_CANCELLED
        assert store.released == [0, 1, 2]
        assert store.settled()
        store.expert_fetch = fetch  # type: ignore[method-assign]
        assert engine.logits(tokens).tobytes() == whole.tobytes()  # the flag was cleared


class Spoiled(ExpertStore):
    """A store whose lease for one expert of layer 1 is changed by `spoil`."""

    spoil: Callable[[list[tuple[Any, int]]], Any]

    def expert_fetch(self, layer: int, experts: np.ndarray) -> Any:
        loans = super().expert_fetch(layer, experts)
        return self.spoil(loans) if layer == 1 else loans


UNUSABLE = {
    "misaligned": lambda loans: [(memoryview(loans[0][0])[32:], loans[0][1]), *loans[1:]],
    "short": lambda loans: [*loans[:-1], (memoryview(loans[-1][0])[:-64], loans[-1][1])],
    "empty": lambda loans: [(b"", loans[0][1]), *loans[1:]],
}


@pytest.mark.parametrize("spoil", UNUSABLE.values(), ids=UNUSABLE)
def test_unusable_leases_fail_the_step_and_are_released(models: Models, spoil: Any) -> None:
    store = Spoiled(models.tiny("q8"), 8)
    store.spoil = spoil
    with Engine(models.tiny("q8"), callbacks=store) as engine:
        with pytest.raises(EngineError) as caught:
            engine.logits(tiny_text(5))
        assert caught.value.status == lib.COLIBRI_CALLBACK
    assert store.released == [0, 1]
    assert store.settled()
    store.close()


def test_a_fetch_of_too_few_experts_is_refused_without_release(models: Models) -> None:
    store = Spoiled(models.tiny("q8"), 8)
    store.spoil = lambda loans: loans[1:]
    with Engine(models.tiny("q8"), callbacks=store) as engine, pytest.raises(ValueError, match="layer 1"):
        engine.logits(tiny_text(5))
    assert store.released == [0]
    store.close()


# ---- exceptions, log, progress and cancel ------------------------------------------------------------------------


class OutOfOrderError(Exception):
    pass


def failing(method: str) -> Callbacks:
    def fail(self: Callbacks, *args: Any) -> Any:
        raise OutOfOrderError(method)

    return type("Failing", (Callbacks,), {method: fail})()


@pytest.mark.parametrize("method", ["kv_evict", "kv_keep", "kv_mass", "expert_fetch"])
def test_exceptions_of_callbacks_come_out_of_step(models: Models, method: str) -> None:
    with Engine(models.tiny(), callbacks=failing(method)) as engine:
        decoder = Decoder(engine, 4)
        for _ in range(2):
            with pytest.raises(OutOfOrderError, match=method):
                decoder.step([3])
        assert decoder.sequence.position == 0


def test_exception_of_release_comes_out_of_step(models: Models, store: ExpertStore) -> None:
    def fail(layer: int, leases: list[int]) -> None:
        store.leased.clear()
        raise OutOfOrderError(f"layer {layer}")

    store.expert_release = fail  # type: ignore[method-assign]
    with Engine(models.tiny("q8"), callbacks=store) as engine, pytest.raises(OutOfOrderError, match="layer 0"):
        Decoder(engine, 4).step([3])


def test_exception_of_log_comes_out_of_open(models: Models) -> None:
    with pytest.raises(OutOfOrderError, match="log"):
        Engine(models.tiny(), callbacks=failing("log"))


def test_range_that_is_none_is_refused(models: Models) -> None:
    class Negative(Callbacks):
        def kv_evict(self, id: int, layer: int) -> tuple[int, int]:
            return -1, 2

    with Engine(models.tiny(), callbacks=Negative()) as engine, pytest.raises(OverflowError):
        Decoder(engine, 4).step([3])


def test_log_tells_architecture_and_instruction_set_once(models: Models) -> None:
    class Listener(Callbacks):
        def __init__(self) -> None:
            self.heard: list[tuple[int, str]] = []

        def log(self, level: int, message: str) -> None:
            self.heard.append((level, message))

    listener = Listener()
    with Engine(models.golden("llama"), isa="ref", callbacks=listener) as engine:
        engine.logits(range(10))
    [(level, message)] = listener.heard
    assert level == 2
    assert "llama" in message
    assert "ref" in message


def test_callbacks_without_overrides_change_nothing(models: Models) -> None:
    with Engine(models.tiny()) as engine:
        plain = engine.logits(tiny_text(20))
    with Engine(models.tiny(), callbacks=Callbacks()) as engine:
        assert engine.info.numerics_class == "exact"
        assert engine.logits(tiny_text(20)).tobytes() == plain.tobytes()


def test_another_thread_sees_progress_and_stops_a_prefill(models: Models) -> None:
    tokens = tiny_text(512)
    with Engine(models.tiny(), max_tokens=512, progress=True) as engine:
        engine.logits(tokens)
        whole = engine.progress
    seen: list[int] = []
    # The reference kernels give the same bits and chunks in many times the time.
    with Engine(models.tiny(), max_tokens=512, progress=True, isa="ref") as engine:

        def watch() -> None:
            while len(seen) < 4:
                now = engine.progress
                if now > (seen[-1] if seen else 0):
                    seen.append(now)
            engine.cancel()

        watcher = threading.Thread(target=watch)
        watcher.start()
        with pytest.raises(EngineError) as caught:
            engine.logits(tokens)
        watcher.join()
        assert caught.value.status == lib.COLIBRI_CANCELLED
        assert seen == sorted(set(seen))
        assert seen[-1] <= engine.progress < whole / 2
        assert np.isfinite(engine.logits(tokens[:3])).all()


def test_progress_has_to_be_asked_for(models: Models) -> None:
    with Engine(models.tiny()) as engine:
        assert engine.expert_tokens is None
        with pytest.raises(ValueError, match="progress=True"):
            _ = engine.progress


def test_experts_tokens_are_added_to_the_callers_memory(models: Models) -> None:
    memory = memoryview(mmap.mmap(-1, 4096))
    counts = memory.cast("Q")
    for engine_number in (1, 2):  # the second one goes on where the first one left
        with Engine(models.tiny("q8"), 2, expert_tokens=memory) as engine:
            engine.logits(range(20))
            layers, experts = engine.info.layers, engine.info.experts
            own = [sum(counts[at : at + experts].tolist()) for at in range(0, layers * experts, experts)]
            assert own == [engine_number * 20 * engine.info.top_k] * layers
            assert not any(counts[layers * experts :])


@pytest.mark.parametrize(("memory", "message"), [
    (memoryview(bytearray(8)), "too small"), (memoryview(bytearray(4104))[4:4100], "not aligned"),
])
def test_memory_for_experts_tokens_that_cannot_be_used(models: Models, memory: memoryview, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(models.tiny("q8"), expert_tokens=memory)
