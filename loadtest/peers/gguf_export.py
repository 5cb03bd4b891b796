"""A Colibri container as a GGUF file with the very same weights, so that llama.cpp can be compared with.

Nothing is requantised: q4 becomes Q4_0, q8 Q8_0, f16 F16, bf16 BF16 and f32 F32, block by block, with the same quants
and scales. The architecture is llama.cpp's "llama" with stacked experts; query and key rows are put into its rotary
order. Converting the result back gives a container with the same model id (tests/unit/loadtest/test_peers.py).

usage: python loadtest/peers/gguf_export.py MODEL_DIR OUT.gguf
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from colibri_engine.container import Manifest, TensorEntry
from colibri_engine.errors import ColibriError

PANEL, BLOCK = 16, 32
_TYPE = gguf.GGMLQuantizationType
# our dtype -> (GGUF's, bytes of a panel's block)
_DTYPES = {"q4": (_TYPE.Q4_0, 288), "q8": (_TYPE.Q8_0, 544), "f16": (_TYPE.F16, 1024), "bf16": (_TYPE.BF16, 1024),
           "f32": (_TYPE.F32, 2048)}
_NAMES = {
    "embed": "token_embd", "head": "output", "final_norm": "output_norm", "attn_norm": "blk.{}.attn_norm",
    "attn_q": "blk.{}.attn_q", "attn_k": "blk.{}.attn_k", "attn_v": "blk.{}.attn_v", "attn_o": "blk.{}.attn_output",
    "ffn_norm": "blk.{}.ffn_norm", "router": "blk.{}.ffn_gate_inp", "ffn_gate": "blk.{}.ffn_gate",
    "ffn_up": "blk.{}.ffn_up", "ffn_down": "blk.{}.ffn_down",
}  # fmt: skip
_STACKED = ("ffn_gate", "ffn_up", "ffn_down")
_NORMAL, _CONTROL = 1, 3  # GGUF token types
Bytes = np.ndarray


class ExportError(ColibriError):
    """The model has something llama.cpp's format cannot say."""


# ---- panels to rows ---------------------------------------------------------------------------------------------


def _blocks(raw: Bytes, entry: TensorEntry) -> Bytes:
    """[panels, blocks of 32 k, bytes] of a matrix; engine_c/src/quant/format.h."""
    rows, cols = entry.shape
    if cols % BLOCK:
        raise ExportError(f"{entry.name}: {cols} columns are not a multiple of {BLOCK}, as GGUF blocks need")
    size, panels = _DTYPES[entry.dtype][1], -(-rows // PANEL)
    return raw.reshape(panels, -1)[:, : cols // BLOCK * size].reshape(panels, cols // BLOCK, size)


def _rows(values: np.ndarray) -> np.ndarray:
    """[panels, blocks, 16 rows, ...] -> [rows, blocks, ...]"""
    return np.moveaxis(values, 2, 1).reshape(-1, values.shape[1], *values.shape[3:])


def _scaled(quants: np.ndarray, scales: Bytes) -> Bytes:
    """GGUF's blocks: the scale, then the quants. [rows, bytes]"""
    whole = np.concatenate([_rows(scales.reshape(*scales.shape[:2], PANEL, 2)), quants.view(np.uint8)], axis=2)
    return whole.reshape(whole.shape[0], -1)


def _q8_0(blocks: Bytes) -> Bytes:
    grouped = blocks[..., :512].reshape(*blocks.shape[:2], 8, PANEL, 4).swapaxes(2, 3)
    quants = _rows(grouped.reshape(*grouped.shape[:3], BLOCK)) ^ 128  # u8 = w + 128 -> int8
    return _scaled(quants, blocks[..., 512:])


def _q4_0(blocks: Bytes) -> Bytes:
    packed = blocks[..., :256].reshape(*blocks.shape[:2], 4, PANEL, 4).swapaxes(2, 3)
    in_order = np.stack([packed & 15, packed >> 4], axis=4)  # [.., row, group, half, 4]
    quants = _rows(in_order.reshape(*in_order.shape[:3], BLOCK))
    return _scaled(quants[..., :16] | quants[..., 16:] << 4, blocks[..., 256:])


def _plain(blocks: Bytes) -> Bytes:
    width = blocks.shape[2] // (BLOCK * PANEL)
    values = blocks.reshape(*blocks.shape[:2], BLOCK, PANEL, width).swapaxes(2, 3)
    return _rows(values).reshape(blocks.shape[0] * PANEL, -1)


_UNPACK = {"q4": _q4_0, "q8": _q8_0}


def _interleaved(rows: Bytes, heads: int) -> Bytes:
    """Hugging Face rotates the two halves of a head, llama.cpp neighbouring pairs."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


# ---- the file ---------------------------------------------------------------------------------------------------


class Export:
    """One model on its way to a GGUF file."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._manifest = folder, Manifest.load(folder)
        self._files = [np.memmap(folder / name, np.uint8, "r") for name, _ in self._manifest.files]
        if self._manifest.geometry.window:
            raise ExportError(f"{folder}: llama.cpp's llama architecture has no sliding window")

    def write(self, out: Path) -> None:
        """Writes `out` under a temporary name and renames it."""
        temporary = out.with_name(f".{out.name}.partial")
        writer = gguf.GGUFWriter(temporary, "llama")
        try:
            self._metadata(writer)
            groups = list(self._groups())
            for name, entries in groups:
                self._announce(writer, name, entries)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for _, entries in groups:
                writer.write_tensor_data(np.concatenate([self._bytes(e) for e in entries]))
            writer.close()
            os.replace(temporary, out)
        finally:
            temporary.unlink(missing_ok=True)

    def _groups(self) -> Iterator[tuple[str, list[TensorEntry]]]:
        """(GGUF name, its tensors): one, or a layer's experts in order."""
        tensors, experts = self._manifest.tensors, self._manifest.geometry.experts
        of_layer: dict[tuple[str, int], list[TensorEntry]] = {}
        for t in tensors:
            if t.role != "rope_freqs":
                of_layer.setdefault((t.role, t.layer), []).append(t)
        for (role, layer), entries in of_layer.items():
            stacked = "_exps" if role in _STACKED and experts > 1 else ""
            yield f"{_NAMES[role].format(layer)}{stacked}.weight", sorted(entries, key=lambda t: t.expert)

    def _announce(self, writer: gguf.GGUFWriter, name: str, entries: list[TensorEntry]) -> None:
        first = entries[0]
        kind = _DTYPES[first.dtype][0]
        lead = (len(entries),) if name.endswith("_exps.weight") else ()
        per, size = gguf.GGML_QUANT_SIZES[kind]
        shape = (*lead, *first.shape[:-1], first.shape[-1] // per * size)
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), int(np.prod(shape)), raw_dtype=kind)

    def _bytes(self, entry: TensorEntry) -> Bytes:
        """[rows, bytes of a row] as GGUF has them; a vector is one row."""
        raw = self._files[entry.file][entry.offset : entry.offset + entry.bytes]
        if entry.layout == "row":
            return raw.reshape(1, -1)
        rows = _UNPACK.get(entry.dtype, _plain)(_blocks(raw, entry))[: entry.shape[0]]
        g = self._manifest.geometry
        heads = {"attn_q": g.heads, "attn_k": g.kv_heads}.get(entry.role)
        return _interleaved(rows, heads) if heads else rows

    def _theta(self) -> float:
        """The rotary base, if the frequencies are the plain powers of one."""
        entry = next(t for t in self._manifest.tensors if t.role == "rope_freqs")
        freqs = self._bytes(entry).view("<f4")[0].astype(np.float64)
        dim = self._manifest.geometry.head_dim
        theta = float(f"{freqs[1] ** (-dim / 2):.6g}") if dim > 2 else 10000.0
        if not np.allclose(freqs, theta ** (-np.arange(0, dim, 2) / dim), rtol=1e-5, atol=0):
            raise ExportError(f"{entry.name}: the rotary frequencies are scaled, which this export does not carry over")
        return theta

    def _metadata(self, w: gguf.GGUFWriter) -> None:
        g = self._manifest.geometry
        w.add_name(self._manifest.name)
        w.add_context_length(g.context)
        w.add_embedding_length(g.hidden)
        w.add_block_count(g.layers)
        w.add_feed_forward_length(g.inter)
        w.add_head_count(g.heads)
        w.add_head_count_kv(g.kv_heads)
        w.add_key_length(g.head_dim)
        w.add_value_length(g.head_dim)
        w.add_rope_dimension_count(g.head_dim)
        w.add_rope_freq_base(self._theta())
        w.add_layer_norm_rms_eps(g.norm_eps)
        w.add_vocab_size(g.vocab)
        if g.experts > 1:
            w.add_expert_count(g.experts)
            w.add_expert_used_count(g.top_k)
        self._tokenizer(w)

    def _tokenizer(self, w: gguf.GGUFWriter) -> None:
        """Byte-level BPE if the model has it; else none, which is enough for llama-bench."""
        tokenizer = self._json("tokenizer.json")
        model = tokenizer.get("model", {})
        if model.get("type") != "BPE" or "ByteLevel" not in json.dumps(tokenizer.get("pre_tokenizer")):
            w.add_tokenizer_model("no_vocab")
            return
        vocab = dict(model["vocab"]) | {t["content"]: t["id"] for t in tokenizer.get("added_tokens", [])}
        special = {t["content"] for t in tokenizer.get("added_tokens", []) if t["special"]}
        by_id = {i: token for token, i in vocab.items()}
        tokens = [by_id.get(i, f"<unused{i}>") for i in range(self._manifest.geometry.vocab)]
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre("smollm" if '"Digits"' in json.dumps(tokenizer["pre_tokenizer"]) else "gpt-2")
        w.add_token_list(tokens)
        w.add_token_types([_CONTROL if t in special else _NORMAL for t in tokens])
        w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
        self._special_tokens(w)

    def _special_tokens(self, w: gguf.GGUFWriter) -> None:
        ids = self._json("config.json")
        if isinstance(ids.get("bos_token_id"), int):
            w.add_bos_token_id(ids["bos_token_id"])
        if isinstance(ids.get("eos_token_id"), int):
            w.add_eos_token_id(ids["eos_token_id"])
        w.add_add_bos_token(False)
        template = self._json("tokenizer_config.json").get("chat_template")
        if isinstance(template, str):
            w.add_chat_template(template)

    def _json(self, name: str) -> dict[str, Any]:
        path = self._folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", type=Path, metavar="MODEL_DIR")
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    args = parser.parse_args()
    try:
        Export(args.model).write(args.out)
    except (ColibriError, OSError) as e:
        raise SystemExit(f"error: {e}") from e


if __name__ == "__main__":
    main()
