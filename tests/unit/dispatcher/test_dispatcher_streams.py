"""Requests from a client's socket to a worker's link and back: order and ends."""

from __future__ import annotations

import asyncio

import pytest
from colibri_daemon.common import ipc
from colibri_protocol.errors import Code
from colibri_protocol.messages import Cancel, Done, Resume, Scores, StopMatch, TokensOut, Usage
from dispatched import FACTS, facts, generate, ids, on_uvloop, rig, score, tokens_of, until


@on_uvloop
async def test_a_stream_from_prompt_to_done() -> None:
    async with rig() as r:
        worker, client = await r.worker(slot=3), await r.client()
        await client.say(generate(5, 6, 7, max_tokens=4, seed=9), 11)
        key, job = await worker.assigned()
        assert (job.tokens, job.max_tokens, job.seed, job.eos_ids) == (ids(5, 6, 7), 4, 9, ids(2))
        await worker.step([key, ids(10), {"cached": 2}])
        await worker.step([key, ids(11, 12), None])
        await worker.step([key, ids(2), {"finish": "stop", "match": ["eos", 2], "generated": 4}])
        first, second, third, done = await client.rest(11)
        assert first == TokensOut(ids=ids(10), step=1, cached_tokens=2, generation=1)
        assert second == TokensOut(ids=ids(11, 12), index=1, step=2)
        assert third == TokensOut(ids=ids(2), index=3, step=3)
        assert done.finish_reason == "stop"
        assert done.stop_match == StopMatch(kind="eos", value=2)
        assert done.usage == Usage(prompt=3, cached=2, generated=4)
        assert (done.seed, done.worker) == (9, 3)
        assert (done.receipt.model_id, done.receipt.seed, done.receipt.max_tokens) == (FACTS.id, 9, 4)


@on_uvloop
async def test_times_cover_the_phases() -> None:
    async with rig() as r:
        client = await r.client()
        await client.say(generate(), 1)
        await until(lambda: len(r.requests.queue))
        worker = await r.worker()
        key, _ = await worker.assigned()
        await worker.step([key, ids(10), None])
        await client.hear()
        await worker.step([key, ids(11), {"finish": "length", "generated": 2}])
        done = (await client.rest(1))[-1]
        assert done.times.queue > 0
        assert done.times.prefill > 0
        assert done.times.decode > 0


@on_uvloop
async def test_the_daemon_draws_a_seed_and_tells_it() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        seeds = []
        for request_id in (1, 2):
            await client.say(generate(), request_id)
            key, job = await worker.assigned()
            await worker.step([key, ids(4), {"finish": "length"}])
            assert (await client.rest(request_id))[-1].seed == job.seed
            seeds.append(job.seed)
        assert seeds[0] != seeds[1]


@on_uvloop
async def test_rows_of_one_step_reach_each_client() -> None:
    async with rig() as r:
        worker = await r.worker()
        clients = [await r.client(), await r.client()]
        keys = []
        for n, client in enumerate(clients):
            for request_id in (1, 2):
                await client.say(generate(5 + n, request_id), request_id)
                keys.append((await worker.assigned())[0])
        for step in range(3):
            finish = {"finish": "length"} if step == 2 else None
            await worker.step(*([key, ids(10 * (n + 1) + step), finish] for n, key in enumerate(keys)))
        for n, client in enumerate(clients):
            heard = [await client.hear() for _ in range(8)]
            for request_id in (1, 2):
                output = tokens_of([message for message, heard_id in heard if heard_id == request_id])
                assert output == [10 * (2 * n + request_id) + step for step in range(3)]


@on_uvloop
async def test_log_probabilities_travel_with_their_tokens() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        await client.say(generate(logprobs=2, prompt_logprobs=1), 1)
        key, job = await worker.assigned()
        assert (job.logprobs, job.prompt_logprobs) == (2, 1)
        await worker.step([key, b"", {"scores": [1, b"aaaabbbb", b"ccccdddd", b"eeeeffff"]}])
        await worker.step([key, ids(7), {"lp": b"1234", "top": b"abcdefgh", "toplp": b"ABCDEFGH", "finish": "length"}])
        scores, tokens, _ = await client.rest(1)
        assert scores == Scores(index=1, logprobs=b"aaaabbbb", top_ids=b"ccccdddd", top_logprobs=b"eeeeffff")
        assert (tokens.logprobs, tokens.top_ids, tokens.top_logprobs) == (b"1234", b"abcdefgh", b"ABCDEFGH")


@on_uvloop
async def test_usage_in_every_message_if_wanted() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        await client.say(generate(echo_usage=True), 1)
        key, _ = await worker.assigned()
        for token in (10, 11, 12):
            await worker.step([key, ids(token), None])
            assert (await client.hear_a(TokensOut, 1)).usage == Usage(prompt=3, generated=token - 9)


@on_uvloop
async def test_scores_come_in_frames_below_the_limit() -> None:
    count, top = 40_000, 20
    async with rig(facts(max_len=1 << 20)) as r:
        worker, client = await r.worker(slabs=1 << 20), await r.client()
        await client.say(score(*[1] * count, top=top, start=1), 1)
        key, job = await worker.assigned()
        assert (job.score_from, job.prompt_logprobs, job.max_tokens) == (1, top, 0)

        async def compute() -> None:
            for at in range(1, count, 512):  # as a worker does it: chunk by chunk
                n = min(512, count - at)
                chunk = [at, ids(*range(n)), ids(*range(n * top)), ids(*range(n * top))]
                await worker.step([key, b"", {"scores": chunk}])
            await worker.step([key, b"", {"finish": "length"}])

        _, messages = await asyncio.gather(compute(), client.rest(1))
        at = 1
        for message in messages[:-1]:
            assert message.index == at
            at += len(message.logprobs) // 4
            assert len(message.top_ids) == len(message.top_logprobs) == len(message.logprobs) * top
        assert at == count
        assert messages[-1].receipt is None


@on_uvloop
async def test_one_large_row_of_scores_is_split() -> None:
    n, top = 3000, 20
    async with rig(facts(max_len=1 << 20)) as r:
        worker, client = await r.worker(slabs=1 << 20), await r.client()
        await client.say(score(*[1] * (n + 1), top=top), 1)
        key, _ = await worker.assigned()
        await worker.step([key, b"", {"scores": [1, ids(*range(n)), ids(*range(n * top)), ids(*range(n * top))],
                                      "finish": "length"}])  # fmt: skip
        frames = (await client.rest(1))[:-1]
        assert len(frames) > 1
        assert all(len(f.logprobs + f.top_ids + f.top_logprobs) < 256 << 10 for f in frames)
        assert b"".join(f.logprobs for f in frames) == ids(*range(n))
        assert b"".join(f.top_ids for f in frames) == ids(*range(n * top))


@on_uvloop
async def test_nothing_to_compute_is_answered_without_a_worker() -> None:
    async with rig() as r:
        client = await r.client()
        await client.say(generate(max_tokens=0), 1)
        done = await client.hear_a(Done, 1)
        assert (done.finish_reason, done.usage, done.worker) == ("length", Usage(prompt=3), None)


@on_uvloop
async def test_resume_goes_on_at_its_index() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        await client.say(generate(resume=Resume(tokens=ids(10, 11), seed=77), max_tokens=5), 1)
        key, job = await worker.assigned()
        assert (job.generated, job.seed, job.max_tokens) == (ids(10, 11), 77, 5)
        await worker.step([key, ids(12), {"finish": "length", "generated": 3}])
        tokens, done = await client.rest(1)
        assert (tokens.index, tokens.ids, tokens.cached_tokens) == (2, ids(12), 0)
        assert done.usage.generated == 3


@pytest.mark.parametrize(
    ("fields", "finish", "match"),
    [
        ({"max_tokens": 2}, "length", None),
        ({"stop_ids": ids(11)}, "stop", StopMatch(kind="id", value=11)),
    ],
)
@on_uvloop
async def test_resume_of_a_stream_whose_end_was_lost(fields: dict, finish: str, match: StopMatch | None) -> None:
    async with rig() as r:
        client = await r.client()
        await client.say(generate(resume=Resume(tokens=ids(10, 11), seed=7), **fields), 1)
        done = await client.hear_a(Done, 1)
        assert (done.finish_reason, done.stop_match, done.seed) == (finish, match, 7)


@on_uvloop
async def test_an_error_of_the_worker_ends_the_request() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        await client.say(generate(), 1)
        key, _ = await worker.assigned()
        await worker.step([key, ids(4), None])
        await worker.step([key, b"", {"finish": "error", "error": [int(Code.NON_FINITE), "NaN at position 4"]}])
        error = (await client.rest(1))[-1]
        assert (error.code, error.tokens_sent, error.message) == (Code.NON_FINITE, 1, "NaN at position 4")
        assert error.usage == Usage(prompt=3, generated=1)


# ---- cancel --------------------------------------------------------------------------------------------------------


@on_uvloop
async def test_cancel_in_the_same_write_as_its_request() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        await client.raw(client.conn.send(generate(), 1) + client.conn.send(Cancel(), 1))
        key, _ = await worker.assigned()
        await worker.told(ipc.CANCEL, key, "abort")
        await worker.step([key, b"", {"finish": "abort"}])
        assert (await client.hear_a(Done, 1)).finish_reason == "abort"


@on_uvloop
async def test_cancel_while_queued_never_starts() -> None:
    async with rig() as r:
        client = await r.client()
        await client.say(generate(), 1)
        await client.say(Cancel(), 1)
        done = await client.hear_a(Done, 1)
        assert (done.finish_reason, done.usage) == ("abort", Usage(prompt=3))
        assert not len(r.requests.queue)


@on_uvloop
async def test_cancel_is_said_once_and_what_was_computed_still_comes() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        await client.say(generate(), 1)
        key, _ = await worker.assigned()
        for _ in range(3):
            await client.say(Cancel(), 1)
        await worker.told(ipc.CANCEL, key, "abort")
        await worker.step([key, ids(9), None])
        await worker.step([key, ids(8), {"finish": "abort", "generated": 2}])
        *tokens, done = await client.rest(1)
        assert tokens_of(tokens) == [9, 8]
        assert (done.finish_reason, done.usage.generated) == ("abort", 2)
        await client.say(generate(), 2)
        assert (await worker.hear())[0] == ipc.ASSIGN  # not a second CANCEL


@on_uvloop
async def test_cancel_that_crosses_the_end_is_ignored() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        await client.say(generate(), 1)
        key, _ = await worker.assigned()
        await client.say(Cancel(), 1)
        await worker.step([key, ids(9), {"finish": "length"}])
        assert (await client.rest(1))[-1].finish_reason == "length"
        await client.say(Cancel(), 1)
        await client.stats()


@on_uvloop
async def test_disconnect_cancels_all_and_drops_their_rows() -> None:
    async with rig(max_seqs=2) as r:
        worker, client = await r.worker(max_seqs=2), await r.client()
        for request_id in (1, 2, 3):
            await client.say(generate(), request_id)
        keys = [(await worker.assigned())[0] for _ in range(2)]
        await until(lambda: len(r.requests.queue))
        client.sock.close()
        assert sorted([await worker.hear() for _ in keys]) == [[ipc.CANCEL, key, "abort"] for key in keys]
        assert len(r.requests.live) == 2
        await worker.step(*([key, ids(1), None] for key in keys))
        await worker.step(*([key, ids(1), {"finish": "abort"}] for key in keys))
        await until(lambda: not r.requests.live)
        other = await r.client()
        await other.say(generate(), 1)
        assert (await worker.assigned())[0] > max(keys)
