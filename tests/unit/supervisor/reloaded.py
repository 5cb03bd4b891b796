"""What tests of reloads share: asking for one, and what has come of it."""

from __future__ import annotations

import signal

from supervised import Service


def reload(service: Service, **settings: object) -> None:
    """With these settings in the file; until it has ended."""
    ended = len(outcomes(service))
    service.configure(**settings)
    service.signal(signal.SIGHUP)
    service.until(lambda: len(outcomes(service)) > ended)


def outcomes(service: Service) -> list[str]:
    """Why each reload failed, nothing for those that did not."""
    lines = [line for line in service.log(name="reload") if line["msg"].startswith(("reload done", "reload failed"))]
    return [line.get("reason", "") for line in lines]


def gone(service: Service, generation: int) -> None:
    service.until(lambda: service.log(msg="generation gone", generation=generation))


def pids(service: Service) -> list[int]:
    return [worker["pid"] for worker in service.state()["workers"]]
