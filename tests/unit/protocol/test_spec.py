"""The generated documents and code are those of the declarations, and their examples work."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from colibri_protocol import limits
from colibri_protocol.codec import encode, tokens_frame
from colibri_protocol.connection import Connection, Role, negotiate
from colibri_protocol.messages import Bye, Done, Generate, Hello, LimitInfo, ModelInfo, Ping, Pong, Welcome
from colibri_protocol.spec import ROOT, TARGETS
from colibri_protocol.spec.__main__ import main
from colibri_protocol.spec.markdown import LIMITS

SPEC = ROOT / "daemon" / "colibri_protocol" / "SPEC.md"


@pytest.mark.parametrize("path", TARGETS, ids=lambda path: path.name)
def test_generated_files_are_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == TARGETS[path](), "run: python -m colibri_protocol.spec"


def test_check_says_what_is_out_of_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("colibri_protocol.spec.__main__.ROOT", tmp_path)
    monkeypatch.setattr("colibri_protocol.spec.__main__.TARGETS", {tmp_path / "a.md": lambda: "new\n"})
    assert main(["--check"]) == 1
    assert "a.md: out of date; run: python -m colibri_protocol.spec" in capsys.readouterr().out
    assert main([]) == 0
    assert (tmp_path / "a.md").read_text(encoding="utf-8") == "new\n"
    assert main(["--check"]) == 0


def test_go_source_is_formatted() -> None:
    gofmt = shutil.which("gofmt")
    if gofmt is None:
        pytest.skip("no Go here")
    folder = ROOT / "client" / "go"
    assert subprocess.run([gofmt, "-l", str(folder)], capture_output=True, text=True, check=True).stdout == ""


def test_every_limit_is_in_the_table() -> None:
    constants = {name for name, value in vars(limits).items() if name.isupper() and isinstance(value, int | float)}
    described = {name for name in LIMITS if name.isupper()}
    assert constants - described == {"PROTOCOL_VERSION", "HEADER_BYTES"}
    assert set(LIMITS) - described == set(limits.ServerLimits.__dataclass_fields__) - {"frame"}


# ---- the examples --------------------------------------------------------------------------------------------------

MODEL = ModelInfo(name="m", id="0", fingerprint="0", vocab_size=100, max_len=100)
DONE = Done(finish_reason="length")


def serve_one(listener: socket.socket) -> None:
    """A server in miniature: PING, and two tokens to every GENERATE; it closes when it may."""
    conn, (sock, _) = Connection(Role.SERVER), listener.accept()
    with sock:
        while not conn.finished:
            data = sock.recv(1000)
            if not data:
                conn.receive_eof()
            for message, request in conn.receive(data):
                if isinstance(message, Hello):
                    proto, features = negotiate(message)
                    sock.sendall(conn.send(Welcome(proto=proto, features=features, server="test", generation=1,
                                                   model=MODEL, limits=LimitInfo(frame=1000, requests=1))))
                    sock.sendall(conn.send(Ping(data=b"?")))
                elif isinstance(message, Generate):
                    sock.sendall(tokens_frame(request, message.tokens[-4:], 0, 1))
                    sock.sendall(tokens_frame(request, b"\x2a\0\0\0", 1, 2))
                    sock.sendall(conn.send(DONE, request))
                else:
                    assert isinstance(message, Pong | Bye)


@contextmanager
def server(path: Path) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve_one, args=(listener,))
        thread.start()
        yield
        thread.join()


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", SPEC.read_text(encoding="utf-8"), flags=re.DOTALL)
    return found


def test_the_minimal_client_of_the_spec_works(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with server(path):
        ran = subprocess.run([sys.executable, "-c", block("python"), str(path), "1", "5"], capture_output=True,
                             text=True, check=True)
    assert ran.stdout == "5\n42\n"


def test_the_shell_example_of_the_spec_works(tmp_path: Path) -> None:
    """Its bytes, written by a shell; nc's part is played by a socket."""
    script, path = block("sh").split("} |")[0] + "}", tmp_path / "s"
    data = subprocess.run(["sh", "-c", script], capture_output=True, check=True).stdout
    with server(path), socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: sock.recv(1000), b""))
    assert answer.endswith(tokens_frame(1, b"\x2a\0\0\0", 1, 2) + encode(DONE, 1))
