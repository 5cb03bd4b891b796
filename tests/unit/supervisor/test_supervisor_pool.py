"""The supervisor and the KV pool: introductions, deaths, orders to kill; see supervised.py."""

from __future__ import annotations

import os
import signal

import pytest
from colibri_daemon.common.exit_codes import Exit
from supervised import Service


def introductions(service: Service, **wanted: object) -> list[tuple[str, int, int, int]]:
    """(kind, slot, epoch, pid) of the peers that the pool was told of."""
    told = [peer for peer in service.pool("peer") if wanted.items() <= peer.items()]
    assert all(peer["fds"] == 1 for peer in told)
    return [(peer["kind"], peer["slot"], peer["epoch"], peer["pid"]) for peer in told]


def test_the_pool_gets_a_link_to_everybody(start):
    service = start(workers=2)
    state = service.ready()
    dispatcher = state["from"]
    workers = [("worker", worker["slot"], 1, worker["pid"]) for worker in state["workers"]]
    service.until(lambda: len(service.pool("peer")) == 3)
    assert sorted(introductions(service)) == [("dispatcher", 0, 1, dispatcher), *workers]
    assert [told["workers"] for told in service.pool("peers")] == [[]]


def test_a_dead_worker_is_announced_once_it_is_reaped_and_its_epoch_grows(start):
    service = start(workers=2)
    first = service.ready()["workers"][1]["pid"]
    os.kill(first, signal.SIGSEGV)
    service.until(lambda: len(service.pool("peer")) == 4)
    (dead,) = service.pool("dead")
    assert (dead["slot"], dead["epoch"], dead["fault"]) == (1, 1, True)
    assert introductions(service)[-1][:3] == ("worker", 1, 2)
    service.until(lambda: [(told["slot"], told["epoch"]) for told in service.told("worker")].count((1, 2)) == 1)
    os.kill(introductions(service)[-1][3], signal.SIGKILL)
    service.until(lambda: len(service.pool("dead")) == 2)
    assert service.pool("dead")[1]["fault"] is False


def test_a_pool_that_dies_is_replaced_and_told_who_may_have_slabs(start):
    service = start(workers=2)
    state = service.ready()
    service.until(lambda: len(service.pool("peer")) == 3)
    first = service.pool("peer")[0]["from"]
    os.kill(first, signal.SIGKILL)
    again = service.until(lambda: len(service.pool("peers")) == 2 and service.pool("peers")[1])
    assert again["life"] == 2  # the journal is the same
    assert again["workers"] == [[0, 1], [1, 1]]
    service.until(lambda: len(introductions(service, life=2)) == 3)
    assert sorted(introductions(service, life=2)) == sorted(introductions(service, life=1))
    service.until(lambda: service.state()["state"] == "ready")
    assert {worker["pid"] for worker in service.state()["workers"]} == {worker["pid"] for worker in state["workers"]}
    assert all(state["ready"] for state in service.told("state")[-3:])


def test_a_pool_that_cannot_have_its_memory_ends_the_service(start, tmp_path):
    (tmp_path / "no_memory").touch()
    service = start()
    assert service.ended() == Exit.CANNOT_LOAD
    assert service.log(msg="the service ends")[0]["reason"] == "no memory is left"


def test_more_kv_memory_than_there_is(start):
    service = start(kv_bytes="1024T")
    assert service.ended() == Exit.CANNOT_LOAD
    assert "lower kv_bytes" in service.log(msg="the service ends")[0]["reason"]


def test_a_dispatcher_that_dies_gets_a_new_link_to_the_pool(start):
    service = start()
    first = service.ready()["from"]
    os.kill(first, signal.SIGKILL)
    service.until(lambda: len(introductions(service, kind="dispatcher")) == 2)
    assert [epoch for _, _, epoch, _ in introductions(service, kind="dispatcher")] == [1, 2]


@pytest.mark.parametrize(("kind", "slot"), [("worker", 1), ("dispatcher", 0)])
def test_the_pool_has_a_peer_killed(start, kind, slot):
    service = start(workers=2)
    state = service.ready()
    pid = state["workers"][1]["pid"] if kind == "worker" else state["from"]

    def order(epoch: int) -> None:
        body = {"t": "kill", "kind": kind, "slot": slot, "epoch": epoch, "reason": "it lies"}
        service.order("order", body)

    order(7)  # another process
    order(1)
    (line,) = service.until(lambda: service.log(msg="process ended"))
    assert (line["child"], line["how"]) == (f"worker {slot}" if kind == "worker" else "dispatcher", "by SIGKILL")
    assert pid not in service.members()
    assert [line["reason"] for line in service.log(msg="a peer has a process ended")] == ["it lies"]
    service.until(lambda: service.state()["state"] == "ready" and service.state()["ready"])
