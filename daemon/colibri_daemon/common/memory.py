"""How much memory there is to take: the machine's, within the limits of the cgroups this process is in. Linux."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KV_SHARE = 0.5  # of what is free after the weights


@dataclass(frozen=True)
class _Kind:
    """Files of one cgroup version. cached: what of the usage the kernel gives up when memory is needed."""

    mount: str
    limits: tuple[str, ...]
    usage: str
    cached: tuple[str, ...]


_V2 = _Kind("sys/fs/cgroup", ("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))
_V1 = _Kind("sys/fs/cgroup/memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes",
            ("total_inactive_file", "total_active_file"))  # fmt: skip


def available(root: Path = Path("/")) -> int:
    """Bytes that may still be used, file cache counted as free. root: where proc and sys are."""
    return max(0, min([_machine(root), *_groups(root)]))


def kv_bytes(free: int, weight_bytes: int, slab_bytes: int, slabs: int) -> int:
    """The default of the setting: KV_SHARE of what is free once the weights are in memory, in whole slabs, at most so
    many as can be used. ValueError if that is not even one."""
    count = min(slabs, int(max(0, free - weight_bytes) * KV_SHARE) // slab_bytes)
    if count < 1:
        raise ValueError(f"{free >> 20} MiB of memory are free; the weights take {weight_bytes >> 20} MiB and nothing "
                         "is left for the KV cache: give the daemon more memory or set kv_bytes")  # fmt: skip
    return count * slab_bytes


def machine(name: str, root: Path = Path("/")) -> int:
    """A line of /proc/meminfo, as it stands there; 0 if there is none."""
    return _fields(root / "proc/meminfo").get(name, 0)


def _machine(root: Path) -> int:
    fields = _fields(root / "proc/meminfo")
    return 1024 * fields.get("MemAvailable:", fields.get("MemFree:", 0))


def _groups(root: Path) -> Iterator[int]:
    """What each cgroup with a limit leaves, from this process's own up to the mount."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        kind = _V1 if "memory" in controllers.split(",") else _V2 if not controllers else None
        if kind is not None:
            mount = root / kind.mount
            group = mount / path.strip("/")
            for folder in (group, *group.parents):
                yield from _room(folder, kind)
                if folder == mount:
                    break


def _room(folder: Path, kind: _Kind) -> Iterator[int]:
    usage = _text(folder / kind.usage).strip()
    limits = [int(text) for name in kind.limits if (text := _text(folder / name).strip()).isdigit()]
    if usage.isdigit() and limits:
        stat = _fields(folder / "memory.stat")
        yield min(limits) - int(usage) + sum(stat.get(name, 0) for name in kind.cached)


def _fields(path: Path) -> dict[str, int]:
    """"name value" lines."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _text(path: Path) -> str:
    """Empty if there is no such file, or it may not be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
