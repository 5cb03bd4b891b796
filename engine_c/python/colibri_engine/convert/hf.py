"""A Hugging Face folder (config.json and safetensors, sharded or not) as a Source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..container import COMPANIONS
from ..errors import ConversionError
from ..files import read_json, read_whole
from ..geometry import Slot
from .fields import Fields
from .hf_config import read_config
from .safetensors_file import StoredTensor, open_safetensors
from .source import Companions, Source, matrix_shape, refuse_unexpected, require_shape
from .tensor import Tensor, array_tensor

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_REMEDY = "check the checkpoint for completeness"


@dataclass(frozen=True)
class _Place:
    """Where a slot's matrix lives: a tensor, how often its rows repeat the slot's, and which repetition is ours."""

    name: str
    count: tuple[int, ...] = ()  # leading dimension(s) of a stacked tensor
    merged: int = 1  # matrices joined along the rows
    index: int = 0


def _places(slot: Slot, experts: int) -> Iterator[_Place]:
    """Names a slot may have, in order of preference.

    transformers 5 keeps Mixtral's experts stacked: gate_up_proj [experts, 2 * inter, hidden] (gate first) and
    down_proj [experts, hidden, inter]. It writes the older one-tensor-per-matrix names, but other tools may not.
    """
    yield _Place(slot.name)
    stem = f"model.layers.{slot.layer}.mlp."
    if slot.role == "router":
        yield _Place(stem + "gate.weight")
    elif slot.role in ("ffn_gate", "ffn_up"):
        half = 0 if slot.role == "ffn_gate" else 1
        yield _Place(stem + "experts.gate_up_proj", (experts,), 2, 2 * slot.expert + half)
    elif slot.role == "ffn_down":
        yield _Place(stem + "experts.down_proj", (experts,), 1, slot.expert)


class HuggingFaceSource(Source):
    """Raises ConversionError on construction for a folder that is no usable checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.path, self.name = folder, folder.resolve().name
        self._config = Fields(folder / "config.json", read_json(folder / "config.json"))
        self.architecture, self.geometry, self.rope_freqs = read_config(self._config)
        self._tensors = _open_all(folder)

    def check(self, wanted: Iterable[Slot]) -> None:
        used = set()
        for slot in wanted:
            if slot.role != "rope_freqs":
                place, stored = self._find(slot)
                stored.check_dtype()
                require_shape(stored.file.path, stored.name, stored.shape, _expected(place, slot))
                used.add(stored.name)
        ignored = ("rotary_emb.inv_freq",) + (("lm_head.weight",) if self.geometry.tied_head else ())
        refuse_unexpected({name: t.file.path for name, t in self._tensors.items()}, used, ignored)

    def tensor(self, slot: Slot) -> Tensor:
        if slot.role == "rope_freqs":
            return array_tensor(self.path, slot.name, self.rope_freqs)
        place, stored = self._find(slot)
        rows, cols = matrix_shape(slot)
        return stored.window(place.index * rows, rows, cols)

    def companions(self) -> Companions:
        found = Companions()
        for name in COMPANIONS:
            if (self.path / name).exists():
                found.files[name] = read_whole(self.path / name)
        if "tokenizer.json" not in found.files:
            found.warnings.append(f"{self.path} has no tokenizer.json: the model takes token ids only")
        return found

    def _find(self, slot: Slot) -> tuple[_Place, StoredTensor]:
        for place in _places(slot, self.geometry.experts):
            if place.name in self._tensors:
                return place, self._tensors[place.name]
        raise ConversionError(self.path, f"tensor is missing; {_REMEDY}", slot.name)


def _expected(place: _Place, slot: Slot) -> tuple[int, ...]:
    return (*place.count, slot.shape[0] * place.merged, *slot.shape[1:])


def _open_all(folder: Path) -> dict[str, StoredTensor]:
    if (folder / _SINGLE).exists() or not (folder / _INDEX).exists():
        return open_safetensors(folder / _SINGLE)
    return _open_shards(folder / _INDEX)


def _open_shards(index: Path) -> dict[str, StoredTensor]:
    """All shards an index names; a tensor must be in the shard it is said to be in, and in no other."""
    weight_map = Fields(index, read_json(index)).section("weight_map").values
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted({_shard_name(index, name, value) for name, value in weight_map.items()}):
        for name, stored in open_safetensors(index.parent / shard).items():
            if weight_map.get(name) != shard:
                raise ConversionError(index, f"does not list the tensor that {shard} holds", name)
            tensors[name] = stored
    for name, shard in weight_map.items():
        if name not in tensors:
            raise ConversionError(index.parent / shard, f"does not hold the tensor {index.name} promises", name)
    return tensors


def _shard_name(index: Path, name: str, value: object) -> str:
    if not isinstance(value, str) or Path(value).name != value or not value.endswith(".safetensors"):
        raise ConversionError(index, f"names {value!r}, which is no safetensors file of this folder", name)
    return value
