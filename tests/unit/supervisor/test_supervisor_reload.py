"""A reload, with the whole supervisor over children that do next to nothing; see supervised.py."""

from __future__ import annotations

import json
import os
import select
import signal
import socket

import pytest
from colibri_daemon.common.exit_codes import Exit
from colibri_daemon.common.settings import Settings
from reloaded import gone, outcomes, pids, reload
from supervised import PATIENCE, Service


def test_the_same_configuration(start):
    """New workers for the same pool; the dispatcher hears everything in order."""
    service = start(workers=2)
    before = pids(service) if service.ready() else []
    reload(service)
    gone(service, 1)
    assert outcomes(service) == [""]
    service.until(lambda: service.state()["ready"] and not set(pids(service)) & set(before))
    assert not set(before) & service.members()
    assert len(service.members()) == 5
    kinds = [json.loads(line)["t"] for line in (service.place / "told").read_text().splitlines() if line.endswith("}")]
    order = [kind for kind in kinds if kind in ("generation", "serve", "forget")]
    assert order == ["generation", "serve", "forget"]
    (told,) = service.told("generation")
    assert (told["generation"], told["pool"]) == (2, 1)
    assert Settings.from_json(told["settings"]).workers == 2
    workers = [(told["generation"], told["slot"], told["epoch"]) for told in service.told("worker")]
    assert sorted(workers) == [(1, 0, 1), (1, 1, 1), (2, 0, 2), (2, 1, 2)]
    assert service.pool("retire") == []
    assert {told["from"] for told in service.pool("peer")} == {service.pool("peers")[0]["from"]}


def test_a_reload_leaves_no_descriptor(start):
    service = start(workers=2)
    service.ready()
    open_at_first = []
    for count in range(1, 5):
        reload(service)
        gone(service, count)
        service.until(lambda: len(service.members()) == 5)
        open_at_first.append(len(os.listdir(f"/proc/{service.process.pid}/fd")))
    assert len(set(open_at_first)) == 1


def test_other_workers(start):
    service = start()
    service.ready()
    reload(service, workers=3)
    service.until(lambda: len(pids(service)) == 3 and all(pids(service)))
    reload(service, workers=1)
    gone(service, 2)
    service.until(lambda: len(pids(service)) == 1)
    assert len(service.members()) == 4
    epochs = [(told["slot"], told["epoch"]) for told in service.told("worker")]
    assert len(set(epochs)) == len(epochs) == 5


@pytest.fixture
def service(start, tmp_path) -> Service:
    """One whose model is named by the file."""
    (tmp_path / "config").write_text('model = "/models/one"\n')
    made = start(model="", kv_bytes="256K")
    made.ready()
    return made


def test_another_model_has_a_pool_of_its_own(service):
    """Old requests end where they began; meanwhile the arenas share what is allowed; then the old one goes."""
    first, before = pids(service)[0], service.members()
    (service.place / "live").touch()
    reload(service, model="/models/two")
    service.until(lambda: service.pool("retire"))
    assert first in service.members()
    assert len(service.members()) == len(before) + 2
    assert [told["of"] for told in service.pool("peers")] == ["one", "two"]
    assert [told["usable"] for told in service.pool("peers")] == [64, 2]  # of 128 tokens, the longest request
    assert [told["of"] for told in service.pool("retire")] == ["one"]
    service.until(lambda: service.pool("usable"))
    assert [(told["of"], told["slabs"]) for told in service.pool("usable")] == [("two", 63)]
    assert [(told["pool"], told["fds"]) for told in service.told("pool")] == [(1, 1), (2, 1)]
    (service.place / "live").unlink()
    gone(service, 1)
    service.until(lambda: len(service.members()) == len(before))
    service.until(lambda: [told["slabs"] for told in service.pool("usable")] == [63, 64])
    assert service.told("forget")[0]["generation"] == 1


def test_a_worker_of_an_old_generation_is_started_again_as_it_was(service):
    (service.place / "live").touch()
    first = pids(service)[0]
    reload(service, model="/models/two", workers=2)
    os.kill(first, signal.SIGKILL)
    told = service.until(lambda: [told for told in service.told("worker") if told["epoch"] == 3])[0]
    assert (told["generation"], told["slot"], told["fds"]) == (1, 0, 1)
    assert [dead["of"] for dead in service.pool("dead")] == ["one"]
    (service.place / "live").unlink()
    gone(service, 1)


def test_an_old_generation_that_will_never_work_again_goes(service):
    (service.place / "live").touch()
    first = pids(service)[0]
    reload(service, model="/models/two")
    service.says("refuse")
    os.kill(first, signal.SIGKILL)
    gone(service, 1)
    service.until(lambda: len(service.members()) == 4)
    assert service.state()["ready"]


def test_no_more_than_two_old_generations(service):
    (service.place / "live").touch()
    for model in ("two", "three"):
        reload(service, model=f"/models/{model}")
    service.configure(model="/models/four")
    for _ in range(3):  # many are one
        service.signal(signal.SIGHUP)
    service.until(lambda: "reloading: waits for an earlier generation" in service.state()["reason"])
    assert service.state()["ready"]
    (service.place / "live").unlink()
    service.until(lambda: len(outcomes(service)) == 3)
    assert [told["of"] for told in service.pool("peers")] == ["one", "two", "three", "four"]
    gone(service, 3)
    assert len(service.members()) == 4


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"model": "/models/one", "workers": 0}, "workers = 0: must be"),
        ({"model": "/models/one", "wrokers": 3}, 'unknown key "wrokers"'),
        ({"model": "/models/one", "socket_mode": "0600"}, "socket_mode cannot be changed while the daemon runs"),
        ({}, "model: is not set"),
        ({"model": "/models/two", "kv_bytes": "1024T"}, "lower kv_bytes"),
        ({"model": "/models/one", "kv_bytes": "1"}, "raise kv_bytes"),
    ],
)
def test_a_bad_configuration_changes_nothing(start, tmp_path, content, words):
    (tmp_path / "config").write_text('model = "/models/one"\n')
    service = start(model="")
    service.ready()
    before = service.members()
    reload(service, **content)
    (reason,) = outcomes(service)
    assert words in reason
    service.until(lambda: service.members() == before)
    service.until(lambda: service.state()["reloaded"]["ok"] is False)
    assert (service.state()["ready"], service.state()["reason"]) == (True, "")
    assert service.told("serve") == []
    reload(service, model="/models/one")
    service.until(lambda: service.state()["reloaded"]["ok"])


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        ("refuse", "tensor 9 is missing"),
        ("crash", "worker 0: failed to start five times in a row"),
        ("load_for_ever", "no progress"),
        ("", "there is no model"),
    ],
)
def test_a_generation_that_does_not_come_up(start, worker, reason):
    service = start(load_seconds=4 if worker == "load_for_ever" else 60)
    before = service.members() if service.ready() else set()
    service.says(worker)
    reload(service)
    assert reason in outcomes(service)[0]
    service.until(lambda: service.members() == before)
    assert [told["generation"] for told in service.told("forget")] == ([2] if worker else [])
    service.says("serve")
    reload(service)
    gone(service, 1)


def test_a_pool_that_cannot_have_its_memory_fails_the_reload(service):
    (service.place / "no_memory").touch()
    before = service.members()
    reload(service, model="/models/two")
    assert outcomes(service) == ["no memory is left"]
    service.until(lambda: service.members() == before)
    (service.place / "no_memory").unlink()
    reload(service, model="/models/two")
    assert outcomes(service)[1] == ""


def test_a_worker_of_the_coming_generation_is_killed(start):
    service = start()
    service.ready()
    service.says("load_for_ever")
    service.signal(signal.SIGHUP)
    pid = service.until(lambda: [told["pid"] for told in service.told("worker") if told["generation"] == 2])[0]
    service.says("serve")
    os.kill(pid, signal.SIGKILL)
    service.until(lambda: outcomes(service) == [""])
    assert [(told["generation"], told["epoch"]) for told in service.told("worker")] == [(1, 1), (2, 2), (2, 3)]


def test_the_dispatcher_dies_while_a_generation_comes(start):
    service = start()
    first = service.ready()["from"]
    service.says("load_for_ever")
    service.signal(signal.SIGHUP)
    service.until(lambda: [told for told in service.told("worker") if told["generation"] == 2])
    os.kill(first, signal.SIGKILL)
    service.until(lambda: service.state()["from"] != first)
    again = [(told["generation"], told["slot"]) for told in service.told("worker") if told["from"] != first]
    assert again == [(1, 0), (2, 0)]
    assert [told["generation"] for told in service.told("generation") if told["from"] != first] == [2]


def test_the_dispatcher_dies_after_a_reload(service):
    """It is born with what serves now; what the old generation had live is gone with it."""
    (service.place / "live").touch()
    first = service.state()["from"]
    reload(service, model="/models/two")
    os.kill(first, signal.SIGKILL)
    born = service.until(lambda: [told for told in service.told("born") if told["from"] != first])[0]
    assert (born["generation"], born["pool"], born["id"]) == (2, 2, "two")
    gone(service, 1)
    service.until(lambda: len(service.members()) == 4)


def test_a_setting_of_the_pool(start):
    """Its process is replaced; the memory stays."""
    service = start()
    first = service.pool("peers")[0]["from"] if service.ready() else 0
    reload(service, kv_eviction="lfu")
    again = service.until(lambda: [told for told in service.pool("peers") if told["from"] != first])[0]
    assert again["life"] == 2
    assert [2, 1] not in again["workers"]
    service.until(lambda: service.state()["ready"] and service.state()["state"] == "ready")
    assert service.log(level="error") == []


def test_answers_to_those_who_ask(start):
    service = start()
    service.ready()
    service.configure(workers=0)
    service.order("ask", {"t": "admin", "id": 1, "do": "reload"})
    answer = service.until(lambda: service.told("admin"))[0]
    assert (answer["id"], answer["ok"]) == (1, False)
    assert "workers = 0" in answer["error"]


def test_a_stop_while_a_generation_comes(start):
    service = start()
    service.ready()
    service.says("load_for_ever")
    service.order("ask", {"t": "admin", "id": 1, "do": "reload"})
    service.until(lambda: [told for told in service.told("worker") if told["generation"] == 2])
    service.signal(signal.SIGTERM)
    assert service.ended() == Exit.STOPPED
    assert service.members() == set()
    assert [(told["ok"], told["error"]) for told in service.told("admin")] == [(False, "the daemon is stopping")]


def test_a_stop_with_two_dispatchers_waits_for_both(start):
    service = start()
    service.ready()
    (service.place / "live").touch()
    service.order("ask", {"t": "admin", "id": 1, "do": "reload", "everything": True})
    service.until(lambda: service.told("retire"))
    service.signal(signal.SIGTERM)
    service.until(lambda: len(service.told("drain")) == 2)
    (service.place / "live").unlink()
    assert service.ended() == Exit.STOPPED
    assert service.members() == set()


def test_asked_before_it_serves(start):
    service = start("load_for_ever")
    service.until(lambda: service.told("worker"))
    service.signal(signal.SIGHUP)
    service.until(lambda: service.log(msg="reload", stage="waiting"))
    service.says("serve")
    os.kill(service.told("worker")[0]["pid"], signal.SIGKILL)
    service.until(lambda: outcomes(service) == [""])


def test_systemd_is_told(start, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(PATIENCE)
        service = start()
        heard = [systemd.recv(200).decode()]
        while heard[-1] != "READY=1":
            heard.append(systemd.recv(200).decode())
        service.signal(signal.SIGHUP)
        while not heard[-1].startswith("RELOADING=1"):
            heard.append(systemd.recv(200).decode())
        assert heard[-1].startswith("RELOADING=1\nMONOTONIC_USEC=")
        while heard[-1] != "READY=1":
            heard.append(systemd.recv(200).decode())
        assert "STATUS=ready: reloading: workers are loading" in heard


def test_nothing_outlives_the_supervisor(start):
    """Fresh interpreters die with it too."""
    service = start()
    service.ready()
    (service.place / "live").touch()
    service.order("ask", {"t": "admin", "id": 1, "do": "reload", "everything": True})
    service.until(lambda: service.told("retire"))
    pidfds = [os.pidfd_open(pid) for pid in service.members() - {service.process.pid}]
    assert len(pidfds) == 6
    service.process.kill()
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], PATIENCE)[0]
        os.close(pidfd)
