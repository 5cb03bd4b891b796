"""Reload as the dispatcher sees it: another generation serves, requests move to it or end where they are; and what is
done with the requests of a dead worker before it is known how it died."""

from __future__ import annotations

import asyncio
import socket

import msgpack
import pytest
from colibri_daemon.common.facts import ModelFacts
from colibri_daemon.common.settings import Settings
from colibri_protocol.errors import Code
from colibri_protocol.messages import Done, Error, GoAway, Model, Receipt, Resume, Stats, StatsReply, TokensOut
from dispatched import FACTS, Rig, facts, generate, ids, on_uvloop, rig, tokens_of, until

OTHER = facts(id="c" * 64, name="another", vocab_size=50)


def come(r: Rig, generation: int = 2, pool: int = 1, facts: ModelFacts = FACTS, **settings: object) -> None:
    """Another generation is announced."""
    r.tell({"t": "generation", "generation": generation, "pool": pool, "facts": facts.to_wire(),
            "settings": Settings(**settings).to_json()})  # fmt: skip


async def serves(r: Rig, generation: int = 2) -> None:
    r.tell({"t": "serve", "generation": generation})
    await until(lambda: r.dispatcher.generations.serving.number == generation)


async def empty(r: Rig) -> int:
    """Which generation the supervisor is told is empty."""
    loop = asyncio.get_running_loop()
    while True:
        message = msgpack.unpackb(await asyncio.wait_for(loop.sock_recv(r.control, 4096), 10))
        if message["t"] == "empty":
            return message["generation"]


# ---- another generation serves -------------------------------------------------------------------------------------


@on_uvloop
async def test_with_the_same_pool_running_requests_move_token_for_token() -> None:
    async with rig() as r:
        old, client = await r.worker(), await r.client()
        await client.say(generate(max_tokens=9, seed=3), 1)
        key, _ = await old.assigned()
        await old.step([key, ids(10, 11), None])
        come(r)
        new = await r.worker(generation=2)
        await serves(r)
        await old.told(5, key)  # PREEMPT
        await old.step([key, ids(12), {"finish": "preempted"}])
        moved, job = await new.assigned()
        assert (moved, job.generated, job.seed) == (key, ids(10, 11, 12), 3)
        assert await empty(r) == 1
        await new.step([key, ids(13), {"finish": "length", "generated": 4}])
        heard = [await client.hear() for _ in range(5)]
        assert tokens_of([message for message, _ in heard]) == [10, 11, 12, 13]
        assert [message.generation for message, _ in heard if isinstance(message, Model)] == [2]
        assert isinstance(heard[-1][0], Done)
        assert (await client.stats()).counters["num_preemptions_total"] == 0


@on_uvloop
async def test_with_another_pool_each_ends_where_it_was_admitted() -> None:
    async with rig() as r:
        old, client = await r.worker(max_seqs=1), await r.client()
        await client.say(generate(max_tokens=2), 1)
        await client.say(generate(max_tokens=2), 2)
        first, _ = await old.assigned()
        come(r, pool=2, facts=OTHER)
        new = await r.worker(generation=2)
        await serves(r)
        told = await client.hear_a(Model)
        assert (told.model.name, told.model.id) == ("another", OTHER.id)
        await client.say(generate(max_tokens=2), 3)
        third, _ = await new.assigned()
        await old.step([first, ids(10), {"finish": "length", "generated": 1}])
        await client.rest(1)
        second, _ = await old.assigned()
        assert not r.told_already()
        await old.step([second, ids(20), {"finish": "length", "generated": 1}])
        assert await empty(r) == 1
        tokens, done = await client.rest(2)
        assert (tokens.generation, done.receipt.model_id) == (1, FACTS.id)
        await new.step([third, ids(30), {"finish": "length", "generated": 1}])
        tokens, done = await client.rest(3)
        assert (tokens.generation, done.receipt.model_id) == (2, OTHER.id)


@on_uvloop
async def test_what_is_too_long_for_the_new_one_stays() -> None:
    async with rig() as r:
        old, client = await r.worker(), await r.client()
        await client.say(generate(max_tokens=40), 1)
        await client.say(generate(max_tokens=4), 2)
        (long, _), (short, _) = await old.assigned(), await old.assigned()
        come(r, facts=facts(max_len=16))
        new = await r.worker(generation=2)
        await serves(r)
        await old.told(5, short)
        await old.step([short, b"", {"finish": "preempted"}], [long, ids(10), None])
        assert (await new.assigned())[0] == short
        await old.step([long, ids(11), {"finish": "length", "generated": 2}])
        assert await empty(r) == 1


@on_uvloop
async def test_a_worker_of_an_old_generation_that_dies_is_followed_by_one_of_its_own() -> None:
    async with rig() as r:
        old, client = await r.worker(), await r.client()
        await client.say(generate(), 1)
        key, _ = await old.assigned()
        come(r, pool=2, facts=OTHER)
        new = await r.worker(generation=2)
        await serves(r)
        old.die()
        again = await r.worker()
        assert (await again.assigned())[0] == key
        assert not new.waiting()


@on_uvloop
async def test_one_that_is_given_up_leaves_nothing_behind() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        come(r, pool=2, facts=OTHER)
        never, pool = await r.worker(generation=2), await r.pool(number=2)
        r.tell({"t": "forget", "generation": 2})
        for end in (never, pool):
            with pytest.raises(EOFError):
                await end.hear()
        await client.say(generate(), 1)
        await worker.assigned()
        assert len((await client.stats()).workers) == 1


@on_uvloop
async def test_what_one_that_cannot_work_any_more_had_to_serve_ends() -> None:
    async with rig() as r:
        old, client = await r.worker(max_seqs=1), await r.client()
        for request_id in (1, 2):
            await client.say(generate(), request_id)
        await old.assigned()
        come(r, pool=2, facts=OTHER)
        await r.worker(generation=2)
        await serves(r)
        await client.hear_a(Model)
        r.tell({"t": "forget", "generation": 1})
        for _ in range(2):
            error, _ = await client.hear()
            assert (error.code, error.tokens_sent) == (Code.WORKER_LOST, 0)
        assert not r.requests.live
        assert [g.number for g in r.dispatcher.generations] == [2]


@on_uvloop
async def test_settings_of_the_serving_generation_hold() -> None:
    async with rig() as r:
        come(r, trusted_uids=(0,), requests_per_connection_trusted=1, queue_requests=1, max_frame=8192)
        await r.worker(generation=2)
        client = await r.client()
        await serves(r)
        assert (await r.dial_and_welcome()).limits.frame == 8192
        assert (await client.hear_a(Model)).generation == 2
        assert r.requests.queue.max_requests == 1


# ---- resume --------------------------------------------------------------------------------------------------------


def resume(receipt: Receipt) -> Resume:
    return Resume(tokens=ids(10), seed=4, receipt=receipt)


@on_uvloop
async def test_a_stream_is_resumed_where_it_was_made() -> None:
    async with rig() as r:
        old, client = await r.worker(), await r.client()
        await client.say(generate(), 9)  # keeps the old one alive
        await old.assigned()
        come(r, pool=2, facts=OTHER)
        new = await r.worker(generation=2)
        await serves(r)
        await client.hear_a(Model)
        for request_id, worker, model in ((1, old, FACTS), (2, new, OTHER)):
            receipt = Receipt(model_id=model.id, fingerprint=model.fingerprint, seed=4, kv_format="f16")
            await client.say(generate(resume=resume(receipt)), request_id)
            _, job = await worker.assigned()
            assert (job.generated, job.seed) == (ids(10), 4)


@pytest.mark.parametrize("change", [{"model_id": "d" * 64}, {"fingerprint": "d" * 64}, {"kv_format": "f32"}])
@on_uvloop
async def test_a_stream_that_nobody_can_have_made_is_not_resumed(change: dict[str, str]) -> None:
    async with rig() as r:
        client = await r.client()
        made = {"model_id": FACTS.id, "fingerprint": FACTS.fingerprint, "seed": 4, "kv_format": "f16"} | change
        error = await client.refused(generate(resume=resume(Receipt(**made))))
        assert (error.code, error.field) == (Code.MODEL_MISMATCH, "resume.receipt")


@on_uvloop
async def test_a_resumed_stream_keeps_its_attention() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        made = {"model_id": FACTS.id, "fingerprint": FACTS.fingerprint, "seed": 4, "kv_format": "f16"}
        await client.say(generate(resume=resume(Receipt(pinned=16, window=32, positions="cache", **made))), 1)
        _, job = await worker.assigned()
        assert (job.pinned, job.window, job.positions) == (16, 32, "cache")
        for wrong in ({"pinned": 33, "window": 32}, {"pinned": 1}, {"positions": "else"}):
            error = await client.refused(generate(resume=resume(Receipt(**made | wrong))), 2)
            assert (error.code, error.field) == (Code.INVALID_ARGUMENT, "resume.receipt")


# ---- another dispatcher --------------------------------------------------------------------------------------------


@on_uvloop
async def test_a_dispatcher_that_was_replaced_finishes_what_it_has() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        await client.say(generate(max_tokens=2), 1)
        key, _ = await worker.assigned()
        r.tell({"t": "retire"})
        assert (await client.hear_a(GoAway)).last_id == 1
        with socket.socket(socket.AF_UNIX) as sock:  # it is in the backlog, for the other dispatcher
            sock.connect(str(r.path))
            await client.ask({"tokens": ids(5)}, 2)  # crossed GOAWAY
            assert (await client.hear_a(Error, 2)).code == Code.DRAINING
            await worker.step([key, ids(10), {"finish": "length", "generated": 1}])
            assert tokens_of(await client.rest(1)) == [10]
            assert len(r.sessions) == 1
        assert [await r.told() for _ in range(2)] == ["ready", "drained"]


# ---- dead workers --------------------------------------------------------------------------------------------------


@on_uvloop
async def test_nobody_gets_a_dead_workers_requests_before_its_death_is_known() -> None:
    async with rig() as r:
        first, other, client = await r.worker(), await r.worker(slot=1), await r.client()
        await client.say(generate(), 1)
        key, _ = await first.assigned()
        first.sock.close()
        await until(lambda: len(r.workers) == 1)
        await client.say(Stats())
        await client.hear_a(StatsReply)
        assert not other.waiting()
        first.dead(cause="killed", keys=())
        assert (await other.assigned())[0] == key


@on_uvloop
async def test_the_death_may_be_known_before_the_end_of_the_link() -> None:
    async with rig() as r:
        first, other, client = await r.worker(), await r.worker(slot=1), await r.client()
        await client.say(generate(), 1)
        key, _ = await first.assigned()
        first.dead(cause="killed", keys=())
        await client.say(Stats())
        await client.hear_a(StatsReply)
        first.sock.close()
        assert (await other.assigned())[0] == key


@on_uvloop
async def test_a_request_that_waits_for_news_of_a_death_can_be_cancelled() -> None:
    async with rig() as r:
        worker, client = await r.worker(), await r.client()
        await client.say(generate(), 1)
        key, _ = await worker.assigned()
        await worker.step([key, ids(10), None])
        assert isinstance((await client.hear())[0], TokensOut)
        worker.sock.close()
        await until(lambda: not r.workers)
        r.requests.cancel(r.requests.live[key])
        assert (await client.hear_a(Done, 1)).finish_reason == "abort"
        worker.dead(cause="killed", keys=())
        other = await r.worker(slot=1)
        await client.stats()
        assert not other.waiting()


@on_uvloop
async def test_without_news_of_a_death_requests_go_on_all_the_same() -> None:
    async with rig() as r:
        first, other, client = await r.worker(), await r.worker(slot=1), await r.client()
        await client.say(generate(), 1)
        key, _ = await first.assigned()
        first.sock.close()
        assert (await other.assigned())[0] == key
