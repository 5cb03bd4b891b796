"""Sources with random bytes or values in them: converted or refused, never anything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from colibri_engine.convert import convert
from colibri_engine.errors import ConversionError
from fixtures.checkpoints import LLAMA, gguf_tensors, random_tensors, write_checkpoint, write_gguf
from fixtures.checkpoints import MIXTRAL as CONFIG
from fixtures.refusal import patch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def survives(src: Path, dst: Path) -> None:
    """A source that is anything at all is converted or refused; no other exception, nothing left half done."""
    try:
        convert(src, dst, "q8", force=True)
    except ConversionError as e:
        assert str(src) in str(e)  # noqa: PT017
    assert not list(dst.parent.glob(".*"))


MUTATIONS = st.lists(st.tuples(st.integers(0, 5000), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(edits=MUTATIONS)
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_random_bytes_in_the_header(tmp_path_factory: pytest.TempPathFactory, kind: str, edits: Any) -> None:
    base = tmp_path_factory.mktemp("fuzz")
    if kind == "gguf":
        src = path = write_gguf(base / "m.gguf", LLAMA, gguf_tensors(LLAMA, random_tensors(LLAMA)))
    else:
        src = write_checkpoint(base / "src", LLAMA)
        path = src / "model.safetensors"
    for at, data in edits:
        patch(path, min(at, path.stat().st_size - len(data)), data)
    survives(src, base / "dst")


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    field=st.sampled_from([*CONFIG, "rope_scaling", "rope_parameters", "sliding_window", "partial_rotary_factor"]),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "rope_theta"]), inner, max_size=3)
        ),
        max_leaves=5,
    ),
)
def test_anything_in_a_config_field(tmp_path_factory: pytest.TempPathFactory, field: str, value: Any) -> None:
    base = tmp_path_factory.mktemp("fuzz")
    src = write_checkpoint(base / "src", CONFIG)
    (src / "config.json").write_text(json.dumps(CONFIG | {field: value}))
    survives(src, base / "dst")
