"""A page's LIFE: told by the kernel when the main thread of the page's process ends, and by nothing else."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from colibri_daemon.common import life, process
from colibri_daemon.common.pages import Field, Page, make_pages

SECONDS = 20.0  # for what must happen
MOMENT = 0.3  # for what must not


@pytest.fixture
def page() -> Page:
    return make_pages(1)[0]


@contextlib.contextmanager
def child(page: Page, then: Callable[[], None], arms: bool = True, size: int = 0) -> Iterator[int]:
    """Its pid; reaped at the end. size: bytes that it has more."""
    ready, write = os.pipe()
    if not (pid := os.fork()):
        kept = bytearray(b"x") * size  # noqa: F841
        if arms:
            life.arm(page)
        os.write(write, b"!")
        then()
        os._exit(0)
    os.close(write)
    try:
        assert os.read(ready, 1) == b"!"
        yield pid
    finally:
        os.close(ready)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class Waiting(threading.Thread):
    """found: what wait() has returned; nothing while it sleeps."""

    def __init__(self, page: Page, pid: int) -> None:
        super().__init__(daemon=True)
        self._page, self._pid = page, pid
        self.found: list[bool] = []
        self.start()

    def run(self) -> None:
        self.found.append(life.wait(self._page, self._pid))

    def told(self) -> bool:
        self.join(SECONDS)
        return self.found == [True]


def sleep() -> None:
    time.sleep(600)


def test_a_kill_is_told_and_how_it_was(page: Page) -> None:
    with child(page, sleep) as pid:
        waiting = [Waiting(page, pid) for _ in range(3)]
        assert not life.has_ended(page)
        assert process.exit_status(pid) == 0
        os.kill(pid, signal.SIGKILL)
        assert all(w.told() for w in waiting)
        assert life.has_ended(page)
        assert process.exit_status(pid) == -signal.SIGKILL
    assert process.exit_status(pid) is None


def test_it_is_told_before_the_process_is_taken_apart(page: Page) -> None:
    """At least once: on a busy machine it may be over when we come to look."""

    def early() -> bool:
        page.clear()
        with child(page, sleep, size=64 << 20) as pid:
            pidfd = os.pidfd_open(pid)
            waiting = Waiting(page, pid)
            os.kill(pid, signal.SIGKILL)
            assert waiting.told()
            lives = not select.select([pidfd], [], [], 0)[0]
            assert process.exit_status(pid) == -signal.SIGKILL
            os.close(pidfd)
        return lives

    assert any(early() for _ in range(50))


ENDS: dict[int, Callable[[], None]] = {
    0: lambda: None,
    3: lambda: os._exit(3),
    -signal.SIGTERM: lambda: os.kill(os.getpid(), signal.SIGTERM),
}


@pytest.mark.parametrize("status", ENDS)
def test_another_end_is_told_too_and_which_it_was(page: Page, status: int) -> None:
    with child(page, ENDS[status]) as pid:
        assert Waiting(page, pid).told()
        assert process.exit_status(pid) == status


def test_a_process_that_is_stopped_is_alive(page: Page) -> None:
    with child(page, sleep) as pid:
        waiting = Waiting(page, pid)
        os.kill(pid, signal.SIGSTOP)
        assert os.waitpid(pid, os.WUNTRACED)[0] == pid
        waiting.join(MOMENT)
        assert (waiting.found, life.has_ended(page)) == ([], False)
        os.kill(pid, signal.SIGKILL)
        assert waiting.told()


def test_other_threads_may_come_and_go(page: Page) -> None:
    def then() -> None:
        for _ in range(20):
            thread = threading.Thread(target=lambda: None)
            thread.start()
            thread.join()
        sleep()

    with child(page, then) as pid:
        waiting = Waiting(page, pid)
        waiting.join(MOMENT)
        assert waiting.found == []


def test_of_an_unarmed_process_or_another_nothing_is_told(page: Page) -> None:
    with child(page, sleep, arms=False) as pid:
        assert not life.wait(page, pid)
    with child(page, sleep) as pid:
        assert not life.wait(page, pid + 1)


def test_who_comes_late_is_told_at_once(page: Page) -> None:
    with child(page, sleep) as pid:
        assert not life.has_ended(page)
    assert life.has_ended(page)
    assert life.wait(page, pid)


def test_a_page_that_is_used_again(page: Page) -> None:
    with child(page, sleep) as pid:
        os.kill(pid, signal.SIGKILL)
        assert Waiting(page, pid).told()
    page.clear()
    assert (life.has_ended(page), page[Field.LIFE]) == (False, 0)
    with child(page, sleep) as other:
        assert not life.wait(page, pid)
        assert Waiting(page, other).found == []


@pytest.mark.parametrize("number", [0, 1 << 20])
def test_a_kernel_without_it_tells_nothing(page: Page, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """No numbers for this machine; or a system call that fails."""
    monkeypatch.setattr(life, "_SET_ROBUST_LIST", number)
    monkeypatch.setattr(life, "_FUTEX", number)
    life.arm(page)
    assert page[Field.LIFE] == 0
    page[Field.LIFE] = 1 << 31 | 7
    assert not life.wait(page, 7)
