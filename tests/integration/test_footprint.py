"""What the daemon costs beside weights and KV cache: memory, idle CPU, descriptors."""

from __future__ import annotations

import os
import time
from pathlib import Path

from colibri_client import Client
from fixtures.daemon import Daemon
from fixtures.models import Models

MEMORY = 300 << 20
TICKS = os.sysconf("SC_CLK_TCK")


def private_bytes(pid: int) -> int:
    """PSS without mapped weight files and shared memory (KV cache, arenas)."""
    total, skip = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head = line.split()
        if not head[0].endswith(":"):
            skip = len(head) > 5 and (head[5].endswith(".bin") or head[5].startswith(("/dev/zero", "/memfd:")))
        elif head[0] == "Pss:" and not skip:
            total += 1024 * int(head[1])
    return total


def test_resident_memory_without_weights_and_kv(models: Models) -> None:
    with Daemon(models.tiny("q4"), workers=2, threads=1, kv_bytes="64M") as daemon:
        with Client(daemon.socket) as client:
            for seed in range(8):
                client.complete([1, 2, 3, seed], max_tokens=20, temperature=1.0, seed=seed)
        used = {pid: private_bytes(pid) for pid in daemon.pids()}
    assert len(used) == 5
    assert sum(used.values()) < MEMORY + (64 << 20), used


def test_idle_daemon_uses_no_cpu(models: Models) -> None:
    """Under 1 % of a core over three seconds, all processes together."""
    with Daemon(models.tiny("q4"), workers=2, threads=1) as daemon, Client(daemon.socket) as client:
        client.complete([1, 2, 3], max_tokens=4)
        before, begin = cpu_ticks(daemon), time.monotonic()
        time.sleep(3)
        assert (cpu_ticks(daemon) - before) / TICKS < 0.01 * (time.monotonic() - begin) + 1 / TICKS


def cpu_ticks(daemon: Daemon) -> int:
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in daemon.pids()]
    return sum(int(f[11]) + int(f[12]) for f in fields)


def test_descriptors_return_to_the_baseline(models: Models) -> None:
    with Daemon(models.tiny("q4")) as daemon:
        with Client(daemon.socket) as client:
            client.complete([1, 2, 3], max_tokens=2)
        baseline = open_descriptors(daemon)
        for _ in range(50):
            with Client(daemon.socket) as client:
                client.complete([1, 2, 3], max_tokens=2)
        deadline = time.monotonic() + 10
        while open_descriptors(daemon) > baseline and time.monotonic() < deadline:
            time.sleep(0.02)
        assert open_descriptors(daemon) <= baseline


def open_descriptors(daemon: Daemon) -> int:
    return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in daemon.pids())
