"""Documents and code made from the message classes: SPEC.md and the Go types. Remake: python -m colibri_protocol.spec

TARGETS lists them; a new one is one line there. Nothing here is needed at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .go import go_source
from .markdown import spec_markdown

ROOT = Path(__file__).resolve().parents[3]
COMMAND = "python -m colibri_protocol.spec"

TARGETS: dict[Path, Callable[[], str]] = {
    ROOT / "daemon" / "colibri_protocol" / "SPEC.md": spec_markdown,
    ROOT / "client" / "go" / "messages_gen.go": go_source,
}
