"""colibri-client as a process of its own against the real daemon, on pipes and on a terminal."""

from __future__ import annotations

import codecs
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from colibri_client import Client
from colibri_client.text import Tokenizer
from colibri_engine import Engine
from fixtures.daemon import PATIENCE, Daemon
from fixtures.models import TINY, Models
from fixtures.smol import Smol
from fixtures.tokenizers_made import CONFIG

PROGRAM = Path(sys.executable).with_name("colibri-client")
TEXT = "In the beginning God created the heaven and the "
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}answer:"


@pytest.fixture(scope="module")
def daemon(models: Models) -> Iterator[Daemon]:
    with Daemon(models.tiny("q4"), workers=1, threads=1) as it:
        yield it


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's tokenizer with a chat template, which it does not have by itself."""
    folder = tmp_path_factory.mktemp("chat")
    shutil.copy(TINY / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, "chat_template": CHAT_TEMPLATE}))
    return folder


def command(daemon: Daemon, *arguments: object) -> list[str]:
    return [str(PROGRAM), "--socket", str(daemon.socket), *map(str, arguments)]


def run(daemon: Daemon, *arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(daemon, *arguments), input=stdin, capture_output=True, text=True, timeout=PATIENCE,
                          check=False)


def running(daemon: Daemon) -> int:
    with Client(daemon.socket) as client:
        return client.stats().running


# ---- outputs -------------------------------------------------------------------------------------------------------


def test_text_tokens_and_json_agree_with_the_engine(daemon: Daemon, models: Models) -> None:
    tokenizer = Tokenizer(models.tiny("q4"))
    prompt = tokenizer.encode(TEXT)
    with Engine.open(models.tiny("q4")) as engine:
        ids = [int(id) for id in engine.generate(prompt, 40)]
    assert run(daemon, "generate", TEXT, "--max-tokens", 40).stdout == tokenizer.decode(ids) + "\n"
    listed = ",".join(map(str, prompt))
    printed = run(daemon, "generate", "--tokens", listed, "--max-tokens", 40, "--ids").stdout
    assert printed == " ".join(map(str, ids)) + "\n"
    body = json.loads(run(daemon, "generate", "-", "--max-tokens", 40, "--json", stdin=TEXT).stdout)
    assert body["tokens"] == ids
    assert (body["finish_reason"], body["usage"]["prompt"], body["worker"]) == ("length", len(prompt), 0)


def test_log_probabilities_of_generate_and_score_are_the_same(daemon: Daemon, models: Models) -> None:
    prompt = Tokenizer(models.tiny("q4")).encode(TEXT)
    made = json.loads(run(daemon, "generate", TEXT, "--max-tokens", 5, "--json", "--logprobs", 2,
                          "--prompt-logprobs", 0).stdout)
    whole = ",".join(map(str, prompt + made["tokens"]))
    scored = json.loads(run(daemon, "score", "--tokens", whole, "--top", 2, "--json").stdout)
    assert scored["logprobs"] == made["prompt_scores"]["logprobs"] + made["logprobs"]
    assert scored["top"][len(prompt) - 1 :] == made["top"]


def test_a_stop_string_ends_the_request_at_the_daemon(daemon: Daemon) -> None:
    whole = run(daemon, "generate", TEXT, "--max-tokens", 60).stdout
    stop = whole[20:24]
    result = run(daemon, "generate", TEXT, "--max-tokens", 100_000, "--stop", stop)
    assert (result.returncode, result.stdout) == (0, whole[: whole.index(stop)] + "\n")
    daemon.until(lambda: running(daemon) == 0)


def test_one_chat_turn(daemon: Daemon, chat_folder: Path) -> None:
    rendered = "user: Who art thou? </s>\nanswer:"
    one = run(daemon, "generate", "--chat", "Who art thou? </s>", "--model", chat_folder, "--max-tokens", 20)
    other = run(daemon, "generate", "--text", rendered, "--max-tokens", 20)
    assert one.stdout == other.stdout != "\n"


@pytest.mark.full
def test_the_demo_model_answers(tmp_path: Path) -> None:
    with Daemon(Smol(tmp_path).model("q4")) as daemon:
        result = run(daemon, "generate", "--chat", "What is the capital of France?", "--max-tokens", 40)
        assert (result.returncode, "Paris" in result.stdout) == (0, True)
        assert "stop (eos " in result.stderr
        result = run(daemon, "chat", stdin="What is the capital of France?\nAnd of Italy?\n")
        assert (result.returncode, "Paris" in result.stdout, "Rome" in result.stdout) == (0, True, True)


def test_replay(daemon: Daemon, models: Models, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    sampling = ("--temperature", 1, "--top-k", 50)
    file.write_text(run(daemon, "generate", TEXT, "--max-tokens", 30, *sampling, "--json").stdout)
    assert run(daemon, "replay", file).returncode == 0
    with Daemon(models.tiny("q4"), workers=2, threads=2) as twin:
        assert run(twin, "replay", file).stdout == "same: 30 tokens\n"
    with Daemon(models.tiny("q8"), workers=1, threads=1) as foreign:
        result = run(foreign, "replay", file)
    assert (result.returncode, "model_id: recorded" in result.stdout) == (2, True)
    body = json.loads(file.read_text())
    body["tokens"][7] += 1
    file.write_text(json.dumps(body))
    result = run(daemon, "replay", file)
    assert (result.returncode, result.stdout.startswith("different: token 7 was ")) == (1, True)


def test_a_request_that_the_daemon_refuses(daemon: Daemon) -> None:
    result = run(daemon, "generate", "--tokens", "1,2048")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: TOKEN_OUT_OF_RANGE (203): ")


# ---- Ctrl-C and ends -----------------------------------------------------------------------------------------------


def test_ctrl_c_cancels_at_the_daemon(daemon: Daemon) -> None:
    asked = command(daemon, "generate", TEXT, "--max-tokens", 100_000, "--ignore-eos")
    with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.read(10)
        assert running(daemon) == 1
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert err.endswith("cancelled by Ctrl-C\n")
    assert int(err.split()[0]) > 2
    assert (first + out).endswith("\n")
    daemon.until(lambda: running(daemon) == 0)
    assert daemon.until(lambda: daemon.log(msg="request ended", finish="abort"))


def test_a_reader_that_goes_away_cancels_too(daemon: Daemon) -> None:
    asked = command(daemon, "generate", TEXT, "--max-tokens", 100_000, "--ignore-eos")
    with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.wait(PATIENCE) == 141
        assert process.stderr is not None
        assert process.stderr.read() == ""
    daemon.until(lambda: running(daemon) == 0)


# ---- state ---------------------------------------------------------------------------------------------------------


def test_health_from_before_the_start_to_after_the_stop(models: Models) -> None:
    with Daemon(models.tiny("q4"), wait=False, workers=1, threads=1) as daemon:
        waited = run(daemon, "health", "--wait", PATIENCE / 2)
        assert (waited.returncode, waited.stdout.splitlines()[0]) == (0, "ready")
        assert "worker 0: idle, pid " in waited.stdout
        assert daemon.stop() == 0
        assert run(daemon, "health").returncode == 3


def test_stats_and_top_see_a_running_request(daemon: Daemon) -> None:
    asked = command(daemon, "generate", TEXT, "--max-tokens", 100_000, "--ignore-eos", "--quiet")
    with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        picture = run(daemon, "top", "--once", "--interval", 0.2).stdout
        stats = json.loads(run(daemon, "stats", "--json").stdout)
        process.kill()
    assert picture.startswith("colibri tiny  ready  up ")
    assert "running 1 " in picture
    assert "busy" in picture
    assert float(picture.partition("tokens out ")[2].partition("/s")[0]) > 0
    assert stats["running"] == 1
    daemon.until(lambda: running(daemon) == 0)


# ---- on a terminal -------------------------------------------------------------------------------------------------


# A process of its own makes the terminal: forking is not for a test runner that has threads.
ON_A_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


class Terminal:
    """A command on a pseudo-terminal. seen: all that it has printed."""

    def __init__(self, arguments: list[str]) -> None:
        self.seen, self._from = "", 0
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._process = subprocess.Popen([sys.executable, "-c", ON_A_TERMINAL, *arguments], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, bufsize=0,
                                         env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"})

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        with self._process:  # closes the pipes
            self._process.kill()

    def type(self, keys: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(keys.encode())

    def wait_for(self, text: str) -> None:
        """Until text is printed after what was waited for before."""
        deadline = time.monotonic() + PATIENCE
        while (at := self.seen.find(text, self._from)) < 0:
            assert self._read(deadline), f"no {text!r} in {self.seen[self._from :]!r}"
        self._from = at + len(text)

    def ended(self) -> int:
        """Waits until it ends; the exit code."""
        deadline = time.monotonic() + PATIENCE
        while self._read(deadline):
            pass
        return self._process.wait(PATIENCE)

    def _read(self, deadline: float) -> bool:
        """Whether there was more, before the deadline."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return False
        data = self._process.stdout.read(1 << 16)
        self.seen += self._decode(data)
        return bool(data)


def test_a_conversation_at_a_terminal(daemon: Daemon, chat_folder: Path) -> None:
    with Terminal(command(daemon, "chat", "--model", chat_folder, "--set", "max_tokens=50000")) as terminal:
        terminal.wait_for("Ctrl-D to end")
        terminal.wait_for("> ")
        terminal.type("Speak of the king\n")
        daemon.until(lambda: running(daemon) == 1)
        terminal.type("\x03")
        terminal.wait_for("cancelled; what came so far stays")
        terminal.wait_for("cancelled by Ctrl-C")
        terminal.wait_for("> ")
        daemon.until(lambda: running(daemon) == 0)
        terminal.type("half a line")
        terminal.wait_for("half a line")  # echoed: the line is being edited, a signal before that is not seen
        terminal.type("\x03")
        terminal.wait_for("> ")
        terminal.type("/set max_tokens 5\n")
        terminal.wait_for("> ")
        terminal.type("And of the queen\n")
        terminal.wait_for("5 tokens · first after")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.ended() == 0


@pytest.mark.parametrize("key", ["q", "\x03"])
def test_top_at_a_terminal_ends_with_q_and_with_ctrl_c(daemon: Daemon, key: str) -> None:
    with Terminal(command(daemon, "top", "--interval", "0.2")) as terminal:
        terminal.wait_for("tokens out")
        terminal.wait_for("tokens out")  # drawn again
        terminal.type("x")
        terminal.type(key)
        assert terminal.ended() == 0


def test_output_on_a_terminal_has_no_control_characters(daemon: Daemon, models: Models) -> None:
    """A model that prints an escape sequence cannot change the terminal."""
    escape = Tokenizer(models.tiny("q4")).encode("\x1b")
    assert len(escape) == 1
    asked = ["generate", TEXT, "--max-tokens", "3", "--logit-bias", f"{escape[0]}=1000", "--quiet"]
    assert run(daemon, *asked).stdout == "\x1b\x1b\x1b\n"
    with Terminal(command(daemon, *asked)) as terminal:
        terminal.wait_for("\ufffd\ufffd\ufffd")
        assert terminal.ended() == 0
        assert "\x1b" not in terminal.seen
