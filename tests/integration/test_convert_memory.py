"""Conversion streams: the process stays far smaller than what it converts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures.checkpoints import LLAMA, raw_safetensors, shapes

MEASURED = """
import resource, sys
from pathlib import Path
from colibri_engine.convert import convert
first = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(Path(sys.argv[1]), Path(sys.argv[2]), "q8", int(sys.argv[3]) or None)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - first) * 1024)
"""


def sparse_checkpoint(folder: Path) -> int:
    """A model of zeros whose file takes no disk; returns its bytes."""
    config = LLAMA | {"vocab_size": 65536, "hidden_size": 512, "num_key_value_heads": 4, "intermediate_size": 512}
    header, end = {}, 0
    for name, shape in shapes(config).items():
        size = 4 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with open(folder / "model.safetensors", "wb") as f:
        f.write(raw_safetensors(header, b""))
        f.truncate(f.tell() + end)
    return end


@pytest.mark.parametrize("upcycle", [0, 4])
def test_peak_memory_is_a_fraction_of_the_model(tmp_path: Path, upcycle: int) -> None:
    size = sparse_checkpoint(tmp_path / "src")
    args = [sys.executable, "-c", MEASURED, str(tmp_path / "src"), str(tmp_path / "dst"), str(upcycle)]
    grown = int(subprocess.run(args, check=True, capture_output=True, text=True).stdout)
    assert size > 250 << 20
    assert grown < size / 4
