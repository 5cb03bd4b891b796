"""What a forked child is and is not, seen from inside; see spawned.py for the program that forks."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from colibri_daemon.common.exit_codes import Exit
from colibri_daemon.supervisor.spawn import Death

PROGRAM = Path(__file__).with_name("spawned.py")


ENVIRON = os.environ | {"PYTHONPATH": str(PROGRAM.parent)}  # a fresh interpreter finds the roles there


def run(scenario: str) -> tuple[dict, str, str]:
    """(its answer, the rest of its stdout, its stderr)."""
    done = subprocess.run([sys.executable, str(PROGRAM), scenario], capture_output=True, text=True, check=True,
                          timeout=60, start_new_session=True, env=ENVIRON)  # fmt: skip
    *rest, answer = done.stdout.splitlines()
    return json.loads(answer), "\n".join(rest), done.stderr


@pytest.fixture(scope="module")
def child() -> dict:
    answer, rest, _ = run("describe")
    return answer | {"stdout": rest}


def test_only_the_listed_descriptors_are_open(child):
    assert child["noise"] == 3
    expected = {"0", "1", "2", str(child["answer"])}
    assert expected <= set(child["fds"])
    others = [what for fd, what in child["fds"].items() if fd not in expected]
    assert [what.partition(":")[0] for what in others] == ["pipe"]  # for the trace of a fatal signal


def test_signals_are_as_new(child):
    assert child["signals"] == {
        "SIGTERM": str(signal.SIG_DFL),
        "SIGUSR1": str(signal.SIG_DFL),
        "SIGINT": str(signal.SIG_IGN),
        "SIGHUP": str(signal.SIG_IGN),
    }
    assert child["blocked"] == []
    assert child["wakeup"] == -1
    assert child["parent_blocked"] == [signal.SIGUSR2]


def test_a_child_of_the_group_with_its_own_title(child):
    assert child["title"] == "colibrid: test describe"
    assert child["group"] == child["parent_group"]
    assert child["oom"] == min(1000, child["parent_oom"] + 123)
    assert child["nice"] == min(19, child["parent_nice"] + 4)


def test_streams(child):
    assert child["stdin"] == ""
    assert child["stdout"] == "printed by the child"
    assert child["code"] == 7


def test_exit_codes_and_the_last_line():
    codes, _, stderr = run("codes")
    trace = codes.pop("trace")
    assert codes == {"fail": Exit.INTERNAL, "crash": -signal.SIGSEGV, "leave": Exit.INTERNAL}
    assert trace.startswith("Fatal Python error: Segmentation fault")
    assert " in crash" in trace
    assert "scenario" not in trace  # the supervisor's frames, below the fork
    lines = [json.loads(line) for line in stderr.splitlines() if line.startswith("{")]
    assert [(line["level"], line["role"], line["exit"]) for line in lines] == [
        ("error", "test fail", Exit.INTERNAL),
        ("error", "test leave", Exit.INTERNAL),
    ]
    assert "KeyError: 'a fault of ours'" in lines[0]["exc"]


def test_the_terminal_does_not_end_children():
    answer, _, _ = run("terminal")
    assert answer == {"alive": True, "code": -signal.SIGTERM}


def test_no_fork_beside_another_thread():
    assert run("threads")[0] == {"refused": True}


def test_a_fresh_interpreter_gets_the_same(child):
    body, _, _ = run("fresh")
    assert body["argv"][1:4] == ["-P", "-m", "colibri_daemon.supervisor.born"]
    assert (body["steps"], body["sent"], body["code"]) == ([0, 42], "!", 7)
    assert (body["log_level"], body["socket"], body["number"]) == ("debug", "/x y", 5)
    assert body["same"]
    assert body["names"] == {"x": body["extra"]}
    assert body["arena"] == 3 * 4096
    assert body["blocking"] is False
    assert body["inheritable"] == []
    assert body["death"] == signal.SIGKILL
    forked, own = child, body["child"]
    for name in ("signals", "blocked", "stdin", "oom", "nice", "wakeup"):
        assert own[name] == forked[name]
    assert own["title"] == "colibrid: test tell_all"
    names = sorted(what.partition(":")[0] for fd, what in own["fds"].items() if int(fd) > 2)
    assert names == ["/memfd", "/memfd", "/memfd", "pipe", "pipe", "socket"]  # pages, arena, extra; answer, trace


def test_a_fresh_interpreter_that_crashes():
    body, _, _ = run("fresh_crash")
    assert body["code"] == -signal.SIGSEGV
    assert " in crash" in body["trace"]
    assert " in live" not in body["trace"]
    assert body["foreign"] == Exit.USAGE  # of another version's form


@pytest.mark.parametrize("scenario", ["orphan", "fresh_orphan"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_dies_with_its_parent(scenario, number):
    with subprocess.Popen([sys.executable, str(PROGRAM), scenario], stdout=subprocess.PIPE, text=True,
                          env=ENVIRON) as parent:
        assert parent.stdout is not None
        pidfd = os.pidfd_open(json.loads(parent.stdout.readline())["pid"])
        try:
            parent.send_signal(number)
            parent.wait(10)
            assert select.select([pidfd], [], [], 10)[0], "the child outlived its parent"
        finally:
            os.close(pidfd)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0 (STOPPED)"),
        (4, "exit code 4 (CANNOT_LOAD)"),
        (9, "exit code 9"),
        (-9, "by SIGKILL"),
        (-50, "by signal 50"),
    ],
)
def test_exit_codes_in_words(code, words):
    assert str(Death(code)) == words
