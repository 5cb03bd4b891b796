"""The daemon's configuration as one declaration: defaults, ranges, help; TOML keys, COLIBRI_* variables and flags
follow from the names.

Adding a setting is one entry of :class:`Settings`; CONFIG.md and the example file are then remade with
``python -m colibri_daemon.common.reference --write``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from colibri_protocol import limits
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationInfo, model_validator

from .address import FORMS
from .pages import MAX_KEYS
from .values import (
    LAST_UID,
    Address,
    Auto,
    Chunk,
    FilePath,
    FilePathOrNone,
    Gids,
    Mode,
    Size,
    Text,
    Uids,
    format_size,
    text,
    toml,
)

SOCKET_PATH_BYTES = 107  # sun_path without its terminating 0


def _field(section: str, default: Any, allowed: str, help: str, **constraints: Any) -> Any:
    extra = {"section": section, "allowed": allowed}
    return Field(default, description=help, json_schema_extra=extra, **constraints)


def _int(section: str, default: int, low: int, high: int, help: str) -> Any:
    return _field(section, default, f"a whole number, {low} to {high}", help, ge=low, le=high)


def _seconds(section: str, default: float, low: float, high: float, help: str) -> Any:
    return _field(section, default, f"seconds, {low:g} to {high:g}", help, ge=low, le=high, allow_inf_nan=False)


def _size(section: str, default: int, low: int, high: int, help: str) -> Any:
    allowed = f"bytes or a size such as 512M, 4G or 1.5GiB, {format_size(low)} to {format_size(high)}"
    return _field(section, default, allowed, help, ge=low, le=high)


def _choice(section: str, default: str, help: str, *choices: str) -> Any:
    return _field(section, default, f"one of {', '.join(choices)}", help)


def _auto(section: str, high: int, help: str) -> Any:
    return _field(section, None, f"auto, or a whole number, 0 to {high}", help, ge=0, le=high)


_SERVER = limits.ServerLimits()
_POSITION = 1 << 24


ONE_SOURCE = object()  # as validation context: the values of one source alone, which need not agree with the defaults


class Settings(BaseModel):
    """Immutable. What can be judged without the model is checked, the rest when the model is (worker.check)."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _warnings: list[str] = PrivateAttr(default_factory=list)
    _again: Callable[[], Settings] | None = PrivateAttr(default=None)

    # fmt: off
    model: FilePathOrNone = _field("Model", None, "a folder",
        "Model folder, as made by colibrid convert. Needed to serve.")
    verify: bool = _field("Model", False, "true or false",
        "Check every checksum of the model before serving.")
    load_seconds: float = _seconds("Model", 600.0, 1, 86400,
        "Loading that makes no progress for this long is given up.")

    socket: FilePath = _field("Socket", Path("/run/colibri/colibri.sock"),
        f"a path of at most {SOCKET_PATH_BYTES} bytes", "Unix socket that clients connect to.")
    socket_mode: Mode = _field("Socket", 0o660, 'octal digits as text, "0000" to "0777"',
        "File mode of the socket: who may connect.", ge=0, le=0o777)
    socket_group: Text = _field("Socket", None, "a group's name or number",
        "Group of the socket. Empty: the daemon's own.")
    admin_socket: FilePathOrNone = _field("Socket", None, f"a path of at most {SOCKET_PATH_BYTES} bytes",
        "Unix socket for administration, for the daemon's own user and root only. Empty: the client socket's path with "
        ".admin behind it.")

    workers: int = _int("Workers", 1, 1, 256,
        "Worker processes; each has its own batch and its share of the cores.")
    threads: int = _int("Workers", 0, 0, 1024,
        "Engine threads of a worker. 0: usable physical cores / workers.")
    max_seqs: int = _int("Workers", 32, 1, MAX_KEYS,
        "Requests running at once in a worker.")
    step_tokens: Chunk = _field("Workers", 0, "0, or a whole number, 8 to 512",
        "Most prompt tokens in a step. 0: from measured speed, so that no step lasts longer than 100 ms or one pass "
        "over the weights.")
    hang_seconds: float = _seconds("Workers", 10.0, 1, 3600,
        "A process that shows no progress for this long is replaced. A long step is progress.")
    degraded_seconds: float = _seconds("Workers", 2.0, 1, 3600,
        "A process that shows no progress for this long is named in the daemon's state, which is then degraded.")

    kv_bytes: Size = _size("Memory", 0, 0, 1 << 50,
        "KV cache of all workers together. 0: half of what is free after the weights, at most what all can use.")
    kv_format: Literal["auto", "f16", "f32"] = _choice("Memory", "auto",
        "How keys and values are stored. auto: f16 with q8 and q4 weights, else f32.", "auto", "f16", "f32")
    kv_eviction: Literal["lru", "lfu", "size_aware"] = _choice("Memory", "lru",
        "Which cached prefix goes first when memory is needed. lru: least recently used; lfu: least often, recent uses "
        "counting more; size_aware: the far ends of long texts before short ones.", "lru", "lfu", "size_aware")
    slab_tokens: int = _field("Memory", 64, "a multiple of 16, 16 to 1024",
        "Tokens in a slab, the unit of KV memory.", ge=16, le=1024, multiple_of=16)

    pinned: Auto = _auto("Attention", _POSITION,
        "Tokens at the start of a text that are always seen. auto: the model's default.")
    window: Auto = _auto("Attention", _POSITION,
        "Latest tokens that are seen. 0: all of them; auto: the model's default.")
    positions: Literal["cache", "absolute"] = _choice("Attention", "cache",
        "How the distance to a pinned token is counted once text between has left the window.", "cache", "absolute")
    max_tokens_total: int = _int("Attention", 131072, 1, _POSITION,
        "Longest prompt and output together, in tokens.")

    queue_requests: int = _int("Queue", 0, 0, 1 << 20,
        "Requests that may wait. 0: 4 x workers x max_seqs.")
    queue_tokens: int = _int("Queue", _SERVER.queue_tokens, 1, 1 << 30,
        "Prompt tokens that may wait.")
    queue_seconds: float = _seconds("Queue", limits.QUEUE_SECONDS, 0.1, 3600,
        "Longest wait for a worker.")

    connections: int = _int("Clients", _SERVER.connections, 1, 65536,
        "Open connections.")
    connections_per_uid: int = _int("Clients", _SERVER.connections_per_uid, 1, 65536,
        "Open connections of one user.")
    requests_per_connection: int = _int("Clients", _SERVER.requests, 1, 65536,
        "Live requests of a connection.")
    requests_per_connection_trusted: int = _int("Clients", _SERVER.requests_trusted, 1, 65536,
        "Live requests of a trusted user's connection.")
    requests_per_uid: int = _int("Clients", 1024, 0, 1 << 20,
        "Live requests of one user over all connections, of a trusted user for each tenant. 0: no limit.")
    allowed_uids: Uids = _field("Clients", (), f"users' names or numbers, 0 to {LAST_UID}",
        "Users who may connect, beside trusted ones. With allowed_gids empty too: whoever socket_mode lets in.")
    allowed_gids: Gids = _field("Clients", (), f"groups' names or numbers, 0 to {LAST_UID}",
        "Groups whose members may connect, beside allowed_uids.")
    trusted_uids: Uids = _field("Clients", (), f"users' names or numbers, 0 to {LAST_UID}",
        "Users who may act for tenants, such as a gateway's.")
    max_frame: Size = _size("Clients", _SERVER.frame, 4096, limits.FRAME_CEILING,
        "Largest message accepted.")

    metrics: Address = _field("Metrics", None, FORMS,
        "Where whoever can connect finds /metrics for Prometheus, /health/live and /health/ready. Empty: nowhere.")

    drain_seconds: float = _seconds("Stopping", 30.0, 0, 86400,
        "Time for live requests to finish after SIGTERM.")

    log_level: Literal["debug", "info", "warning", "error"] = _choice("Logs", "info",
        "Least important messages that are written.", "debug", "info", "warning", "error")
    log_format: Literal["auto", "json", "text"] = _choice("Logs", "auto",
        "auto: text on a terminal, else JSON.", "auto", "json", "text")
    # fmt: on

    @model_validator(mode="after")
    def _agree(self, info: ValidationInfo) -> Settings:
        if info.context is not ONE_SOURCE and (found := list(self.conflicts())):
            raise ValueError("; ".join(message for _, message in found))
        return self

    def conflicts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """The settings that do not agree, and what to do about it."""
        if self.pinned and self.window == 0:
            yield ("pinned", "window"), (f"pinned = {self.pinned} with window = 0, which sees everything: set window "
                                         "to a number or auto, or pinned to 0")  # fmt: skip
        if (size := len(os.fsencode(self.socket))) > SOCKET_PATH_BYTES:
            yield ("socket",), f"socket has {size} bytes; a Unix socket's path has at most {SOCKET_PATH_BYTES}"
        elif (size := len(os.fsencode(self.admin_path))) > SOCKET_PATH_BYTES:
            yield ("admin_socket",), (f"admin_socket, {self.admin_path}, has {size} bytes; a Unix socket's path has at "
                                      f"most {SOCKET_PATH_BYTES}: set it to a shorter one")  # fmt: skip
        if self.admin_path == self.socket:
            yield ("socket", "admin_socket"), "socket and admin_socket are the same path: set admin_socket to another"

    def origin(self, name: str) -> str:
        """Where a value comes from: "--workers", "COLIBRI_WORKERS", "/etc/colibrid.toml:3" or "default"."""
        return self._origins.get(name, "default")

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was odd about the sources but no reason to refuse them: for the log."""
        return tuple(self._warnings)

    def again(self) -> Settings:
        """From the same flags, environment and file, as they are now. SettingsError as load_settings()."""
        if self._again is None:
            raise ValueError("these settings were not loaded here")
        return self._again()

    def to_json(self) -> str:
        """For another process: the values as they may be typed, without where they come from."""
        return json.dumps({name: setting.text(getattr(self, name)) for name, setting in SETTINGS.items()})

    @classmethod
    def from_json(cls, text: str) -> Settings:
        return cls.model_validate_json(text)

    @property
    def admin_path(self) -> Path:
        return self.admin_socket or Path(f"{self.socket}.admin")

    @property
    def queue_limit(self) -> int:
        """Most requests that may wait."""
        return self.queue_requests or 4 * self.workers * self.max_seqs

    def threads_per_worker(self, cores: int) -> int:
        """cores: physical cores the daemon may use."""
        return self.threads or max(1, cores // self.workers)

    def crowding(self, cores: int) -> str | None:
        """What is wrong with workers x threads on so many cores, counted within affinity and quota, and the remedy:
        lanes that share a core wait for each other in every phase of a step."""
        threads = self.threads_per_worker(cores)
        if threads * self.workers <= cores:
            return None
        remedy = "lower one of them" if self.threads else "lower workers"
        return (f"workers x threads is {self.workers} x {threads} = {self.workers * threads}, more than the {cores} "
                f"cores the daemon may use: {remedy}, or widen its CPU quota or affinity")  # fmt: skip


# kind → placeholder in --help
_METAVARS = {"size": "SIZE", "mode": "MODE", "path": "PATH", "text": "NAME", "uids": "USER,...", "gids": "GROUP,...",
             "float": "SECONDS", "address": "ADDR"}


class Setting(NamedTuple):
    """A line of the declaration, for whoever lists settings. kind: the name in :mod:`values` of its type, else "int",
    "float", "bool" or "choice"."""

    name: str
    section: str
    help: str
    allowed: str
    default: Any
    kind: str
    choices: tuple[str, ...]

    @property
    def metavar(self) -> str:
        return _METAVARS.get(self.kind, "N")

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        return f"COLIBRI_{self.name.upper()}"

    def text(self, value: Any) -> str:
        return text(self.kind, value)

    def toml(self, value: Any) -> str:
        return toml(self.kind, value)


def _setting(name: str) -> Setting:
    field = Settings.model_fields[name]
    extra: Any = field.json_schema_extra
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    tags = [tag for tag in field.metadata if isinstance(tag, str)]
    kind = tags[0] if tags else "choice" if choices else getattr(field.annotation, "__name__", "").lower()
    return Setting(name, extra["section"], field.description or "", extra["allowed"], field.default, kind, choices)


SETTINGS: dict[str, Setting] = {name: _setting(name) for name in Settings.model_fields}
