"""colibri-bench: the machine's rates, what a test costs at least, and that what is timed is the real computation."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from colibri_engine import Engine
from colibri_engine.bench import probe
from colibri_engine.bench.ceiling import Model, Work
from colibri_engine.bench.cli import bench
from colibri_engine.bench.probe import Ceilings
from colibri_engine.bench.run import Bench, Case, DecodeBatch, Rewindable
from colibri_engine.container import Manifest
from colibri_engine.errors import ColibriError
from colibri_engine.selftest import available
from fixtures.models import Models

KEYS = ["test", "n", "depth", "batch", "threads", "tokens_per_s", "share_of_ceiling",
        "ceiling_tokens_per_s", "machine"]  # fmt: skip
# checkpoints.MIXTRAL with sizes that are not alike
GEOMETRY = {"vocab": 96, "hidden": 64, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 16, "inter": 128,
            "experts": 8, "top_k": 2}  # fmt: skip
# Products of a token, from the shapes: projections of attention; an expert's three matrices; router; head.
ATTENTION, EXPERT, ROUTER, HEAD = 64 * 64 * 2 + 64 * 32 * 2, 3 * 64 * 128, 8 * 64, 96 * 64


def run(*args: object) -> Result:
    result = CliRunner().invoke(bench, [str(a) for a in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def manifest(models: Models) -> Manifest:
    return Manifest.load(models.random(GEOMETRY, "q4"))


# ---- the machine ----


@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize("threads", [1, 2])
def test_rates_of_the_machine(isa: str, threads: int) -> None:
    found = probe.measure(isa, threads, runs=1)
    for rate in (found.read, found.int8, found.f32):
        assert math.isfinite(rate)
        assert rate > 0
    assert isa in str(found)


def test_what_cannot_be_probed_is_said() -> None:
    with pytest.raises(ColibriError, match="0 threads"):
        probe.measure("ref", 0)
    if "avx512" not in available():
        with pytest.raises(ColibriError, match="no avx512"):
            probe.measure("avx512", 1)


# ---- the least a test can cost ----


def test_products_of_a_prefill(manifest: Manifest) -> None:
    """Every token passes attention, router and two experts of every layer; one has logits."""
    work = Model(manifest, 1.0).work(tokens=10, heads=1, steps=1, experts_read=24, kv_tokens=10)
    assert work.int8 == 2 * (10 * 3 * (ATTENTION + 2 * EXPERT) + HEAD)
    assert work.f32 == 2 * 10 * 3 * ROUTER


def test_bytes_of_a_decode_step(manifest: Manifest) -> None:
    """Attention, norms, router and head once a step, the experts that were used, and the keys; no embedding."""
    work = Model(manifest, 7.0).work(tokens=4, heads=4, steps=4, experts_read=24, kv_tokens=100)
    panels = {t.name: t.bytes for t in manifest.tensors}
    dense = sum(n for name, n in panels.items() if "expert" not in name and "embed" not in name)
    expert = sum(n for name, n in panels.items() if ".layers.0." in name and ".experts.3." in name)
    assert work.bytes == 4 * dense + 24 * expert + 700


def test_float_weights_count_as_float_products(models: Models) -> None:
    work = Model(Manifest.load(models.random(GEOMETRY, "f16")), 0.0).work(1, 1, 1, 6, 1)
    assert work.int8 == 0
    assert work.f32 == 2 * (3 * (ATTENTION + ROUTER + 2 * EXPERT) + HEAD)


def test_a_tied_head_is_read(models: Models) -> None:
    tied = Manifest.load(models.random(GEOMETRY | {"tied_head": 1}, "q8"))
    own = Manifest.load(models.random(GEOMETRY, "q8"))
    assert Model(tied, 0.0).work(1, 1, 1, 6, 1) == Model(own, 0.0).work(1, 1, 1, 6, 1)


def test_the_roofline_is_the_slower_of_reading_and_computing() -> None:
    machine = Ceilings(1, "ref", read=100.0, int8=1000.0, f32=10.0)
    assert Work(bytes=500, int8=1000, f32=10).seconds(machine) == 5
    assert Work(bytes=50, int8=1000, f32=20).seconds(machine) == 3


def test_a_window_bounds_the_keys(models: Models) -> None:
    windowed = Model(Manifest.load(models.golden("mixtral_tied_swa")), 1.0)
    assert [windowed.visible(n) for n in (1, 24, 25, 1000)] == [1, 24, 24, 24]


# ---- running ----


def test_a_decode_batch_computes_what_steps_compute(models: Models) -> None:
    """The batch that is described once gives, step by step, the bits of Engine.step, also when run again."""
    tokens = np.random.default_rng(5).integers(0, 96, (4, 3), dtype=np.uint32)
    with Engine(models.random(GEOMETRY), max_sequences=3) as engine:
        arena = engine.arena(6)

        def streams() -> list[Rewindable]:
            return [Rewindable(engine.attention(None, None, "cache"), engine.info.slab_tokens) for _ in range(3)]

        plain, kept = streams(), streams()
        expected = [
            np.stack([rows[0] for rows in engine.step([(s, row[i : i + 1], 0) for i, s in enumerate(plain)], arena)])
            for row in tokens
        ]
        batch = DecodeBatch(kept, arena, 0, len(tokens))
        for _ in range(2):
            for i, row in enumerate(tokens):
                batch.set(i, row)
                assert engine.forward(batch.entries, 3, arena).tobytes() == expected[i].tobytes()


@pytest.mark.parametrize(("kind", "n"), [("prefill", 400), ("decode", 40)])
def test_work_of_a_run_is_what_was_routed(models: Models, kind: str, n: int) -> None:
    """One stream decoding uses exactly top-k experts a layer and step; a long prefill all of them."""
    folder, case = models.random(GEOMETRY, "q4"), Case(kind, n, 5, 1)
    sizes = Model(Manifest.load(folder), 3 * 2 * 2 * 16 * 2)
    with Bench(folder, 1, [case], None) as engine:
        stream = [engine._stream(case.depth)]
        _, work = (engine._prefill if kind == "prefill" else engine._decode)(case, stream)
    if kind == "prefill":
        assert work == sizes.work(n, 1, 1, 3 * 8, 5 + n)
    else:
        assert work == sizes.work(n, n, n, n * 3 * 2, sum(range(6, 6 + n)))


def test_json_is_the_documented_list(models: Models) -> None:
    result = run("--model", models.random(GEOMETRY, "q8"), "-p", 20, "-n", 3, "-d", "0,70", "-t", "1,2", "-b", "1,4",
                 "-r", 1, "--json")
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert [list(row) for row in rows] == [KEYS] * 12
    one = [("prefill", 20, 0, 1), ("prefill", 20, 70, 1), ("decode", 3, 0, 1), ("decode", 3, 0, 4),
           ("decode", 3, 70, 1), ("decode", 3, 70, 4)]  # fmt: skip
    assert [(*(row[k] for k in KEYS[:4]), row["threads"]) for row in rows] == [(*t, n) for n in (1, 2) for t in one]
    assert all(row["tokens_per_s"] > 0 and row["share_of_ceiling"] > 0 for row in rows)
    for row in rows:
        assert row["ceiling_tokens_per_s"] * row["share_of_ceiling"] == pytest.approx(row["tokens_per_s"])
        assert list(row["machine"]) == ["read_gb_s", "int8_gops", "f32_gflops"]
        assert min(row["machine"].values()) > 0
    assert result.stderr.count("GB/s") == 2


def test_each_repeat_has_the_better_of_the_rates_beside_it(models: Models) -> None:
    """Reading: 1, 3 / 3, 2 / 2, 2; arithmetic as it falls. The share follows the repeat, not one probe for all."""
    rates = iter([(1, 50, 8), (3, 40, 9), (2, 60, 7), (2, 10, 7)])
    folder, case = models.random(GEOMETRY, "q4"), Case("decode", 2, 5, 2)
    with Bench(folder, 1, [case], None) as engine:
        result = engine.run(case, 3, lambda: Ceilings(1, "ref", *map(float, next(rates))))
    assert [(c.read, c.int8, c.f32) for c in result.machine] == [(3, 50, 9), (3, 60, 9), (2, 60, 7)]
    assert next(rates, None) is None
    assert result.share_of_ceiling > 0


def test_table_for_people(models: Models) -> None:
    result = run("--model", models.golden("mixtral_tied_swa"), "-p", 0, "-n", 30, "-t", 1, "-b", 1, "-r", 1,
                 "--isa", "ref")
    assert result.exit_code == 0
    head, row, machine = result.stdout.splitlines()
    assert machine.startswith("machine, 1 thread, ref: read ")
    assert head.split()[:7] == ["test", "n", "depth", "batch", "threads", "tokens/s", "ceiling"]
    measured, ceiling = map(float, row.split()[5:7])
    assert row.split()[7].endswith("%")
    assert measured > 0
    assert ceiling > 0
    assert row.split()[:5] == ["decode", "30", "0", "1", "1"]


@pytest.mark.parametrize("args", [["-t", "0"], ["-t", "x"], ["-t", "1025"], ["-b", "1,,2"], ["-d", "-1"], ["-r", "0"],
                                  ["-p", "0", "-n", "0"], ["--isa", "mmx"]])  # fmt: skip
def test_bad_options_exit_with_2(models: Models, args: list[str]) -> None:
    assert run("--model", models.random(GEOMETRY, "q8"), *args).exit_code == 2


def test_no_model_exits_with_2(tmp_path: Path) -> None:
    result = run("--model", tmp_path / "none")
    assert result.exit_code == 2
    assert "none" in result.stderr
