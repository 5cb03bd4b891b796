"""Memory that is there to take, from files as kernels write them."""

from __future__ import annotations

from pathlib import Path

import pytest
from colibri_daemon.common.memory import available, kv_bytes

MIB = 1 << 20
MACHINE = {"proc/meminfo": "MemTotal: 8192 kB\nMemAvailable: 4096 kB\nHugePages_Total: 0\n"}


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in (MACHINE | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(folder: str, current: int, limit: str = "max", cached: int = 0, high: str = "max") -> dict[str, str]:
    return {
        f"sys/fs/cgroup/{folder}memory.max": limit + "\n",
        f"sys/fs/cgroup/{folder}memory.high": high + "\n",
        f"sys/fs/cgroup/{folder}memory.current": f"{current}\n",
        f"sys/fs/cgroup/{folder}memory.stat": f"anon 5\ninactive_file {cached}\nactive_file 1\n",
    }


def v1(folder: str, usage: int, limit: int, cached: int = 0) -> dict[str, str]:
    mount = f"sys/fs/cgroup/memory/{folder}"
    return {
        f"{mount}memory.limit_in_bytes": f"{limit}\n",
        f"{mount}memory.usage_in_bytes": f"{usage}\n",
        f"{mount}memory.stat": f"inactive_file 99\ntotal_inactive_file {cached}\ntotal_active_file 1\n",
    }


V1_CGROUP = {"proc/self/cgroup": "9:name=systemd:/\n4:memory:/a/b\n1:cpu:/\n0::/\n"}
NO_LIMIT = 9223372036854771712


def test_the_machine_alone(tmp_path: Path) -> None:
    assert available(system(tmp_path, {})) == 4 * MIB


def test_old_kernels_without_an_estimate(tmp_path: Path) -> None:
    assert available(system(tmp_path, {"proc/meminfo": "MemTotal: 8192 kB\nMemFree: 1024 kB\n"})) == MIB


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (v2("a/b/", 100, "1000"), 901),
        (v2("a/b/", 100, "1000", cached=50), 951),
        (v2("a/b/", 100, "1000", high="700"), 601),
        (v2("a/b/", 100) | v2("a/", 500, "800"), 301),
        (v2("a/b/", 100, "1000") | v2("a/", 500, "10000"), 901),
        (v2("a/b/", 1200, "1000"), 0),
        (v2("a/b/", 100, "99999999999"), 4 * MIB),
        ({}, 4 * MIB),
    ],
)
def test_version_2(tmp_path: Path, groups: dict[str, str], expected: int) -> None:
    assert available(system(tmp_path, groups | {"proc/self/cgroup": "0::/a/b\n"})) == expected


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (v1("a/b/", 100, 1000, cached=30), 931),
        (v1("a/b/", 100, NO_LIMIT), 4 * MIB),
        (v1("a/b/", 100, NO_LIMIT) | v1("", 200, 500), 301),
        (v1("", 200, 500), 301),  # a container that sees only its own group, as the mount
    ],
)
def test_version_1(tmp_path: Path, groups: dict[str, str], expected: int) -> None:
    assert available(system(tmp_path, groups | V1_CGROUP)) == expected


def test_this_machine() -> None:
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert 0 < available() <= 1024 * int(total.split()[1])


def test_half_of_what_the_weights_leave_in_whole_slabs() -> None:
    assert kv_bytes(1000, 400, 7, 1000) == 294
    assert kv_bytes(1000, 400, 7, 10) == 70


@pytest.mark.parametrize("free", [0, 400, 413])
def test_no_room_for_a_slab(free: int) -> None:
    with pytest.raises(ValueError, match="set kv_bytes"):
        kv_bytes(free, 400, 7, 1000)
