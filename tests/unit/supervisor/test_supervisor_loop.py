"""The whole supervisor over children that do next to nothing; see supervised.py. The real ones: tests/integration."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from colibri_daemon.common.exit_codes import Exit

PROGRAM = Path(__file__).with_name("supervised.py")
PATIENCE = 20.0  # seconds until a test that waits for something fails


class Service:
    """The program, its log and what its dispatcher was told."""

    def __init__(self, place: Path, worker: str = "serve", **settings: object) -> None:
        self.place = place
        self.says(worker)
        self._log = (place / "log").open("w+b")
        command = [sys.executable, str(PROGRAM), str(place), *(f"{name}={value}" for name, value in settings.items())]
        environ = os.environ | {"NOTIFY_SOCKET": str(place / "notify")}
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=self._log, start_new_session=True,
                                        env=environ)  # fmt: skip

    def says(self, worker: str) -> None:
        """What workers that start from now on do. An empty word: there is no model."""
        new = self.place / "worker.new"
        new.write_text(worker)
        new.rename(self.place / "worker")
        if not worker:
            (self.place / "worker").unlink()

    def log(self, **wanted: object) -> list[dict[str, Any]]:
        lines = (self.place / "log").read_text().splitlines()
        parsed = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [line for line in parsed if wanted.items() <= line.items()]

    def told(self, kind: str) -> list[dict[str, Any]]:
        return self._lines("told", kind)

    def pool(self, kind: str) -> list[dict[str, Any]]:
        """What the pool was told."""
        return self._lines("pool", kind)

    def _lines(self, name: str, kind: str) -> list[dict[str, Any]]:
        path = self.place / name
        whole = [line for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
        return [message for message in map(json.loads, whole) if message["t"] == kind]

    def state(self) -> dict[str, Any]:
        return (self.told("state") or [{"state": None, "ready": False, "workers": []}])[-1]

    def ready(self) -> dict[str, Any]:
        return self.until(lambda: self.state()["ready"] and self.state())

    def until(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE
        while not (found := condition()):
            assert time.monotonic() < deadline, f"waited in vain; log:\n{(self.place / 'log').read_text()}"
            time.sleep(0.01)
        return found

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        return self.process.wait(PATIENCE)

    def members(self) -> set[int]:
        """Every process of the program's session."""
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    state, _, _, session = entry.joinpath("stat").read_text().rpartition(")")[2].split()[:4]
                    if int(session) == self.process.pid and state != "Z":
                        found.add(int(entry.name))
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.until(lambda: not self.members())
        self._log.close()


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Service]]:
    running = []

    def make(worker: str = "serve", **settings: object) -> Service:
        running.append(Service(tmp_path, worker, **settings))
        return running[-1]

    yield make
    for service in running:
        service.close()


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


def test_a_hung_worker_is_aborted_and_replaced(start):
    service = start("hang", hang_seconds=1)
    first = service.ready()["workers"][0]["pid"]
    service.says("serve")
    service.until(lambda: (w := service.state()["workers"][0])["up"] and w["pid"] != first)
    assert max(state["workers"][0]["progress_age_ms"] for state in service.told("state")) >= 500
    (line,) = service.log(msg="process ended")
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
    state = service.until(lambda: (state := service.state()).get("progress") and state)
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


def test_sighup_changes_nothing(start):
    service = start()
    before = service.ready()["workers"][0]["pid"]
    service.signal(signal.SIGHUP)
    service.until(lambda: service.log(level="warning", signal="SIGHUP"))
    assert service.state()["ready"]
    assert service.state()["workers"][0]["pid"] == before


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


# ---- the pool ------------------------------------------------------------------------------------------------------


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
        (service.place / "order.new").write_text(json.dumps(body))
        (service.place / "order.new").rename(service.place / "order")
        service.until(lambda: not (service.place / "order").exists())

    order(7)  # another process
    order(1)
    (line,) = service.until(lambda: service.log(msg="process ended"))
    assert (line["child"], line["how"]) == (f"worker {slot}" if kind == "worker" else "dispatcher", "by SIGKILL")
    assert pid not in service.members()
    assert [line["reason"] for line in service.log(msg="the pool has a process ended")] == ["it lies"]
    service.until(lambda: service.state()["state"] == "ready" and service.state()["ready"])
