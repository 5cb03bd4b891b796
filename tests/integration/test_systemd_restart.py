"""The service's end and next start under a real systemd: what it keeps meanwhile, what clients see, the watchdog.

The protocols alone, against what plays systemd: test_warm_restart.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures import machine
from fixtures.installed import Installation
from fixtures.machine import Machine

pytestmark = pytest.mark.full
UNIT = "colibri.service"
DROP_IN = f"/run/systemd/system/{UNIT}.d/test.conf"
PYTHON = "/usr/local/lib/colibri/bin/python"
# Asks for so many tokens behind each of 20 prompts, all at once, and runs "act" a second later; prints [tokens of the
# prompt, of these from the cache, tokens] of each.
ASK = """
import asyncio, json, random, subprocess, sys
from colibri_client import AsyncClient

count, act = int(sys.argv[1]), sys.argv[2]
prompts = [[random.Random(seed).randrange(3, 2048) for _ in range(330)] for seed in range(20)]

async def one(client, prompt):
    answer = await client.complete(prompt, max_tokens=count, ignore_eos=True, seed=5, temperature=0.8)
    return [len(prompt), answer.usage.cached, answer.tokens]

async def main():
    async with AsyncClient(connect_timeout=60, reconnect=120, retries=20) as client:
        going = [asyncio.create_task(one(client, prompt)) for prompt in prompts]
        if act:
            await asyncio.sleep(1)
            assert not any(task.done() for task in going), "too fast for this test"
            await asyncio.to_thread(subprocess.run, act, shell=True, check=True)
        print(json.dumps([await task for task in going]))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def host(installation: Installation, chat_model: Path) -> Iterator[Machine]:
    machine.require()
    with Machine() as booted:
        booted.copy(installation.destination, "/")
        booted.run("systemd-sysusers colibri.conf && systemd-tmpfiles --create colibri.conf && systemctl daemon-reload")
        booted.copy(chat_model, "/var/lib/colibri/q4")
        yield booted


@pytest.fixture
def service(host: Machine) -> Iterator[Machine]:
    """Started, with an empty cache."""
    configure(host)
    host.run(f"systemctl start {UNIT}")
    yield host
    host.run(f"systemctl stop colibri.socket {UNIT}; rm -f {DROP_IN}; systemctl daemon-reload", check=False)
    host.run("systemctl reset-failed", check=False)


def configure(host: Machine, *lines: str) -> None:
    body = "\n".join(['model = "/var/lib/colibri/q4"', "workers = 2", "threads = 1", *lines])
    host.run("cat > /etc/colibri/colibrid.toml", given=body)


def drop_in(host: Machine, *lines: str) -> None:
    host.run(f"mkdir -p $(dirname {DROP_IN}) && cat > {DROP_IN}", given="\n".join(["[Service]", *lines]))
    host.run("systemctl daemon-reload")


def show(host: Machine, name: str) -> str:
    return host.run(f"systemctl show --value --property {name} {UNIT}").stdout.strip()


def ask(host: Machine, count: int = 8, act: str = "") -> list[Any]:
    done = host.run(f"{PYTHON} - {count} '{act}'", given=ASK)
    answers: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def hit_rate(answers: list[Any]) -> float:
    return sum(cached for _, cached, _ in answers) / sum(prompt for prompt, _, _ in answers)


def tokens(answers: list[Any]) -> list[Any]:
    return [answer[2] for answer in answers]


def said(host: Machine, text: str) -> str:
    return host.run(f"journalctl --unit {UNIT} --output cat --grep '{text}'", check=False).stdout


@pytest.mark.parametrize("way", [f"systemctl restart {UNIT}", f"systemctl kill -s KILL --kill-who main {UNIT}"])
@pytest.mark.parametrize("socket_unit", [False, True])
def test_the_cache_is_warm_after_it(service: Machine, way: str, socket_unit: bool) -> None:
    """By the first client, which connects while nobody listens. A life that is killed may have been wrong about the
    last three seconds before."""
    if socket_unit:
        service.run(f"systemctl stop {UNIT} && systemctl start colibri.socket {UNIT}")
    cold, before = ask(service), ask(service)
    service.run("sleep 3.5")
    old = show(service, "MainPID")
    service.run(way)
    after = ask(service)
    print(f"prefix hit rate: cold {hit_rate(cold):.3f}, before {hit_rate(before):.3f}, after {hit_rate(after):.3f}")
    assert show(service, "MainPID") != old
    assert hit_rate(cold) == 0
    assert hit_rate(after) >= 0.9 * hit_rate(before) > 0.8
    assert tokens(after) == tokens(before) == tokens(cold)
    assert show(service, "NFileDescriptorStore") == ("4" if socket_unit else "5")


def test_another_size_begins_empty(service: Machine) -> None:
    first = ask(service)
    configure(service, 'kv_bytes = "16M"')
    service.run(f"systemctl restart {UNIT}")
    again = ask(service)
    assert hit_rate(again) == 0
    assert tokens(again) == tokens(first)
    assert "its slabs is" in said(service, "the kept KV cache is not used")
    service.run(f"systemctl restart {UNIT}")
    assert hit_rate(ask(service)) > 0.9


def test_a_reload_to_another_size_is_what_is_kept(service: Machine) -> None:
    refused = said(service, "the kept KV cache is not used")
    configure(service, 'kv_bytes = "16M"')
    service.run("colibri-client admin reload")
    ask(service)
    service.run(f"systemctl restart {UNIT}")
    assert hit_rate(ask(service)) > 0.9
    assert said(service, "the kept KV cache is not used") == refused
    assert show(service, "NFileDescriptorStore") == "5"


@pytest.mark.parametrize("way", [f"systemctl restart {UNIT}", f"systemctl kill -s KILL --kill-who main {UNIT}"])
def test_streams_go_on_through_it(service: Machine, way: str) -> None:
    """Restarted, live requests are finished first; killed, the client resumes them in the next life. Nobody sees an
    error, and every token is the one that would have come."""
    expected = ask(service, 1000)
    old = show(service, "MainPID")
    assert tokens(ask(service, 1000, way)) == tokens(expected)
    assert show(service, "MainPID") != old


@pytest.mark.parametrize("role", ["supervisor", "dispatcher"])  # what is said of the second would be found for both
def test_what_stands_still_is_started_again(service: Machine, role: str) -> None:
    """Here the supervisor may not end what hangs, or is what hangs."""
    configure(service, "hang_seconds = 3600")
    drop_in(service, "WatchdogSec=4")
    service.run(f"systemctl restart {UNIT} && sleep 6")
    assert show(service, "NRestarts") == "0"  # it is fed
    service.run(f"kill -STOP $(pgrep --full '^colibrid: {role}')")
    service.until(lambda: show(service, "NRestarts") == "1")
    assert ask(service)
    assert ("the watchdog is not fed" in said(service, "no progress: the dispatcher")) is (role == "dispatcher")


def test_a_drain_has_the_time_it_needs(service: Machine) -> None:
    """The daemon asks systemd for it."""
    configure(service, "drain_seconds = 3600")
    drop_in(service, "TimeoutStopSec=1")
    service.run(f"systemctl restart {UNIT}")
    assert all(len(heard) == 4000 for heard in tokens(ask(service, 4000, f"systemctl stop {UNIT}")))
    assert show(service, "Result") == "success"
