"""loadtest/load: what scenarios ask for, what records come to, and what a run over HTTP sees of every way to fail."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import subprocess
import sys
from itertools import islice
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

LOADTEST = Path(__file__).resolve().parents[3] / "loadtest"
PLAIN = """requests = 20
[arrival]
kind = "closed"
clients = 4
[prompt]
kind = "fixed"
tokens = 8
[output]
kind = "fixed"
tokens = 6
"""


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(LOADTEST))
    from load import baseline, canned, figures, lengths, over_http, page, report, requests, runner, scenario

    return SimpleNamespace(baseline=baseline, canned=canned, figures=figures, lengths=lengths, over_http=over_http,
                           page=page, report=report, requests=requests, runner=runner, scenario=scenario)  # fmt: skip


@pytest.fixture
def make(load: SimpleNamespace, tmp_path: Path) -> Any:
    def made(text: str = PLAIN, **changes: Any) -> Any:
        path = tmp_path / "s.toml"
        path.write_text(text)
        return load.scenario.load(path, **changes)

    return made


def table(**fields: Any) -> dict[str, Any]:
    return fields


# ---- lengths and arrivals --------------------------------------------------------------------------------------------


def draws(make: Any, count: int = 4000, **output: Any) -> list[int]:
    rng, lengths = Random(7), make(output=output).output
    return [lengths.draw(rng) for _ in range(count)]


def test_fixed_lengths_are_fixed(make):
    assert set(draws(make, kind="fixed", tokens=17)) == {17}


def test_uniform_lengths_are_all_equally_often(make):
    found = draws(make, kind="uniform", low=3, high=6)
    assert set(found) == {3, 4, 5, 6}
    assert all(900 < found.count(n) < 1100 for n in (3, 4, 5, 6))


def test_lognormal_lengths_have_their_median_and_sigma(make):
    found = draws(make, kind="lognormal", median=100, sigma=0.5, low=1, high=100_000)
    assert statistics.median(found) == pytest.approx(100, rel=0.05)
    assert statistics.stdev(map(math.log, found)) == pytest.approx(0.5, rel=0.05)
    bounded = draws(make, kind="lognormal", median=100, sigma=2.0, low=50, high=150)
    assert (min(bounded), max(bounded)) == (50, 150)


def test_lengths_of_a_file_are_as_often_as_it_has_them(make, tmp_path):
    (tmp_path / "lengths.txt").write_text("# tokens\n5\n5\n5  # again\n\n9\n")
    found = draws(make, kind="file", path="lengths.txt")
    assert set(found) == {5, 9}
    assert found.count(5) / len(found) == pytest.approx(0.75, abs=0.03)


def test_poisson_arrivals_have_exponential_gaps_and_end_in_time(load, make):
    scenario = make(PLAIN.replace("requests = 20", "seconds = 400.0"), arrival=table(kind="poisson", rate=10.0))
    due = list(load.requests.schedule(scenario))
    gaps = [b - a for a, b in zip([0.0, *due], due, strict=False)]
    assert len(due) == pytest.approx(4000, rel=0.05)
    assert due[-1] < 400
    assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.08)
    assert sum(gap > 0.1 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.03)


def test_bursts_come_at_one_moment(load, make):
    scenario = make(arrival=table(kind="burst", size=3, every=2.5), requests=8)
    assert list(load.requests.schedule(scenario)) == [0, 0, 0, 2.5, 2.5, 2.5, 5, 5]


def test_a_closed_loop_has_no_schedule(load, make):
    assert list(load.requests.schedule(make())) == [None] * 20
    assert len(list(islice(load.requests.schedule(make(seconds=1.0)), 1000))) == 1000


# ---- requests --------------------------------------------------------------------------------------------------------


def test_the_same_seed_makes_the_same_requests_and_another_others(load, make):
    first, again, other = (list(load.requests.requests(make(seed=seed), 1000)) for seed in (1, 1, 2))
    assert first == again
    assert all(a.prompt != b.prompt for a, b in zip(first, other, strict=True))
    assert all(3 <= token < 1000 for r in first for token in r.prompt)


def test_other_lengths_leave_arrivals_and_cancels_alone(load, make):
    more = {"arrival": table(kind="poisson", rate=5.0), "cancel": {"rate": 0.5}}
    one, two = (list(load.requests.requests(make(output=table(kind="uniform", low=1, high=n), **more), 100))
                for n in (10, 1000))  # fmt: skip
    assert [r.due for r in one] == [r.due for r in two]
    assert [r.leave_after is None for r in one] == [r.leave_after is None for r in two]


def test_prefixes_are_shared_by_the_share_that_was_asked_for(load, make):
    scenario = make(prefix=table(count=2, length=30, share=0.75), requests=400)
    made = list(load.requests.requests(scenario, 5000))
    longer = [tuple(r.prompt[:30]) for r in made if len(r.prompt) == 38]
    assert len(set(longer)) == 2
    assert len(longer) / len(made) == pytest.approx(0.75, abs=0.08)
    assert {len(r.prompt) for r in made} == {8, 38}


def test_cancels_fall_within_the_output(load, make):
    made = list(load.requests.requests(make(cancel={"rate": 0.25}, requests=400), 100))
    left = [r.leave_after for r in made if r.leave_after is not None]
    assert len(left) / len(made) == pytest.approx(0.25, abs=0.08)
    assert set(left) == {1, 2, 3, 4, 5, 6}


def test_warm_up_requests_are_others(load, make):
    scenario = make(warmup=3)
    assert len(load.requests.warmup(scenario, 100)) == 3
    assert load.requests.warmup(scenario, 100)[0].prompt != next(load.requests.requests(scenario, 100)).prompt


# ---- scenarios -------------------------------------------------------------------------------------------------------


def test_every_scenario_that_comes_along_can_be_used(load):
    names = {path.stem for path in (LOADTEST / "scenarios").glob("*.toml")}
    assert names >= {"chat", "rag", "mlperf", "long", "burst", "closed16"}
    for name in names:
        assert next(load.requests.requests(load.scenario.load(name), 1000)).tokens >= 1


@pytest.mark.parametrize(("change", "wanted"), [
    (("requests = 20", ""), "requests and seconds: give exactly one"),
    (("requests = 20", "requests = 20\nseconds = 5.0"), "requests and seconds: give exactly one"),
    (("requests = 20", 'requests = "20"'), "requests: Input should be a valid integer; it is '20'"),
    (("requests = 20", "requests = 20\nclients = 3"), "clients: is no field of a scenario; correct its name"),
    (("requests = 20", "requests = 20\nslo = {}"), "slo: is empty; leave it out"),
    (("requests = 20", "requests = 20\ncancel = {rate = 1.5}"), "cancel.rate: Input should be less than or equal to 1"),
    (("clients = 4", "clients = 0"), "arrival.clients: Input should be greater than or equal to 1; it is 0"),
    (('"closed"', '"opened"'), "arrival.kind: is not known or missing; give one of 'closed', 'poisson', 'burst'"),
    (('kind = "fixed"\ntokens = 8', 'kind = "uniform"\nlow = 9\nhigh = 8'), "prompt: low is 9 and high is 8; exchange"),
    (('kind = "fixed"\ntokens = 8', 'kind = "file"\npath = "none.txt"'), "counts from the scenario's folder"),
    (('kind = "fixed"\ntokens = 8', 'kind = "file"\npath = "s.toml"'), "s.toml:1: 'requests = 20' is no length; write"),
    (("tokens = 6", ""), "output.tokens: is missing; add it"),
    (("tokens = 6", "tokens ="), "is no TOML"),
])  # fmt: skip
def test_a_wrong_scenario_is_refused_by_file_field_and_remedy(load, make, tmp_path, change, wanted):
    with pytest.raises(load.scenario.ScenarioError) as caught:
        make(PLAIN.replace(*change))
    assert str(caught.value).startswith(f"{tmp_path / 's.toml'}: ")
    assert wanted in str(caught.value)


def test_an_unknown_scenario_is_told_which_there_are(load):
    with pytest.raises(load.scenario.ScenarioError, match="burst, chat, closed16"):
        load.scenario.load("chatt")


# ---- figures ---------------------------------------------------------------------------------------------------------


def record(load: Any, due: float, arrivals: list[float], failure: str | None = None, left: bool = False) -> Any:
    request = load.requests.Request(0, due, [1, 2], len(arrivals), None)
    made = load.runner.Record(request, due, 0.0, sent=due, end=arrivals[-1] if arrivals else due, arrivals=arrivals)
    made.tokens, made.failure, made.left = len(arrivals), failure, left
    return made


def test_percentiles_are_values_by_nearest_rank(load):
    ordered = [float(n) for n in range(1, 201)]
    assert [load.figures.percentile(ordered, p) for p in (0, 50, 90, 99, 100)] == [1, 100, 180, 198, 200]
    assert [load.figures.percentile([5.0], p) for p in (1, 99)] == [5, 5]
    assert load.figures.spread([]) is None


def test_latencies_count_from_when_a_request_was_due(load):
    late = record(load, 1.0, [3.0, 3.5, 5.0])
    late.sent = 2.9
    made = load.figures.figures(load.runner.Run([late], 5.0, 0.1), load.scenario.SLOS)
    assert (made["ttft_ms"]["max"], made["e2e_ms"]["max"], made["tpot_ms"]["max"]) == (2000, 4000, 1000)
    assert (made["itl_ms"]["p50"], made["itl_ms"]["max"]) == (500, 1500)
    assert made["generator"]["late_ms"]["max"] == pytest.approx(1900)
    assert (made["output_tokens_per_s"], made["requests_per_s"]) == (0.6, 0.2)


def test_goodput_counts_who_kept_both_promises(load):
    slo = {"x": load.scenario.Slo(ttft_ms=1000, tpot_ms=500)}
    records = [
        record(load, 0.0, [1.0, 1.5, 2.0]),  # just so
        record(load, 0.0, [1.001, 1.5]),  # late
        record(load, 0.0, [0.5, 1.001]),  # slow
        record(load, 0.0, [0.5]),  # one token: nothing to be slow with
        record(load, 0.0, [0.5, 0.6], failure="broken off"),
        record(load, 0.0, [0.5, 0.6], left=True),  # neither kept nor broken
    ]
    found = load.figures.goodput(records, slo, 2.0)["x"]
    assert found == {"ttft_ms": 1000, "tpot_ms": 500, "requests_per_s": 1.0, "share": 0.4}
    made = load.figures.figures(load.runner.Run(records, 2.0, 0.1), slo)
    assert (made["sent"], made["done"], made["left"], made["failed"]) == (6, 4, 1, {"broken off": 1})


def test_the_usual_promises_are_the_four_pairs(load):
    assert {(slo.ttft_ms, slo.tpot_ms) for slo in load.scenario.SLOS.values()} == {
        (200, 50), (300, 100), (450, 40), (2000, 200)}  # fmt: skip


def test_a_page_needs_nothing_else_and_escapes_what_it_shows(load, make):
    run = load.runner.Run([record(load, 0.0, [0.5, 0.6]), record(load, 0.1, [], failure="<b>")], 1.0, 0.9)
    page = load.page.page([load.report.result("<i>", make(title="A & B"), run)], "notes")
    assert page.count("<svg") == len(load.page.PLOTS)
    assert "http" not in page
    assert "A &amp; B" in page
    assert "&lt;b&gt;" in page
    assert "<i>" not in page
    assert "the generator used 0.90 cores" in page


# ---- baselines -------------------------------------------------------------------------------------------------------


def ratio(load: Any, value: float, better: str) -> Any:
    return load.baseline.Ratio(value=value, better=better)


def test_what_got_worse_by_more_than_the_tolerance_is_told(load):
    before = {"speed": ratio(load, 3.0, "higher"), "wait": ratio(load, 0.4, "lower"), "gone": ratio(load, 1, "lower")}
    now = {"speed": ratio(load, 2.5, "higher"), "wait": ratio(load, 0.43, "lower")}
    assert load.baseline.worse(before, now, 0.1) == [
        "speed: was 3, is 2.5 (higher is better): worse by 20%", "gone: was 1, is not measured any more"]  # fmt: skip
    assert load.baseline.worse(before, before, 0.0) == []
    assert [line[:4] for line in load.baseline.worse(before, now, 0.05)] == ["spee", "wait", "gone"]


def drive(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(LOADTEST / "drive.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_result_becomes_a_baseline_and_is_held_against_it(tmp_path):
    result, out = tmp_path / "r.json", tmp_path / "b.json"
    found = {"what": "x", "pairs": 3, "runs": [], "ratios": {"speed": {"value": 3.0, "better": "higher"}}}
    result.write_text(json.dumps(found))
    assert drive("baseline", result, out).returncode == 0
    assert drive("compare", result, out).returncode == 0
    found["ratios"]["speed"]["value"] = 2.0
    result.write_text(json.dumps(found))
    worse = drive("compare", result, out)
    assert worse.returncode == 1
    assert "speed: was 3, is 2" in worse.stdout
    out.write_text("{}")
    broken = drive("compare", result, out)
    assert broken.returncode == 1
    assert f"{out}: what: Field required; make it again" in broken.stderr


# ---- HTTP ------------------------------------------------------------------------------------------------------------


def test_a_run_over_http_sees_every_token(load, make):
    with load.canned.serving(tokens=6) as url:
        run = asyncio.run(load.runner.drive(load.over_http.OverHttp(url), make(warmup=2)))
    assert [r.failure for r in run.records] == [None] * 20
    assert [r.tokens for r in run.records] == [6] * 20
    assert all(len(r.arrivals) == 6 and r.arrivals == sorted(r.arrivals) for r in run.records)


def test_leaving_over_http_ends_the_reading(load, make):
    with load.canned.serving(tokens=6) as url:
        run = asyncio.run(load.runner.drive(load.over_http.OverHttp(url), make(cancel={"rate": 1.0})))
    assert all(r.left and r.tokens == r.request.leave_after for r in run.records)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'
ANSWERS = {
    b'HTTP/1.1 503 x\r\nContent-Length: 32\r\n\r\n{"error":{"code":"queue_full"}}\n': "HTTP 503 queue_full",
    b"HTTP/1.1 500 x\r\nContent-Length: 4\r\n\r\noops": "HTTP 500",
    HEAD + TOKEN: "broken off",
    HEAD + TOKEN + b'data: {"error":{"type":"server_error"}}\n\n': "error in the stream server_error",
    HEAD + b"data: {nonsense\n\n": "JSONDecodeError",
    HEAD + b"data: [DONE]\n\n": "no tokens",
    b"": "ServerDisconnectedError",
    HEAD + TOKEN + b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\ndata: [DONE]\n\n': None,
}


@pytest.mark.parametrize("answer", ANSWERS, ids=[str(reason) for reason in ANSWERS.values()])
def test_every_way_to_fail_has_its_reason(load, make, answer):
    async def run() -> Any:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            transport = load.over_http.OverHttp(f"http://127.0.0.1:{port}/v1/", model="m")
            return await load.runner.drive(transport, make(requests=1))

    (seen,) = asyncio.run(run()).records
    assert seen.failure == ANSWERS[answer]
    if seen.failure is None:
        assert seen.tokens == 3  # what usage says, not the messages


def test_a_request_that_hangs_is_a_timeout(load, make):
    class Hanging:
        async def open(self) -> int:
            return 100

        async def send(self, request: Any, record: Any) -> None:
            await asyncio.sleep(3600)

        async def close(self) -> None:
            pass

    run = asyncio.run(load.runner.drive(Hanging(), make(requests=2), timeout=0.01))
    assert [r.failure for r in run.records] == ["timeout"] * 2


def test_open_loops_send_in_time_whatever_becomes_of_earlier_ones(load, make):
    """Every request waits for the last one: only a generator that sends without waiting gets that far."""

    class Waiting:
        def __init__(self) -> None:
            self.running = 0

        async def open(self) -> int:
            self.all = asyncio.Event()
            return 100

        async def send(self, request: Any, record: Any) -> None:
            self.running += 1
            if self.running == 20:
                self.all.set()
            await self.all.wait()
            record.arrived(1)

        async def close(self) -> None:
            pass

    run = asyncio.run(load.runner.drive(Waiting(), make(arrival=table(kind="poisson", rate=1000.0))))
    assert len({r.arrivals[0] for r in run.records}) >= 1
    assert all(r.failure is None and r.arrivals[0] >= run.records[-1].due for r in run.records)


def test_the_command_names_what_is_wrong(tmp_path):
    for arguments, wanted in ((("run", "chatt", "s"), "closed16"), (("run", "chat", tmp_path / "s"), "no socket"),
                              (("run", "chat", "http://127.0.0.1:9"), "127.0.0.1:9"),
                              (("run", "chat", "s", "--extra", "[]"), "no JSON object")):  # fmt: skip
        done = drive(*arguments)
        assert done.returncode != 0
        assert wanted in done.stderr
        assert "Traceback" not in done.stderr
