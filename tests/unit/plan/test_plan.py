"""colibrid plan: memory adds up, predictions follow the timed steps, what does not fit has a remedy that works."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from colibri_daemon.common.settings import Settings, load_settings
from colibri_daemon.plan.command import plan
from colibri_daemon.plan.figures import Load
from colibri_daemon.plan.need import Need, need
from colibri_daemon.plan.probe import DEEP_ROWS, Probed, Question, Timed, probe
from colibri_daemon.plan.speed import Line, Steps, distinct_experts, first_tokens
from colibri_daemon.worker.check import check
from colibri_engine import Engine
from colibri_engine.bench.probe import Ceilings
from colibri_engine.container import Manifest
from colibri_engine.slice import first_layers, layer_bytes, layers_of
from fixtures.models import Models


def run(*arguments: object, **environ: str) -> Result:
    clean = {name: None for name in os.environ if name.startswith("COLIBRI_")}
    result = CliRunner().invoke(plan, [str(a) for a in arguments], env=clean | environ)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def document(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--no-speed", "--json")
    assert result.stderr == ""
    found: dict[str, Any] = json.loads(result.stdout)
    assert bool(found["problems"]) == (result.exit_code == 1)
    return found


# ---- the slice ----


def test_all_layers_are_the_model_itself_and_fewer_are_one_too(models: Models) -> None:
    folder = models.tiny("q4")
    manifest, tokens = Manifest.load(folder), [5, 6, 7, 8]
    with Engine.open(folder) as whole, first_layers(folder, manifest, manifest.geometry.layers) as same:
        assert np.array_equal(whole.logits(tokens), same.logits(tokens))
    with first_layers(folder, manifest, 1) as one:
        assert one.info.layers == 1
        assert np.isfinite(one.logits(tokens)).all()


def test_a_slice_has_so_many_bytes_at_least(models: Models) -> None:
    manifest = Manifest.load(models.tiny("q4"))
    assert layers_of(manifest, 0) == 1
    assert layers_of(manifest, layer_bytes(manifest) + 1) == 2
    assert layers_of(manifest, 1 << 40) == manifest.geometry.layers


# ---- prediction ----
BODY, KEY, HEAD = 0.001, 1e-7, 0.002  # seconds a row, a row and key, a text that draws
PASS = 0.010


def made_up(streams: int, depth: int, layers: int = 2, of: int = 8) -> Probed:
    """Of a machine on which costs are as above."""
    def timed(n: int, rows: int, at: int, draws: bool = False) -> Timed:
        return Timed(n, rows, at, draws, PASS + n * rows * (BODY + at * KEY) + draws * n * HEAD, 0.0)

    steps = [timed(1, rows, 0) for rows in (1, 64, 512)] + [timed(1, DEEP_ROWS, depth)]
    for n in {1, streams}:
        steps += [timed(n, 1, 0), timed(n, 1, 0, True), timed(n, 1, depth)]
    return Probed(Ceilings(1, "ref", 1e9, 1e9, 1e9), layers, of, tuple(steps))


@pytest.mark.parametrize("streams", [1, 8])
def test_a_step_is_scaled_to_all_layers_and_the_head_is_not(streams: int) -> None:
    steps = Steps(made_up(streams, 1000), streams, 1000)
    assert steps.decode(streams, 500) == pytest.approx(4 * (PASS + streams * (BODY + 500 * KEY)) + streams * HEAD)
    assert steps.prefill(100, 2000) == pytest.approx(4 * (PASS + 100 * (BODY + 2000 * KEY)) + HEAD)


def test_between_points_and_beyond_them() -> None:
    line = Line([(1, 10), (3, 20), (7, 20)])
    assert [line(x) for x in (0, 1, 2, 3, 5, 7, 9)] == [5, 10, 15, 20, 20, 20, 20]
    assert Line([(4, 3.0)])(100) == 3.0


def test_how_many_experts_are_hit() -> None:
    assert distinct_experts(8, 2, 1) == pytest.approx(2)
    assert distinct_experts(8, 2, 1000) == pytest.approx(8)
    drawn = np.random.default_rng(0)
    hits = [len({e for _ in range(8) for e in drawn.choice(8, 2, replace=False)}) for _ in range(2000)]
    assert distinct_experts(8, 2, 8) == pytest.approx(np.mean(hits), rel=0.02)


def test_first_tokens_are_those_of_the_scheduler(models: Models) -> None:
    settings = load_settings({"model": models.tiny("q4"), "step_tokens": "64"}, {})
    facts, steps = check(settings), Steps(made_up(4, 400), 4, 400)
    found = steps.calibration(facts, 400, 64)
    (alone,) = first_tokens(steps, facts, found, 200, 1, settings)
    assert alone == pytest.approx(sum(steps.prefill(rows, at, int(rows == 8)) for rows, at in
                                      ((64, 0), (64, 64), (64, 128), (8, 192))))  # fmt: skip
    together = first_tokens(steps, facts, found, 200, 4, settings)
    assert together == sorted(together)
    assert together[0] == pytest.approx(alone, rel=0.5)
    assert together[-1] > 3 * alone


def test_steps_are_timed_by_all_workers_at_once(models: Models) -> None:
    settings = load_settings({"model": models.tiny("q4")}, {})
    found = probe(Question(check(settings), threads=1, workers=2, streams=3, depth=100, seconds=0.1))
    assert found.ceilings.read > 0
    assert found.layers == found.of
    assert found.seconds(1, 512, 0) > found.seconds(1, 1, 0) > 0
    assert found.seconds(3, 1, 100) > 0
    assert next(s for s in found.steps if s.rows == 256).experts > next(s for s in found.steps if s.rows == 1).experts
    with pytest.raises(KeyError):
        found.seconds(2, 1, 0)


# ---- memory ----


def of(settings: Settings, ram: int, context: int) -> Need:
    return need(settings, check(settings), ram, context, 1, {"supervisor": 10 << 20, "worker": 20 << 20})


def test_the_largest_kv_memory_just_fits(models: Models) -> None:
    flags = {"model": models.tiny("q4"), "workers": "2"}
    found = of(load_settings(flags, {}), 1 << 30, 256)
    assert found.most_kv % found.slab_bytes == 0
    full = of(load_settings(flags | {"kv_bytes": str(found.most_kv)}, {}), 1 << 30, 256)
    assert full.kv == found.most_kv
    assert full.ram - full.slab_bytes - 16384 < full.total <= full.ram


def test_streams_of_the_fullest_worker() -> None:
    assert Load(9, 256, 9, 4, 1).streams == 3
    assert Load(9, 256, 0, 4, 1).streams == 1


# ---- the command ----


def test_memory_adds_up_and_says_how(models: Models) -> None:
    found = document("--model", models.tiny("q4"), "--ram", "1G", "--clients", 4, "--context", 200)
    memory = {name: figure["value"] for name, figure in found["memory"].items()}
    parts = ("weights_dense", "weights_experts", "kv", "workspace", "output", "processes", "page_tables", "reload",
             "reserve")  # fmt: skip
    assert memory["total"] == sum(memory[name] for name in parts)
    assert memory["ram"] == 1 << 30
    assert memory["processes"] > 20 << 20  # measured: interpreters are not small
    for role in ("supervisor", "dispatcher", "worker", "kvpool"):
        assert role in found["memory"]["processes"]["formula"]
    assert found["requests"]["slabs_per_request"]["value"] == 4
    assert found["requests"]["running"]["value"] == 4
    assert found["problems"] == []


def test_what_does_not_fit_has_a_remedy_that_works(models: Models) -> None:
    model = models.tiny("q4")
    flags = ("--model", model, "--ram", "1G", "--clients", 40, "--context", 256, "--kv-bytes", "8M")
    first, second = document(*flags)["problems"]
    assert first["what"] == "8 of 40 clients wait: there are 32 places"
    assert first["remedy"] == "raise max_seqs to 40 or more"
    assert second["remedy"].startswith("kv_bytes = ")
    helped = document(*flags[:-1], second["remedy"].removeprefix("kv_bytes = "), "--max-seqs", 40)
    assert helped["problems"] == []
    assert helped["requests"]["running"]["value"] == 40


def test_too_little_memory_and_too_long_a_context(models: Models) -> None:
    found = document("--model", models.tiny("f32"), "--ram", "60M", "--context", 4096, "--window", 0)["problems"]
    assert "q4 weights" in found[0]["remedy"]
    assert "at least" in found[0]["remedy"]
    assert any("trained for 512" in one["remedy"] for one in found)


@pytest.mark.parametrize(("arguments", "message"), [
    ((), "error: model: is not set; give --model DIR"),
    (("--model", "/no/such"), "error: /no/such"),
    (("--ram", "many"), "'many' is no size; bytes or a size such as 64G is"),
    (("--clients", 0), "0 is not in the range"),
    (("--workers", 0), "error: --workers: workers = '0'"),
])  # fmt: skip
def test_what_cannot_be_planned_is_said(arguments: tuple[object, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.full
def test_the_whole_table(models: Models) -> None:
    result = run("--model", models.tiny("q4"), "--clients", 4, "--context", 200)
    assert result.exit_code == 0
    for part in ("MEMORY", "REQUESTS", "SPEED", "dispatcher ", "decode, 4 streams", "TTFT, last of 4 at once",
                 "E (1 - (1 - k/E)^n)", "Everything fits."):  # fmt: skip
        assert part in result.stdout
