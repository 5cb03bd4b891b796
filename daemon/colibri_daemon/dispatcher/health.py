"""The daemon's state as the supervisor tells it, for HEALTH: never computed here, always with its age."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from colibri_protocol.errors import InvalidMessage
from colibri_protocol.messages import HealthReply

from ..common import log

STALE_SECONDS = 2.0  # no news for this long: not ready
_log = log.get("health")


class HealthBoard:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._told = HealthReply(live=True, ready=False, state="starting", reason="the supervisor has said nothing yet")
        self._at = clock()
        self.draining = ""  # why, if it is so
        self._refusal = ""  # why no request is taken, though the daemon may get well again

    def update(self, push: dict[str, Any]) -> None:
        """A {"t": "state"} message of the control socket."""
        try:
            self._told = HealthReply.from_body({"live": True, **push})
        except InvalidMessage as e:
            _log.error("a state from the supervisor was not understood", error=str(e))
            return
        self._at = self._clock()
        self._refusal = str(push.get("refuse", ""))

    def reply(self) -> HealthReply:
        age = self._clock() - self._at
        told = replace(self._told, age_ms=round(age * 1000, 1))
        if age > STALE_SECONDS:
            return replace(told, ready=False, reason=f"no news from the supervisor for {age:.1f} s")
        if self.draining:
            return replace(told, ready=False, state="draining", reason=self.draining)
        return told

    def failed(self) -> str | None:
        """Why no request will be served, if that is so until something is done about it."""
        return (self._told.reason or "loading failed") if self._told.state == "failed" else self._refusal or None
