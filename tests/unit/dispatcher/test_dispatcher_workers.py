"""Workers that die, are replaced or talk nonsense, and which one gets a request."""

from __future__ import annotations

import pytest
from colibri_daemon.common import ipc
from colibri_protocol.errors import Code
from colibri_protocol.messages import Cancel, Done, Error, Scores, TokensOut
from dispatched import generate, ids, on_uvloop, rig, score, tokens_of, until

INFO = {"free": 1, "rows": 1, "us": 1, "misses": 0}


# ---- workers die ---------------------------------------------------------------------------------------------------


@on_uvloop
async def test_another_worker_goes_on_token_for_token() -> None:
    async with rig() as r:
        first, client = await r.worker(slot=0), await r.client()
        await client.say(generate(logprobs=0, prompt_logprobs=0, max_tokens=9), 1)
        key, job = await first.assigned()
        await first.step([key, ids(10), {"scores": [1, b"aaaabbbb", None, None], "lp": b"1111"}])
        await first.step([key, ids(11, 12), {"lp": b"22223333"}])
        await until(lambda: r.dispatcher.server.stats.get("generation_tokens_total") == 3)
        first.die()
        second = await r.worker(slot=1)
        _, rest = await second.assigned()
        assert (rest.generated, rest.seed, rest.prompt_logprobs) == (ids(10, 11, 12), job.seed, None)
        await second.step([key, ids(13), {"lp": b"4444", "finish": "length", "generated": 4}])
        *messages, done = await client.rest(1)
        tokens = [message for message in messages if isinstance(message, TokensOut)]
        assert [(t.index, t.ids, t.logprobs) for t in tokens] == [
            (0, ids(10), b"1111"), (1, ids(11, 12), b"22223333"), (3, ids(13), b"4444")
        ]  # fmt: skip
        assert (done.usage.generated, done.worker) == (4, 1)


@on_uvloop
async def test_a_worker_that_comes_takes_its_share() -> None:
    async with rig() as r:
        first, client = await r.worker(slot=0), await r.client()
        keys = []
        for request_id in range(1, 5):
            await client.say(generate(max_tokens=9), request_id)
            keys.append((await first.assigned())[0])
        second = await r.worker(slot=1)
        for key in keys[2:]:
            await first.told(ipc.PREEMPT, key)
            await first.step([key, ids(10), {"finish": "preempted"}])
        moved = [await second.assigned() for _ in range(2)]
        assert [(key, job.generated) for key, job in moved] == [(key, ids(10)) for key in keys[2:]]
        assert not first.waiting()
        assert r.requests.running == 4


@on_uvloop
async def test_scores_are_not_sent_twice() -> None:
    async with rig() as r:
        first, client = await r.worker(), await r.client()
        await client.say(score(1, 2, 3, 4, 5), 1)
        key, _ = await first.assigned()
        await first.step([key, b"", {"scores": [1, b"11112222", None, None]}])
        await client.hear_a(Scores, 1)
        first.die()
        second = await r.worker()
        await second.assigned()
        await second.step([key, b"", {"scores": [1, b"1111", None, None]}])
        await second.step([key, b"", {"scores": [2, b"222233334444", None, None], "finish": "length"}])
        scores, _ = await client.rest(1)
        assert (scores.index, scores.logprobs) == (3, b"33334444")


@on_uvloop
async def test_what_a_lost_worker_ran_goes_first_in_order() -> None:
    async with rig() as r:
        first, client = await r.worker(max_seqs=2), await r.client()
        for request_id in (1, 2, 3):
            await client.say(generate(priority=request_id), request_id)
        keys = [(await first.assigned())[0] for _ in range(2)]
        await until(lambda: len(r.requests.queue))
        first.die()
        second = await r.worker(slot=1, max_seqs=3)
        assert [(await second.assigned())[0] for _ in range(3)] == [*keys, keys[1] + 1]


@on_uvloop
async def test_death_while_cancelling_ends_it() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        await client.say(generate(), 1)
        key, _ = await worker.assigned()
        await worker.step([key, ids(9), None])
        await client.hear_a(TokensOut, 1)
        await client.say(Cancel(), 1)
        await worker.told(ipc.CANCEL, key, "abort")
        worker.die()
        assert (await client.hear_a(Done, 1)).finish_reason == "abort"


@on_uvloop
async def test_a_new_link_replaces_the_slots_old_one() -> None:
    async with rig() as r:
        old, client = await r.worker(), await r.client()
        await client.say(generate(), 1)
        key, _ = await old.assigned()
        new = await r.worker()
        assert (await new.assigned())[0] == key
        with pytest.raises(EOFError):
            await old.hear()


@pytest.mark.parametrize(
    "message",
    [
        [99, 1],
        [ipc.STEP, 1],
        [ipc.STEP, 1, [[1, "text", None]], INFO],
        [ipc.STEP, 1, [[1, b"", {"finish": "bored"}]], INFO],
        [ipc.STEP, 1, [[1, b"", {"finish": "error", "error": [1, "no such code"]}]], INFO],
        5,
    ],
)
@on_uvloop
async def test_a_worker_that_talks_nonsense_is_dropped_and_nothing_is_lost(message: object) -> None:
    async with rig() as r:
        bad, client = await r.worker(slot=0), await r.client()
        await client.say(generate(), 1)
        key, _ = await bad.assigned()
        assert key == 1
        await bad.step([key, ids(9), None])
        await bad.raw(ipc.pack(message))
        good = await r.worker(slot=1)
        assert (await good.assigned())[1].generated == ids(9)
        await good.step([key, ids(8), {"finish": "length"}])
        assert tokens_of(await client.rest(1)) == [9, 8]


# ---- room in workers -----------------------------------------------------------------------------------------------


@on_uvloop
async def test_the_worker_with_most_room_is_chosen() -> None:
    async with rig() as r:
        workers, client = [await r.worker(slot=slot) for slot in range(2)], await r.client()
        for request_id in range(1, 5):
            await client.say(generate(), request_id)
        for worker in workers:
            assert len([await worker.assigned() for _ in range(2)]) == 2


@on_uvloop
async def test_what_never_fits_is_refused_also_when_that_shows_later() -> None:
    async with rig() as r:
        client = await r.client()
        await client.say(generate(max_tokens=45), 1)
        await until(lambda: len(r.requests.queue))
        await r.worker(slabs=2)
        error = await client.hear_a(Error, 1)
        assert (error.code, error.limit) == (Code.NEVER_FITS, 2)
        assert (await client.refused(generate(max_tokens=45))).code == Code.NEVER_FITS
