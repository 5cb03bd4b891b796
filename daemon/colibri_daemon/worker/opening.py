"""How a worker opens its engine: what decides the size of its scratch memory, for the worker and for whoever plans."""

from __future__ import annotations

from typing import Any

from ..common.facts import ModelFacts
from ..common.settings import Settings
from .calibrate import LEAST, MOST


def engine_options(settings: Settings, facts: ModelFacts) -> dict[str, Any]:
    """Of Engine.open."""
    return {"kv_format": facts.kv_format, "slab_tokens": facts.slab_tokens,
            "max_tokens": max(settings.step_tokens or MOST, settings.max_seqs + LEAST),
            "max_sequences": settings.max_seqs, "max_context": facts.max_len}  # fmt: skip
