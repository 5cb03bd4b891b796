"""Structured lines on stderr: JSON for machines, key=value for people. Never a token's content, by the caller's care.

``log.setup(role, settings)`` once per process (again after a fork), then ``log.get("queue").info("full", depth=128)``.
Standard logging underneath, so that asyncio's and other libraries' messages come in the same form.

Promises: a line is one write of at most PIPE_BUF bytes, so lines of several processes never mix; it holds no raw
newline or control character; logging never raises and never blocks. A line that cannot be written at once (full disk, a
pipe nobody reads, closed stderr) is dropped, and the next line that can be written is preceded by how many were.
"""

from __future__ import annotations

import functools
import io
import json
import logging
import os
import re
import select
import socket
import stat
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

from .declaration import Settings
from .journal import Journal, entry

LINE_BYTES = select.PIPE_BUF  # 4096: what a pipe takes whole or not at all
_FRAMES = 12  # innermost frames of a traceback
_PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
_STDERR = 2


class Logger:
    """Fields are ids, counts, times, names. One called as ts, level, role, pid, name or msg is ignored."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, msg: str, /, **fields: Any) -> None:
        self._log(logging.DEBUG, msg, fields)

    def info(self, msg: str, /, **fields: Any) -> None:
        self._log(logging.INFO, msg, fields)

    def warning(self, msg: str, /, **fields: Any) -> None:
        self._log(logging.WARNING, msg, fields)

    def error(self, msg: str, /, **fields: Any) -> None:
        self._log(logging.ERROR, msg, fields)

    def exception(self, msg: str, /, **fields: Any) -> None:
        """An error with the exception that is being handled."""
        self._log(logging.ERROR, msg, fields, sys.exc_info())

    def _log(self, level: int, msg: str, fields: dict[str, Any], exc_info: Any = None) -> None:
        logger = self._logger
        if logger.isEnabledFor(level):
            record = logging.LogRecord(logger.name, level, "", 0, msg, (), exc_info)
            record.fields = fields
            logger.handle(record)


def get(name: str) -> Logger:
    return Logger(logging.getLogger(name))


def setup(role: str, settings: Settings) -> None:
    """Sends everything this process logs to stderr as it is now. role: "supervisor", "dispatcher", "worker 0" …"""
    global _handler
    root = logging.getLogger()
    if _handler is not None:
        root.removeHandler(_handler)
        _handler.close()
    chosen = settings.log_format
    render = text_line if chosen == "text" or chosen == "auto" and os.isatty(_STDERR) else json_line
    journal = _is_journal(_STDERR)
    _handler = Handler(Output(_STDERR), role, render, journal, Journal() if journal else None)
    root.addHandler(_handler)
    root.setLevel(settings.log_level.upper())
    logging.captureWarnings(True)
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # costly, never shown
    sys.excepthook = _uncaught


def set_level(level: str) -> None:
    """Of this process, until the next setup()."""
    logging.getLogger().setLevel(level.upper())


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("python").critical("uncaught exception", exc_info=(kind, error, trace))


def _is_journal(fd: int) -> bool:
    """Whether fd is the journal's, as sd-daemon(3) says: JOURNAL_STREAM is its device and inode."""
    try:
        status = os.fstat(fd)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


# ---- lines ---------------------------------------------------------------------------------------------------------
# Of non-ASCII and control characters, escapes are all that is left.
_encode = json.JSONEncoder(separators=(",", ":"), default=str, allow_nan=False).encode
_needs_no_quotes = re.compile(r"[\w.,:;/@%+*~()\[\]{}<>|!?&#$^'-]+").fullmatch


def json_line(fields: Mapping[str, Any]) -> str:
    return _encode(fields)


def text_line(fields: Mapping[str, Any]) -> str:
    """``2025-01-31T12:00:00.000Z info    worker 0[4711] queue: full depth=128``"""
    rest = dict(fields)
    ts, level, role, pid, name, msg = (rest.pop(key) for key in ("ts", "level", "role", "pid", "name", "msg"))
    pairs = "".join(f" {key}={_pair_value(value)}" for key, value in rest.items())
    line = f"{ts} {level:7} {role}[{pid}] {name}: {msg}{pairs}"
    return line if line.isprintable() else "".join(map(_printable, line))


def _pair_value(value: Any) -> str:
    shown = str(value)
    plain = isinstance(value, int | float) or _needs_no_quotes(shown)
    return shown if plain else json.dumps(shown, ensure_ascii=False)


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _told(value: Any) -> str | None:
    """A field whose own form cannot be written, such as NaN in JSON."""
    try:
        return None if value is None else str(value)
    except Exception:
        return f"<{type(value).__name__}>"


def _shortened(fields: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Every value at most limit characters long. A traceback's end says more than its beginning."""
    short: dict[str, Any] = {}
    for key, value in fields.items():
        if not isinstance(value, int | float | None):
            value = str(value)[-limit:] if key == "exc" else str(value)[:limit]
        short[key] = value
    return short | {"truncated": True}


def _traceback(exc_info: Any) -> str:
    return "".join(traceback.format_exception(*exc_info, limit=-_FRAMES)).rstrip()


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


class Line(NamedTuple):
    """What is written, and what it was made of."""

    text: str
    fields: Mapping[str, Any]

    @property
    def fits(self) -> bool:
        """With a priority and the end of the line."""
        return len(_encoded(self.text)) + 4 <= LINE_BYTES


class Handler(logging.Handler):
    """Makes lines of records and counts those that could not be written."""

    def __init__(self, output: Output, role: str, render: Callable[[Mapping[str, Any]], str], priority: bool,
                 journal: Journal | None = None) -> None:
        """priority: in front of each line of output. journal: tried first."""
        super().__init__()
        self.output, self.journal = output, journal
        self._role, self._render, self._priority = role, render, priority
        self._dropped = 0
        self._second, self._date = -1, ""

    def emit(self, record: logging.LogRecord) -> None:
        if self._dropped and self._write(self._notice()):
            self._dropped = 0
        if self._dropped or not self._write(self._line(record)):
            self._dropped += 1

    def _write(self, line: Line) -> bool:
        priority = _PRIORITY.get(logging.getLevelName(str(line.fields["level"]).upper()), 5)
        if self.journal is not None and self.journal.send(entry(line.text, priority, line.fields)):
            return True
        prefix = f"<{priority}>" if self._priority else ""
        return self.output.write(_encoded(f"{prefix}{line.text}\n"))

    def after_fork(self) -> None:
        """In a child; see Output.after_fork()."""
        self.output.after_fork()
        if self.journal is not None:
            self.journal.close()

    def close(self) -> None:
        self.output.close()
        if self.journal is not None:
            self.journal.close()
        super().close()

    def _notice(self) -> Line:
        record = logging.LogRecord("log", logging.WARNING, "", 0, "lines were dropped: stderr took no more", (), None)
        record.fields = {"dropped": self._dropped}
        return self._line(record)

    def _line(self, record: logging.LogRecord) -> Line:
        head = {"ts": self._time(record.created), "level": record.levelname.lower(), "role": self._role,
                "pid": os.getpid(), "name": record.name, "msg": record.msg}  # fmt: skip
        fields = head | getattr(record, "fields", {}) | head
        try:
            if record.args:  # another library's
                fields["msg"] = record.getMessage()
            if record.exc_info:
                fields["exc"] = _traceback(record.exc_info)
            return self._fitting(fields)
        except Exception:  # a value that has no text, a format that does not match: the rest must still be told
            return self._fitting({key: _told(value) for key, value in fields.items()})

    def _fitting(self, fields: Mapping[str, Any]) -> Line:
        line = self._rendered(fields)
        for limit in (1000, 300, 50):
            if line.fits:
                return line
            line = self._rendered(_shortened(fields, limit))
        return line if line.fits else self._rendered(_shortened(dict(list(fields.items())[:6]), 50))

    def _rendered(self, fields: Mapping[str, Any]) -> Line:
        return Line(self._render(fields), fields)

    def _time(self, created: float) -> str:
        second = int(created)
        if second != self._second:
            self._second, self._date = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._date}.{int((created - second) * 1000):03d}Z"


# ---- writing -------------------------------------------------------------------------------------------------------
class Output:
    """A descriptor, standard error, as a place to put whole lines without ever waiting.

    Its own O_NONBLOCK stays as it is: that flag is shared with the shell and every other process that has the same
    terminal or pipe. A pipe or terminal is opened anew instead, and a socket is told with each send. What cannot be
    opened is asked first whether there is room. A pipe says so if it has a whole page, and its write could only wait if
    other processes filled that page in between; a stopped terminal's can.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._own: io.FileIO | socket.socket | None = None
        self._torn = False  # the last write left part of a line
        self._send = self._way(fd)

    def _way(self, fd: int) -> Callable[[bytes], int | None]:
        try:
            mode = os.fstat(fd).st_mode
        except OSError:  # closed: whatever gets its number later is not for our lines
            return _nowhere
        if stat.S_ISREG(mode):
            return functools.partial(os.write, fd)
        try:
            if stat.S_ISSOCK(mode):
                self._own = socket.fromfd(fd, socket.AF_UNIX, socket.SOCK_STREAM)
                return functools.partial(_send, self._own)
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            self._own = io.FileIO(os.open(f"/proc/self/fd/{fd}", flags), "w")
            return self._own.write
        except OSError:  # another user's, or no /proc
            return functools.partial(_ask_and_write, fd)

    def write(self, line: bytes) -> bool:
        """False if the line was not taken whole."""
        if self._torn:
            line = b"\n" + line
        try:
            written = self._send(line) or 0
        except (OSError, ValueError):  # ValueError: closed
            written = 0
        self._torn = 0 < written < len(line) or self._torn and written == 0
        return written == len(line)

    def close(self) -> None:
        if self._own is not None:
            self._own.close()
            self._own = None

    def after_fork(self) -> None:
        """In a child, which may close all descriptors: from now on only the one that was given."""
        if self._own is not None:
            self.close()
            self._send = functools.partial(_ask_and_write, self._fd)


def _nowhere(line: bytes) -> int:
    return 0


def _send(sock: socket.socket, line: bytes) -> int:
    return sock.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def _ask_and_write(fd: int, line: bytes) -> int:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return os.write(fd, line) if poll.poll(0) else 0


_handler: Handler | None = None


def _after_fork() -> None:
    if _handler is not None:
        _handler.after_fork()


os.register_at_fork(after_in_child=_after_fork)
