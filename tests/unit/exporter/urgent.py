"""A program of its own for test_urgency.py: computes without a pause under Urgency, at most for a second, and waits for
a second; prints the scheduling policies that it had, in their order.

    python urgent.py
"""

from __future__ import annotations

import asyncio
import json
import os
import time

from colibri_daemon.exporter.urgency import Urgency

NAMES = {os.SCHED_OTHER: "fair", os.SCHED_RR: "real time", os.SCHED_IDLE: "idle"}
SECONDS = 1.0


class Policies:
    """Of this thread."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def look(self) -> None:
        name = NAMES[os.sched_getscheduler(0)]
        if self.seen[-1:] != [name]:
            self.seen.append(name)


async def main() -> list[str]:
    urgency = Urgency(asyncio.get_running_loop(), burst=0.05, turns=SECONDS)
    policies = Policies()
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        policies.look()
        await asyncio.sleep(0)  # somebody asks again
    while time.monotonic() < end + SECONDS:
        await asyncio.sleep(0.02)
        policies.look()
    urgency.end()
    return policies.seen


print(json.dumps(asyncio.run(main())))
