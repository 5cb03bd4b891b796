"""Where log lines go, what that survives, and that logging never waits: real processes, real pipes as stderr."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

SECONDS = 30  # a child that takes longer hangs


def child(code: str, **options: Any) -> subprocess.Popen[bytes]:
    """A Python process that has ``logger`` and ``setup``."""
    start = """
        import os, sys, time
        from colibri_daemon.common import log
        from colibri_daemon.common.declaration import Settings
        def setup(role="test", **chosen):
            log.setup(role, Settings(**chosen))
        logger = log.get("x")
    """
    program = textwrap.dedent(start) + textwrap.dedent(code)
    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)


def finish(process: subprocess.Popen[bytes], stdin: bytes = b"") -> tuple[bytes, bytes]:
    try:
        return process.communicate(stdin, timeout=SECONDS)
    finally:
        process.kill()
        process.wait()


# ---- where lines go ------------------------------------------------------------------------------------------------
def test_a_process_logs_to_stderr() -> None:
    _, err = finish(child("""
        setup("dispatcher", log_level="warning")
        logger.info("not this")
        logger.warning("this", id=1)
        try: 1 / 0
        except ZeroDivisionError: logger.exception("that", id=2)
        import logging, warnings
        logging.getLogger("asyncio").error("from %s", "asyncio")
        warnings.warn("old")
        raise KeyError("x")
    """, stderr=subprocess.PIPE))  # fmt: skip
    this, that, other, warned, uncaught = map(json.loads, err.splitlines())
    assert (this["msg"], this["level"], this["role"], this["name"], this["id"]) == (
        "this", "warning", "dispatcher", "x", 1)  # fmt: skip
    assert (that["level"], that["id"]) == ("error", 2)
    assert that["exc"].endswith("ZeroDivisionError: division by zero")
    assert (other["name"], other["msg"]) == ("asyncio", "from asyncio")
    assert "old" in warned["msg"]
    assert uncaught["exc"].endswith("KeyError: 'x'")


def test_text_on_a_terminal_and_its_flags_are_left_alone() -> None:
    ours, theirs = pty.openpty()
    try:
        process = child("""
            import fcntl
            setup()
            logger.info("hello", id=1)
            print(fcntl.fcntl(2, fcntl.F_GETFL) & os.O_NONBLOCK)
        """, stderr=theirs)  # fmt: skip
        out, _ = finish(process)
        assert out == b"0\n"
        assert os.read(ours, 4096).endswith(b" x: hello id=1\r\n")
    finally:
        os.close(ours)
        os.close(theirs)


def test_setup_again_replaces() -> None:
    _, err = finish(child("""
        setup("one")
        setup("two", log_format="text")
        logger.info("once")
    """, stderr=subprocess.PIPE))  # fmt: skip
    assert err.count(b"\n") == 1
    assert b" two[" in err


@pytest.mark.parametrize("is_journal", [True, False])
def test_priority_only_for_the_journals_own_stream(is_journal: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        status = os.fstat(theirs.fileno())
        stream = f"{status.st_dev}:{status.st_ino if is_journal else 1}"
        # Where there is no journal to take fields, lines are what it gets.
        code = "from colibri_daemon.common import journal; journal.SOCKET = '/no/such'; setup(); logger.error('e')"
        finish(child(code, stderr=theirs, env=os.environ | {"JOURNAL_STREAM": stream}))
        line = ours.recv(8192)
    assert line.startswith(b'<3>{"ts"' if is_journal else b'{"ts"')


def fields_of(datagram: bytes) -> dict[str, str]:
    """As the journal reads it: NAME=value lines, or NAME, a 64-bit length and the value."""
    found, rest = {}, datagram
    while rest:
        head, _, rest = rest.partition(b"\n")
        name, equals, value = head.partition(b"=")
        if not equals:
            size = int.from_bytes(rest[:8], "little")
            value, rest = rest[8 : 8 + size], rest[9 + size :]
        found[name.decode()] = value.decode()
    return found


def test_the_journal_gets_fields_and_stderr_what_it_does_not_take(tmp_path: Path) -> None:
    """A socket that implements the native protocol's receiving side stands in the journal's place."""
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as taking:
        taking.bind(str(tmp_path / "j"))
        status = os.fstat(theirs.fileno())
        code = f"""
            from colibri_daemon.common import journal
            journal.SOCKET = {str(tmp_path / "j")!r}
            setup("worker 0")
            logger.warning("request failed", request_id="r.1", **{{"odd-name": 2, "none": None}})
            logger.error("two\\nlines", text="a\\nb")
            if os.fork() == 0:
                logger.error("of a child that has not set its own log up")
                os._exit(0)
            os.wait()
            setup("worker 0")
            os.unlink(journal.SOCKET)
            logger.error("no journal")
        """
        finish(child(code, stderr=theirs, env=os.environ | {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}))
        taking.setblocking(False)
        first, second = (fields_of(taking.recv(65536)) for _ in range(2))
        with pytest.raises(BlockingIOError):
            taking.recv(1)
        on_stderr = ours.recv(8192).splitlines()
    line = json.loads(first.pop("MESSAGE"))
    assert (line["msg"], line["request_id"]) == ("request failed", "r.1")
    assert first == {"PRIORITY": "4", "SYSLOG_IDENTIFIER": "colibrid", "COLIBRI_ROLE": "worker 0", "COLIBRI_NAME": "x",
                     "COLIBRI_REQUEST_ID": "r.1", "COLIBRI_ODD_NAME": "2"}  # fmt: skip
    assert (second["PRIORITY"], second["COLIBRI_TEXT"]) == ("3", "a\nb")
    assert "\n" not in second["MESSAGE"]
    assert [json.loads(text.removeprefix(b"<3>"))["msg"] for text in on_stderr] == [
        "of a child that has not set its own log up", "no journal"]  # fmt: skip


# ---- a stderr that takes nothing -----------------------------------------------------------------------------------
def test_closed_stderr_is_survived() -> None:
    out, _ = finish(child("""
        os.close(2)
        setup()
        for i in range(3): logger.error("x")
        print("alive")
    """))  # fmt: skip
    assert out == b"alive\n"


def test_a_later_descriptor_2_gets_no_lines() -> None:
    """Not what was opened after a closed stderr gave its number away."""
    out, _ = finish(child("""
        os.close(2)
        setup()
        r, w = map(os.dup, os.pipe())
        os.dup2(w, 2)
        logger.error("x")
        os.set_blocking(r, False)
        try: print(os.read(r, 10))
        except BlockingIOError: print("nothing")
    """))  # fmt: skip
    assert out == b"nothing\n"


def test_a_reader_that_is_gone_is_survived() -> None:
    process = child("setup(); sys.stdin.read(); logger.error('x'); logger.error('y'); print('alive')",
                    stderr=subprocess.PIPE)  # fmt: skip
    assert process.stderr is not None
    process.stderr.close()
    process.stderr = None
    assert finish(process)[0] == b"alive\n"
    assert process.returncode == 0


def test_a_full_disk_is_survived() -> None:
    with open("/dev/full", "wb") as full:
        out, _ = finish(child("setup(); [logger.error('x') for i in range(3)]; print('alive')", stderr=full))
    assert out == b"alive\n"


def test_a_torn_line_ends_before_the_next(tmp_path: Path) -> None:
    """A file-size limit cuts a write short as a full disk does."""
    path = tmp_path / "log"
    with open(path, "wb") as file:
        finish(child("""
            import resource, signal
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            setup()
            logger.info("first")
            size = os.fstat(2).st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
            logger.info("torn")
            logger.info("lost")
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            logger.info("last")
        """, stderr=file))  # fmt: skip
    first, torn, notice, last = path.read_bytes().splitlines()
    assert len(torn) == 10
    assert json.loads(first)["msg"] == "first"
    assert (json.loads(notice)["level"], json.loads(notice)["dropped"]) == ("warning", 2)
    assert json.loads(last)["msg"] == "last"


def stderr_pair(kind: str) -> tuple[int, int]:
    """(what the test reads, a child's stderr)."""
    if kind == "pipe":
        return os.pipe()
    if kind == "terminal":
        return pty.openpty()
    ours, theirs = socket.socketpair()
    return ours.detach(), theirs.detach()


@pytest.mark.parametrize(("kind", "reopened"), [
    ("pipe", True), ("socket", True), ("terminal", True), ("pipe", False), ("socket", False),
])  # fmt: skip
def test_a_stderr_that_nobody_reads_never_blocks(kind: str, reopened: bool) -> None:
    """The child goes on, and what was lost is told as soon as there is room again."""
    ours, theirs = stderr_pair(kind)
    try:
        process = child(f"""
            setup(log_format="json")
            if not {reopened}: log._handler.output.after_fork()
            for i in range(5000): logger.info("x", i=i, fill="." * 400)
            print("alive", flush=True)
            while True: logger.info("later"); time.sleep(0.001)
        """, stderr=theirs)  # fmt: skip
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], SECONDS)[0], "it hangs"
        assert process.stdout.readline() == b"alive\n"
        content = b""
        while b'"later"' not in content and select.select([ours], [], [], SECONDS)[0]:
            content += os.read(ours, 1 << 16)
        process.kill()
        process.communicate()
    finally:
        os.close(ours)
        os.close(theirs)
    lines = list(map(parsed, content.splitlines()))
    at = [line.get("msg") for line in lines].index("later")
    numbers = [line["i"] for line in lines if "i" in line]
    assert numbers == sorted(set(numbers))
    assert lines[at - 1]["dropped"]
    assert sum(line.get("dropped", 0) for line in lines[:at]) >= 5000 - len(numbers) > 0


def parsed(line: bytes) -> dict[str, Any]:
    """A terminal may have taken part of a line."""
    return json.loads(line) if line.endswith(b"}") else {}


def test_a_forked_child_writes_to_stderr_until_its_own_setup() -> None:
    """The descriptor opened for logging is closed in it, so that its number may become anything."""
    _, err = finish(child("""
        setup("parent")
        before = set(os.listdir("/proc/self/fd"))
        if pid := os.fork():
            os.waitpid(pid, 0)
            logger.info("parent again")
        else:
            assert len(os.listdir("/proc/self/fd")) == len(before) - 1
            logger.info("not set up")
            setup("child")
            logger.info("set up")
            os._exit(0)
    """, stderr=subprocess.PIPE))  # fmt: skip
    lines = [json.loads(line) for line in err.splitlines()]
    assert [(line["role"], line["msg"]) for line in lines] == [
        ("parent", "not set up"), ("child", "set up"), ("parent", "parent again")]  # fmt: skip
    assert lines[0]["pid"] == lines[1]["pid"] != lines[2]["pid"]


@pytest.mark.parametrize("kind", ["pipe", "socket", "file"])
def test_lines_of_several_processes_do_not_mix(tmp_path: Path, kind: str) -> None:
    ours, theirs = stderr_pair(kind) if kind != "file" else (-1, os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT))
    collected: list[bytes] = []

    def read() -> None:
        while data := os.read(ours, 1 << 16):
            collected.append(data)

    reader = threading.Thread(target=read) if kind != "file" else None
    process = child("""
        def work(role):
            setup(role)
            for i in range(300):
                logger.info("x", i=i, fill=role * (i * 12))
                time.sleep(0)
        pids = []
        for role in "abcd":
            if not (pid := os.fork()):
                work(role)
                os._exit(0)
            pids.append(pid)
        for pid in pids: os.waitpid(pid, 0)
    """, stderr=theirs)  # fmt: skip
    os.close(theirs)
    if reader:
        reader.start()
    finish(process)
    if reader:
        reader.join()
        os.close(ours)
    content = b"".join(collected) if reader else (tmp_path / "log").read_bytes()
    lines = [json.loads(line) for line in content.splitlines()]
    for role in "abcd":
        mine = [line for line in lines if line["role"] == role]
        told = sum(line.get("dropped", 0) for line in mine)
        assert len([line for line in mine if "i" in line]) + told <= 300
        assert all(set(line.get("fill", "")) <= {role} for line in mine)
    assert len(lines) > 300


def test_signal_handlers_may_log() -> None:
    process = child("""
        import signal
        setup()
        signal.signal(signal.SIGUSR1, lambda *_: logger.info("signal"))
        print("ready", flush=True)
        while True: logger.info("loop")
    """, stderr=subprocess.PIPE)  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == b"ready\n"
    seen, deadline = 0, time.monotonic() + SECONDS
    while seen < 20 and time.monotonic() < deadline:
        process.send_signal(signal.SIGUSR1)
        seen += os.read(process.stderr.fileno(), 1 << 16).count(b'"signal"')
    process.kill()
    process.communicate()
    assert seen >= 20
