"""Log levels that an administrator has asked for, beyond what the configuration says. They outlive processes and
reloads, not the service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..common import log
from .children import Child

OWN_ROLE = "supervisor"


class LogLevels:
    """By role: a process's title, its title without the number, or None for all. The most specific one counts."""

    def __init__(self) -> None:
        self._asked: dict[str | None, str] = {}

    def ask(self, level: str, role: str | None, children: Sequence[Child]) -> dict[str, Any]:
        """Tells those who are concerned; the fields of an "admin" answer."""
        titles = [OWN_ROLE, *(child.role.title for child in children)]
        concerned = [title for title in titles if role in _names(title)]
        if not concerned:
            return {"ok": False, "error": f"role is {role!r}; there are {', '.join(sorted(set(titles)))}", "result": {}}
        for names in map(_names, concerned):
            for name in names[: names.index(role)]:  # what was asked for less widely gives way
                self._asked.pop(name, None)
        self._asked[role] = level
        if OWN_ROLE in concerned:
            self.apply()
        for child in children:
            if child.role.title in concerned:
                self.tell(child)
        return {"ok": True, "error": "", "result": {"processes": concerned}}

    def tell(self, child: Child) -> None:
        """To one that is there, or has just been started."""
        if level := self._level(child.role.title):
            child.tell({"t": "log_level", "level": level})

    def apply(self) -> None:
        """To this process, whose log has the level of the configuration now."""
        if level := self._level(OWN_ROLE):
            log.set_level(level)

    def _level(self, title: str) -> str | None:
        return next((self._asked[name] for name in _names(title) if name in self._asked), None)


def _names(title: str) -> tuple[str | None, ...]:
    """The roles that mean this process, the most specific first."""
    return title, title.split(" ")[0], None
