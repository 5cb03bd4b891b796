"""The whole supervisor over children that do next to nothing; see supervised.py. The real ones: tests/integration."""

from __future__ import annotations

import os
import select
import signal
import socket

import pytest
from colibri_daemon.common.exit_codes import Exit
from colibri_daemon.supervisor.fdstore import ARENA
from fixtures.manager import Manager
from fixtures.scrape import Scraped
from supervised import PATIENCE


def test_start_and_stop(start):
    service = start(workers=2, kv_bytes="256K")
    state = service.ready()
    assert state["state"] == "ready"
    assert [worker["slot"] for worker in state["workers"]] == [0, 1]
    assert all(worker["up"] and worker["restarts"] == 0 for worker in state["workers"])
    (line,) = service.log(msg="ready")
    assert (line["model"], line["workers"], line["kv_bytes"], line["stall_ms"]) == ("made up", 2, 64 * 4096, 100)
    (memory,) = service.log(msg="memory")
    assert (memory["kv_bytes"], memory["slabs"], memory["slab_bytes"]) == (64 * 4096, 64, 4096)
    assert len(service.members()) == 5
    service.signal(signal.SIGTERM)
    assert service.ended() == Exit.STOPPED
    assert [message["seconds"] for message in service.told("drain")] == [30.0]
    assert not (service.place / "s").exists()
    assert service.members() == set()
    assert service.log(level="error") == []
    order = [line["child"] for line in service.log(msg="process ended")]
    assert (order[0], order[-1]) == ("dispatcher", "kvpool")


def test_health_is_pushed_while_nothing_happens(start):
    service = start()
    service.ready()
    pushed = len(service.told("state"))
    service.until(lambda: len(service.told("state")) >= pushed + 3)


def test_a_worker_that_worked_is_started_again_at_once(start):
    service = start(workers=2)
    first = service.ready()["workers"][1]["pid"]
    os.kill(first, signal.SIGKILL)
    worker = service.until(lambda: (w := service.state()["workers"][1])["restarts"] == 1 and w["up"] and w)
    assert worker["pid"] != first
    introduced = [(message["slot"], message["pid"]) for message in service.told("worker")]
    assert introduced.count((1, first)) == introduced.count((1, worker["pid"])) == 1
    assert all(message["fds"] == 1 for message in service.told("worker"))
    (line,) = service.log(msg="process ended")
    assert (line["child"], line["how"]) == ("worker 1", "by SIGKILL")
    assert "degraded" in [state["state"] for state in service.told("state")]


def test_series_stay_while_no_worker_works(start, tmp_path):
    address = f"unix:{tmp_path}/m"
    service = start(workers=2, metrics=address)
    workers = service.ready()["workers"]
    before = service.until(lambda: (now := Scraped.of(address)).sum("colibri_worker_up") == 2 and now)
    service.says("load_for_ever")
    for worker in workers:
        os.kill(worker["pid"], signal.SIGKILL)
    after = service.until(lambda: (now := Scraped.of(address)).sum("colibri_worker_up") == 0 and now)
    assert after.series == before.series
    assert after.sum("colibri_build_info", isa="vax") == 1


def test_a_dispatcher_that_dies_gets_new_links(start):
    """Workers go on; their old links have ended (serve() would die otherwise)."""
    service = start(workers=2)
    workers = {(worker["slot"], worker["pid"]) for worker in service.ready()["workers"]}
    (first,) = {message["from"] for message in service.told("state")}
    os.kill(first, signal.SIGKILL)
    service.until(lambda: service.state()["from"] != first and service.state()["ready"])
    again = [message for message in service.told("worker") if message["from"] != first]
    assert {(message["slot"], message["pid"]) for message in again} == workers
    assert [message["fds"] for message in again] == [1, 1]
    service.signal(signal.SIGTERM)
    assert service.ended() == Exit.STOPPED
    assert service.log(level="error", child="worker 0") == []


def test_five_failed_starts_end_the_service(start):
    service = start("crash")
    assert service.ended() == Exit.BOOT_LOOP
    times = [line["ts"] for line in service.log(msg="process ended", child="worker 0")]
    assert len(times) == 5
    (line,) = service.log(msg="the service ends")
    assert line["reason"] == "worker 0: failed to start five times in a row"
    assert "RuntimeError: at the start" in service.log(msg="uncaught exception, the process ends")[0]["exc"]
    assert service.members() == set()


def test_a_failed_start_may_be_followed_by_a_good_one(start):
    service = start("crash")
    service.until(lambda: service.log(msg="process ended"))
    service.says("serve")
    assert service.ready()["workers"][0]["restarts"] >= 1


def test_a_model_that_cannot_be_loaded_is_tried_once(start):
    service = start("refuse")
    assert service.ended() == Exit.CANNOT_LOAD
    assert len(service.log(msg="process ended", child="worker 0")) == 1
    (line,) = service.log(msg="the service ends")
    assert line["reason"] == "tensor 9 is missing"


def test_a_model_that_is_not_there(start):
    service = start("")
    assert service.ended() == Exit.CANNOT_LOAD
    assert [line["error"] for line in service.log(msg="the model cannot be used")] == ["there is no model"]
    assert service.told("state") == []
    assert not (service.place / "s").exists()


def test_kills_while_loading_do_not_end_a_service_that_has_served(start):
    service = start()
    killed = {0}
    service.ready()
    service.says("load_for_ever")
    for _ in range(6):  # the first one has worked, five have only loaded
        pid = service.until(lambda: {service.state()["workers"][0]["pid"]} - killed).pop()
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)
        service.says("serve" if len(killed) == 7 else "load_for_ever")
    service.until(lambda: service.state()["ready"] and service.state()["workers"][0]["pid"] not in killed)


def test_the_dispatcher_is_told_how_a_worker_died_and_what_it_did(start):
    service = start("toil_in_step", workers=2)
    pids = [worker["pid"] for worker in service.ready()["workers"]]
    service.says("serve")
    os.kill(pids[0], signal.SIGSEGV)
    os.kill(pids[1], signal.SIGKILL)
    service.until(lambda: len(service.told("dead")) == 2)
    dead = sorted((told["slot"], told["epoch"], told["cause"], told["keys"]) for told in service.told("dead"))
    assert dead == [(0, 1, "fault", [11, 12]), (1, 1, "killed", [11, 12])]
    again = service.until(lambda: (w := service.state()["workers"][1])["up"] and w["pid"] != pids[1] and w["pid"])
    os.kill(again, signal.SIGTERM)
    service.until(lambda: len(service.told("dead")) == 3)
    assert service.told("dead")[2]["keys"] == []


def test_a_hung_worker_is_aborted_and_replaced(start):
    service = start("hang", hang_seconds=1)
    first = service.ready()["workers"][0]["pid"]
    service.says("serve")
    service.until(lambda: (w := service.state()["workers"][0])["up"] and w["pid"] != first)
    assert max(state["workers"][0]["progress_age_ms"] for state in service.told("state")) >= 500
    (line,) = service.log(msg="process ended")
    assert [told["cause"] for told in service.told("dead")] == ["hang"]
    (doomed,) = service.told("doomed")  # not killed by somebody outside
    assert {**doomed, "t": "dead"}.items() <= service.told("dead")[0].items()
    assert line["how"] == "by SIGABRT"
    assert line["trace"].startswith("Fatal Python error: Aborted")
    assert " in hang" in line["trace"]


def test_a_busy_worker_is_left_alone(start):
    service = start("toil", hang_seconds=1)
    pid = service.ready()["workers"][0]["pid"]
    pushed = len(service.told("state"))
    service.until(lambda: len(service.told("state")) >= pushed + 6)  # three seconds
    assert service.state()["workers"][0] | {"progress_age_ms": 0, "resident_bytes": 0} == {
        "slot": 0, "up": True, "busy": True, "progress_age_ms": 0, "restarts": 0, "pid": pid, "resident_bytes": 0,
    }  # fmt: skip


def test_loading_has_a_deadline_of_its_own(start):
    service = start("load_for_ever", hang_seconds=3600, load_seconds=1)
    service.until(lambda: service.log(msg="process ended", how="by SIGABRT"))
    assert service.log(msg="no progress, the process is ended")[0]["state"] == "loading"


def test_verification_comes_before_the_workers(start):
    service = start(verify="true")
    state = service.until(lambda: "verified" in (state := service.state()).get("reason", "") and state)
    assert (state["progress"], state["reason"]) == (0.5, "the model is being verified")
    assert service.told("worker") == []
    (service.place / "sound").touch()
    service.ready()


def test_a_damaged_model(start):
    service = start(verify="true")
    (service.place / "damaged").touch()
    assert service.ended() == Exit.CANNOT_LOAD
    assert service.log(msg="the service ends")[0]["reason"] == "block 7 is damaged"
    assert service.told("worker") == []


@pytest.mark.parametrize("worker", ["serve", "load_for_ever", "idle"])
def test_a_stop_at_any_moment(start, worker):
    service = start(worker)
    service.until(lambda: service.log(msg="starting") or service.members() - {service.process.pid})
    service.signal(signal.SIGINT)
    assert service.ended() == Exit.STOPPED
    assert service.members() == set()


def test_a_drain_has_an_end(start):
    service = start(drain_seconds=0.2)
    service.ready()
    (service.place / "live").touch()
    service.signal(signal.SIGTERM)
    assert service.ended() == Exit.STOPPED


def test_a_second_signal_ends_the_drain(start):
    service = start(drain_seconds=3600)
    service.ready()
    (service.place / "live").touch()
    service.signal(signal.SIGTERM)
    service.until(lambda: service.state()["state"] == "draining")
    service.signal(signal.SIGTERM)
    assert service.ended() == Exit.STOPPED


def test_a_worker_deaf_to_sigterm_is_killed(start):
    """By the next signal here; without one after STOP_SECONDS, as test_lifecycle shows."""
    service = start("hang", hang_seconds=3600)
    service.ready()
    service.signal(signal.SIGTERM)
    service.until(lambda: service.log(msg="process ended", child="dispatcher"))
    service.signal(signal.SIGTERM)
    assert service.ended() == Exit.STOPPED
    assert [line["how"] for line in service.log(msg="process ended", child="worker 0")] == ["by SIGKILL"]


def test_systemd_is_told(start, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(PATIENCE)
        service = start(verify="true")
        heard = [systemd.recv(200).decode()]
        while heard[-1] != "STATUS=the model is being verified: 50%":
            heard.append(systemd.recv(200).decode())
        assert "READY=1" not in heard
        (service.place / "sound").touch()
        while heard[-1] != "READY=1":
            heard.append(systemd.recv(200).decode())
        service.ready()
        service.signal(signal.SIGTERM)
        while heard[-1] != "STOPPING=1":
            heard.append(systemd.recv(200).decode())
    assert "STATUS=ready" in heard


def test_what_systemd_keeps_and_how_it_is_fed(start, tmp_path, monkeypatch):
    """The memory of the KV cache at once; another after a reload to another size. The watchdog while all works."""
    monkeypatch.setenv("WATCHDOG_USEC", "400000")
    with Manager(tmp_path) as systemd:
        (tmp_path / "config").write_text('kv_bytes = "1M"')
        service = start()
        dispatcher = service.ready()["from"]
        service.until(lambda: len(systemd.store) == 3)
        first = os.fstat(systemd.of(ARENA)).st_size
        service.configure(kv_bytes="2M")
        service.signal(signal.SIGHUP)
        service.until(lambda: systemd.heard(FDSTOREREMOVE="1") == 3 and len(systemd.store) == 3)
        assert os.fstat(systemd.of(ARENA)).st_size == 2 * first
        os.kill(dispatcher, signal.SIGSTOP)
        service.until(lambda: service.log(msg="the watchdog is not fed", reason="no progress: the dispatcher"))
        fed = systemd.heard(WATCHDOG="1")
        os.kill(dispatcher, signal.SIGCONT)
        service.until(lambda: systemd.heard(WATCHDOG="1") > fed)
        assert systemd.heard(STATUS="ready") > 0
        assert systemd.heard(EXTEND_TIMEOUT_USEC="30000000") > 0
        service.signal(signal.SIGTERM)
        assert service.ended() == Exit.STOPPED
        service.until(lambda: systemd.heard(STOPPING="1"))


def test_nothing_outlives_the_supervisor(start):
    service = start(workers=3)
    service.ready()
    pidfds = [os.pidfd_open(pid) for pid in service.members() - {service.process.pid}]
    assert len(pidfds) == 5
    service.process.kill()
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], PATIENCE)[0]
        os.close(pidfd)
    assert (service.place / "s").exists()  # nobody was left to remove it; the next daemon does
