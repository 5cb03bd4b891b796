"""What the dispatcher writes into its page, as the metrics process reads it."""

from __future__ import annotations

import time

from colibri_daemon.common import ipc
from colibri_daemon.common.counters import LAYOUTS, read
from colibri_daemon.common.metrics import BY_NAME, Source
from colibri_daemon.dispatcher.gauges import SHOW_SECONDS
from colibri_protocol.messages import Cancel, Done, Score
from dispatched import Rig, generate, ids, on_uvloop, rig, until


def words(r: Rig, name: str, *values: str) -> list[float]:
    found, first = read(r.page.counters, Source.DISPATCHER), LAYOUTS[Source.DISPATCHER].places[(name, *values)]
    assert found is not None
    return found[first : first + BY_NAME[name].words]


def observed(r: Rig, name: str, *values: str) -> int:
    return int(sum(words(r, name, *values)[:-1]))


@on_uvloop
async def test_gauges_are_shown_soon_without_being_asked_for() -> None:
    """And nothing is done once nothing happens."""
    async with rig() as r:
        client = await r.client()
        await client.say(generate(max_tokens=9), 1)
        await until(lambda: words(r, "num_requests_waiting") == [1])
        assert words(r, "waiting_tokens")[0] > 0
        assert words(r, "connections", "active") == [1]
        worker = await r.worker()
        key, _ = await worker.assigned()
        await until(lambda: (words(r, "num_requests_running"), words(r, "num_requests_waiting")) == ([1], [0]))
        await worker.step([key, ids(9), {"finish": "length", "generated": 1}])
        began = time.monotonic()
        await until(lambda: words(r, "num_requests_running") == [0])
        assert time.monotonic() - began < SHOW_SECONDS + 5  # not a tick of the idle loop; 5: a busy machine
        await until(lambda: r.dispatcher._gauges._timer is None)


@on_uvloop
async def test_a_requests_times_and_sizes() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        await client.say(generate(max_tokens=9), 1)
        key, job = await worker.assigned()
        await worker.step([key, ids(5), {"cached": 1}])
        await until(lambda: observed(r, "time_to_first_token_seconds") == 1)
        assert observed(r, "inter_token_latency_seconds") == 0
        for token in (6, 7):
            await worker.step([key, ids(token), None])
        await worker.step([key, ids(8), {"finish": "stop", "generated": 4}])
        await client.rest(1)
        assert observed(r, "inter_token_latency_seconds") == 3
        for name in ("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
                     "request_decode_time_seconds", "request_inference_time_seconds",
                     "request_time_per_output_token_seconds"):
            assert observed(r, name) == 1, name
        sums = {name: words(r, name)[-1] for name in ("request_prompt_tokens", "request_generation_tokens",
                                                       "request_cached_tokens", "request_params_max_tokens")}
        assert list(sums.values()) == [len(job.tokens) // 4, 4, 1, 9]
        assert words(r, "generation_tokens_total") == [4]
        assert words(r, "frames_total", "out", "TOKENS") == [4]
        whole = words(r, "request_inference_time_seconds")[-1]
        parts = sum(words(r, f"request_{part}_time_seconds")[-1] for part in ("prefill", "decode"))
        assert abs(whole - parts) < 1e-9


@on_uvloop
async def test_a_score_has_no_tokens() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        await client.say(Score(tokens=ids(1, 2, 3)), 1)
        key, _ = await worker.assigned()
        await worker.step([key, b"", {"scores": [1, b"aaaabbbb", None, None], "finish": "length", "generated": 0}])
        await client.rest(1)
        assert observed(r, "time_to_first_token_seconds") == observed(r, "request_generation_tokens") == 0
        assert observed(r, "e2e_request_latency_seconds") == observed(r, "request_prefill_time_seconds") == 1


@on_uvloop
async def test_a_cancel_is_timed_by_what_it_stops() -> None:
    async with rig() as r:
        client = await r.client()
        await client.say(generate(), 1)
        await client.say(Cancel(), 1)
        await client.hear_a(Done, 1)
        assert observed(r, "cancel_latency_seconds", "queued") == 1
        worker = await r.worker()
        for number, phase in ((2, "prefill"), (3, "decode")):
            await client.say(generate(), number)
            key, _ = await worker.assigned()
            if phase == "decode":
                await worker.step([key, ids(1), None])
            await client.say(Cancel(), number)
            await worker.told(ipc.CANCEL, key, "abort")
            await worker.step([key, b"", {"finish": "abort", "generated": 0}])
            await client.rest(number)
            assert observed(r, "cancel_latency_seconds", phase) == 1
