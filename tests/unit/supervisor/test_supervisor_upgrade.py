"""Reloads that replace the dispatcher and the pool too, because another version of the package is installed or because
they were asked to; with the whole supervisor, see supervised.py."""

from __future__ import annotations

import os
import signal

from colibri_daemon.common.exit_codes import Exit
from reloaded import gone, outcomes, reload


def test_everything(start):
    """As for a package upgrade: fresh interpreters, a new pool, a new dispatcher; the old one finishes."""
    service = start()
    old = service.ready()["from"]
    (service.place / "live").touch()
    service.order("ask", {"t": "admin", "id": 7, "do": "reload", "everything": True})
    service.until(lambda: service.told("retire"))
    assert service.until(lambda: outcomes(service)) == [""]
    assert service.told("retire")[0]["from"] == old
    answer = service.until(lambda: service.told("admin"))[0]
    assert (answer["from"], answer["id"], answer["ok"], answer["result"]["generation"]) == (old, 7, True, 2)
    born = service.told("born")[-1]
    assert (born["generation"], born["pool"]) == (2, 2)
    assert "colibri_daemon.supervisor.born" in born["argv"]
    assert "colibri_daemon.supervisor.born" not in service.told("born")[0]["argv"]
    new = [told for told in service.told("worker") if told["from"] == born["from"]]
    assert [told["generation"] for told in new] == [2]
    service.until(lambda: {old, born["from"]} <= {told["from"] for told in service.told("state")[-4:]})
    os.kill(new[0]["pid"], signal.SIGKILL)  # started again as it was
    service.until(lambda: [told["epoch"] for told in service.told("worker") if told["from"] == born["from"]] == [2, 3])
    (service.place / "live").unlink()
    gone(service, 1)
    service.until(lambda: len(service.members()) == 4)
    assert old not in service.members()
    service.signal(signal.SIGTERM)
    assert service.ended() == Exit.STOPPED
    assert service.log(level="error", msg="uncaught exception, the process ends") == []


def test_a_replaced_dispatcher_is_not_started_again(start):
    """Its clients go to the new one; nothing is left that its workers could do."""
    service = start()
    old = service.ready()["from"]
    (service.place / "live").touch()
    service.order("ask", {"t": "admin", "id": 7, "do": "reload", "everything": True})
    service.until(lambda: service.told("retire"))
    os.kill(old, signal.SIGKILL)
    gone(service, 1)
    service.until(lambda: len(service.members()) == 4)
    assert len(service.told("born")) == 2


def test_another_version_replaces_everything_once(start):
    service = start()
    old = service.ready()["from"]
    (service.place / "version").write_text("99.0")
    reload(service)
    gone(service, 1)
    service.until(lambda: service.state()["from"] != old)
    reload(service)  # the dispatcher is of that version already
    gone(service, 2)
    assert len(service.told("born")) == 2
    assert [told["pool"] for told in service.told("generation")] == [2]
    assert len(service.members()) == 4


def test_a_new_dispatcher_that_does_not_come_up(start):
    """The old one is untouched."""
    service = start()
    before = service.members() if service.ready() else set()
    (service.place / "version").write_text("99.0")
    (service.place / "no_dispatcher").touch()
    reload(service)
    assert outcomes(service) == ["dispatcher: failed to start five times in a row"]
    service.until(lambda: service.members() == before)
    assert service.told("retire") == []
