"""The installed units under a real systemd: start, sandbox, socket activation, reload, restart, stop, and the gateway.

What fixtures/machine.py boots is this host's systemd; the daemon runs with every restriction of its unit.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from colibri_engine import Engine
from fixtures import machine
from fixtures.installed import Installation
from fixtures.machine import Machine
from fixtures.models import Models

CONFIGURATION = "/etc/colibri/colibrid.toml"
GENERATE = "colibri-client generate --tokens 1,2,3 --max-tokens 8 --json"


@pytest.fixture(scope="module")
def host(installation: Installation, models: Models, chat_model: Path) -> Iterator[Machine]:
    """A machine with the package installed, as deploy/README.md says, and two models."""
    machine.require()
    with Machine() as booted:
        booted.copy(installation.destination, "/")
        booted.run("systemd-sysusers colibri.conf && systemd-tmpfiles --create colibri.conf && systemctl daemon-reload")
        booted.copy(chat_model, "/var/lib/colibri/q4")
        booted.copy(models.tiny("q8"), "/var/lib/colibri/q8")
        yield booted


@pytest.fixture
def service(host: Machine) -> Iterator[Machine]:
    """The same with the service started on the first model; afterwards nothing of it runs."""
    host.run(f"ln -sfn q4 /var/lib/colibri/model && echo 'model = \"/var/lib/colibri/model\"' > {CONFIGURATION}")
    host.run("systemctl start colibri.service")
    yield host
    host.run("systemctl stop colibri.socket colibri.service colibri-gateway.service", check=False)
    host.run("systemctl reset-failed", check=False)
    host.run("! pgrep --uid colibri")


def show(host: Machine, unit: str, name: str) -> str:
    return host.run(f"systemctl show --value --property {name} {unit}").stdout.strip()


def tokens(host: Machine, prefix: str = "") -> list[int]:
    tokens: list[int] = json.loads(host.run(f"{prefix} {GENERATE} 2>/dev/null").stdout)["tokens"]
    return tokens


def pids(host: Machine, role: str) -> list[str]:
    return host.run(f"pgrep --full '^colibrid: {role}'", check=False).stdout.split()


def test_start_is_over_when_it_serves(service: Machine, chat_model: Path) -> None:
    """No wait between the two: Type=notify."""
    with Engine.open(chat_model) as engine:
        assert tokens(service) == engine.generate([1, 2, 3], 8, stop_ids=[2])
    assert show(service, "colibri.service", "StatusText") == "ready"
    assert show(service, "colibri.service", "MainPID") in pids(service, "supervisor")


def test_every_process_is_locked_in(service: Machine) -> None:
    found = pids(service, "")
    assert len(found) >= 4  # supervisor, dispatcher, pool, worker
    for pid in found:
        status = dict(line.split(":\t", 1) for line in service.run(f"cat /proc/{pid}/status").stdout.splitlines()
                      if ":\t" in line)  # fmt: skip
        assert (status["Seccomp"], status["NoNewPrivs"], int(status["CapBnd"], 16)) == ("2", "1", 0)
        devices = service.run(f"nsenter --net --target {pid} cat /proc/net/dev").stdout.splitlines()[2:]
        assert [line.split(":")[0].strip() for line in devices] == ["lo"]
        assert service.run(f"nsenter --mount --target {pid} touch /usr/x", check=False).returncode != 0
        assert service.run(f"nsenter --mount --target {pid} ls -A /root").stdout == ""


def test_no_system_call_is_refused(service: Machine) -> None:
    """With a refused call ending the process instead of failing, all still works."""
    folder = "/run/systemd/system/colibri.service.d"
    service.run(f"mkdir -p {folder} && printf '[Service]\\nSystemCallErrorNumber=kill\\n' > {folder}/kill.conf")
    service.run("systemctl daemon-reload && systemctl restart colibri.service")
    assert show(service, "colibri.service", "SystemCallErrorNumber") != str(errno.EPERM)
    assert tokens(service)
    service.run("colibri-client admin reload && systemctl stop colibri.service")
    assert show(service, "colibri.service", "Result") == "success"
    assert "SIGSYS" not in service.run("journalctl --unit colibri.service --output cat --lines 100").stdout
    service.run(f"rm -r {folder} && systemctl daemon-reload")


def test_who_may_connect(service: Machine) -> None:
    """The group, nobody else; the daemon knows who it was."""
    service.run("useradd outsider && useradd --groups colibri member")
    assert service.run(f"runuser --user outsider -- {GENERATE}", check=False).returncode == 3
    assert tokens(service, "runuser --user member --")
    uid = service.run("id --user member").stdout.strip()
    assert f'"uid":{uid},' in service.run("journalctl --unit colibri.service --output cat").stdout


def test_reload_goes_over_to_another_model(service: Machine, models: Models) -> None:
    supervisor = show(service, "colibri.service", "MainPID")
    service.run("ln -sfn q8 /var/lib/colibri/model && systemctl reload colibri.service")
    with Engine.open(models.tiny("q8")) as engine:
        expected = engine.generate([1, 2, 3], 8, stop_ids=[2])
    service.until(lambda: tokens(service) == expected)
    assert show(service, "colibri.service", "MainPID") == supervisor


def test_what_is_killed_comes_back(service: Machine) -> None:
    """A worker: through the supervisor. The supervisor: through systemd, and all that was left of it is gone."""
    (worker,) = pids(service, "worker")
    service.run(f"kill -KILL {worker}")
    assert tokens(service)
    old = set(pids(service, ""))
    service.run(f"kill -KILL {show(service, 'colibri.service', 'MainPID')}")
    service.run("colibri-client health --wait 60")
    assert tokens(service)
    assert not old & set(pids(service, ""))
    assert show(service, "colibri.service", "NRestarts") == "1"


def test_what_cannot_start_is_not_started_again(service: Machine) -> None:
    service.run(f"systemctl stop colibri.service && echo 'model = \"/nowhere\"' > {CONFIGURATION}")
    assert service.run("systemctl start colibri.service", check=False).returncode != 0
    assert show(service, "colibri.service", "ExecMainStatus") == "4"
    assert show(service, "colibri.service", "ActiveState") == "failed"
    assert show(service, "colibri.service", "NRestarts") == "0"


def test_stop_is_orderly(service: Machine) -> None:
    """The sockets' files stay, as they would for a restart; what systemd has kept for one is gone."""
    assert show(service, "colibri.service", "NFileDescriptorStore") == "5"
    service.run("systemctl stop colibri.service")
    assert show(service, "colibri.service", "Result") == "success"
    service.until(lambda: show(service, "colibri.service", "NFileDescriptorStore") == "0")
    assert service.run(GENERATE, check=False).returncode == 3
    service.run("systemctl start colibri.service")
    assert tokens(service)


def test_who_is_to_go_first_when_memory_is_short(service: Machine) -> None:
    """What OOMScoreAdjust sets is the supervisor's; where a machine may not lower it, it is 0."""
    scores = {role: int(service.run(f"cat /proc/{pids(service, role)[0]}/oom_score_adj").stdout)
              for role in ("supervisor", "kvpool", "dispatcher", "worker")}  # fmt: skip
    base = scores["supervisor"]
    assert base in (-200, 0)
    assert scores == {"supervisor": base, "kvpool": base + 100, "dispatcher": base + 100, "worker": base + 300}


def test_socket_activation(service: Machine) -> None:
    """The first client starts the daemon; a restart leaves the socket; who connects meanwhile is served afterwards."""
    service.run("systemctl stop colibri.service && systemctl start colibri.socket")
    assert pids(service, "") == []
    assert service.run("stat --format '%U %G %a' /run/colibri/colibri.sock /run/colibri").stdout.splitlines() == [
        "colibri colibri 660", "colibri colibri 750"]  # fmt: skip
    inode = service.run("stat --format %i /run/colibri/colibri.sock").stdout
    first = tokens(service)
    assert show(service, "colibri.service", "ActiveState") in ("activating", "active")
    service.run("systemctl restart --no-block colibri.service")
    assert tokens(service) == first
    assert service.run("stat --format %i /run/colibri/colibri.sock").stdout == inode
    service.run("systemctl stop colibri.socket")
    assert tokens(service) == first, "without the unit the daemon still has the socket"


def test_metrics_on_loopback(service: Machine) -> None:
    """With the drop-in that is for this."""
    drop_in = "/run/systemd/system/colibri.service.d/metrics-on-loopback.conf"
    service.run(f"install -D -m 644 /usr/local/share/colibri/metrics-on-loopback.conf {drop_in}")
    service.run(f"echo 'metrics = \"127.0.0.1:9464\"' >> {CONFIGURATION}")
    service.run("systemctl daemon-reload && systemctl restart colibri.service")
    service.until(lambda: "colibri_ready 1" in fetch(service, "http://127.0.0.1:9464/metrics"))
    (pid,) = pids(service, "metrics")
    own = policy(service, show(service, "colibri.service", "MainPID"))
    limit = service.run(f"awk '/realtime priority/ {{ print $4 }}' /proc/{pid}/limits").stdout.strip()
    may = limit == "1" and own == "SCHED_OTHER"  # a host may not let this systemd raise limits
    service.until(lambda: policy(service, pid) == ("SCHED_RR" if may else own))
    service.run(f"rm {drop_in} && systemctl daemon-reload")


def policy(host: Machine, pid: str) -> str:
    """How it is scheduled."""
    return host.run(f"chrt --pid {pid}").stdout.splitlines()[0].split()[-1]


def fetch(host: Machine, url: str) -> str:
    """A page; empty if there is none."""
    ask = f"import urllib.request; print(urllib.request.urlopen('{url}').read().decode())"
    done = host.run(f'python3 -c "{ask}"', check=False)
    return done.stdout if done.returncode == 0 else ""


def test_gateway(service: Machine, installation: Installation) -> None:
    """It reaches the daemon through the group, locked in as its unit says."""
    if installation.gateway is None:
        pytest.skip("needs the gateway")
    service.run("systemctl start colibri-gateway.service")
    service.until(lambda: fetch(service, "http://127.0.0.1:8080/health/ready"))
    assert '"id":"tiny' in fetch(service, "http://127.0.0.1:8080/v1/models")
    status = service.run(f"cat /proc/{show(service, 'colibri-gateway.service', 'MainPID')}/status").stdout
    assert "Seccomp:\t2" in status
    assert "CapBnd:\t0000000000000000" in status
    service.run("systemctl stop colibri.service")
    assert show(service, "colibri-gateway.service", "ActiveState") == "active"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs the package systemd")
def test_systemd_has_no_complaint(host: Machine) -> None:
    units = "colibri.service colibri.socket colibri-gateway.service"
    host.run(f"systemd-analyze verify --man=no {units}")
    said = host.run("journalctl --boot --grep 'colibri.*(ignoring|Unknown|Failed to parse)'", check=False).stdout
    assert "colibri" not in said
