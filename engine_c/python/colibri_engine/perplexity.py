"""Perplexity of a text, and what int8 routing does to it.

A text is cut into consecutive windows without overlap, no BOS is added, and each token but a window's first is scored
given the window's tokens before it. "second half" averages the predictions of tokens n/2 ... n-1 of each window
(llama-perplexity does the same without the first of these). With window_tokens 0 the whole text is one window, which is
what pinned + window masks are for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from ._colibri import lib
from .binding import token_array
from .engine import Engine
from .errors import ColibriError
from .files import read_whole
from .sequence import Sequence

Tokens = npt.NDArray[np.uint32]
Advance = Callable[[int, int], None]  # tokens done, tokens in all
_TEXT_LIMIT = 1 << 30
CHUNK = 256  # tokens a step: bounds the logits held at a time


class TextError(ColibriError):
    """A text or token file cannot be used. Fields as in ConversionError."""

    def __init__(self, path: Path, reason: str, item: str | None = None) -> None:
        self.path, self.item, self.reason = path, item, reason
        super().__init__(f"{path}: {item}: {reason}" if item else f"{path}: {reason}")


# ---- tokens -----------------------------------------------------------------------------------------------------


def load_tokens(path: Path) -> Tokens:
    """Token ids from .npy, .npz (its only array, or the one named tokens or ids), or text with numbers."""
    try:
        if path.suffix in (".npy", ".npz"):
            return token_array(_array(path).reshape(-1))
        text = read_whole(path, TextError, _TEXT_LIMIT).decode("ascii")
        return token_array(np.array(text.replace(",", " ").split(), dtype=np.int64))
    except (ValueError, OSError, OverflowError) as e:
        raise TextError(path, f"holds no token ids: {e}") from e


def _array(path: Path) -> np.ndarray:
    loaded = np.load(path, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return loaded
    with loaded:
        names = [name for name in ("tokens", "ids") if name in loaded.files] or loaded.files
        if len(names) != 1:
            raise ValueError(f"it has arrays {', '.join(names)}; save one, or name it tokens")
        return np.asarray(loaded[names[0]])


def tokenise(folder: Path, path: Path) -> Tokens:
    """A UTF-8 text by the model's own tokenizer.json, no special tokens added."""
    try:
        from tokenizers import Tokenizer
    except ImportError as e:
        raise TextError(path, "reading text needs the package tokenizers (pip install tokenizers), or --tokens") from e
    if not (folder / "tokenizer.json").is_file():
        raise TextError(folder / "tokenizer.json", "is missing; give token ids with --tokens")
    try:
        text = read_whole(path, TextError, _TEXT_LIMIT).decode("utf-8")
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except UnicodeDecodeError as e:
        raise TextError(path, f"is not UTF-8 text: {e}") from e
    except Exception as e:  # tokenizers raises Exception itself
        raise e if isinstance(e, ColibriError) else TextError(folder / "tokenizer.json", f"cannot be used: {e}") from e
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32)


# ---- what to score ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How a text is cut and attended to. pinned and window: None = the model's own attention."""

    window_tokens: int = 512  # 0: the whole text at once
    limit: int | None = None  # windows, or tokens of the text if it is one
    second_half: bool = False  # score nothing else
    pinned: int | None = None
    window: int | None = None
    positions: str = "cache"

    def cut(self, path: Path, tokens: Tokens) -> list[Tokens]:
        """The windows to score; a last incomplete one is left out."""
        size = self.window_tokens or len(tokens[: self.limit])
        windows = [tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size)] if size > 1 else []
        if not windows:
            raise TextError(path, f"has {len(tokens)} tokens; a window of at least 2 (--window-tokens) does not fit")
        return windows[: self.limit] if self.window_tokens else windows[:1]


@dataclass
class Score:
    """Log probabilities of the scored tokens, window by window, aligned at each window's end."""

    size: int  # tokens of a window
    rows: list[npt.NDArray[np.float32]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def half(self) -> int:
        """How many predictions the second half of a window has."""
        return self.size - self.size // 2

    def perplexity(self, second_half: bool = False) -> float:
        """exp of the mean negative log probability."""
        kept = [row[-self.half :] if second_half else row for row in self.rows]
        return math.exp(-float(np.concatenate(kept).mean(dtype=np.float64)))

    def describe(self, plan: Plan) -> dict[str, Any]:
        """What --json prints."""
        tokens = self.size * len(self.rows)
        return {
            "perplexity": self.perplexity(plan.second_half),
            "perplexity_second_half": self.perplexity(True),
            "windows": len(self.rows),
            "window_tokens": self.size,
            "tokens": tokens,
            "scored": sum(map(len, self.rows)),
            "seconds": self.seconds,
            "tokens_per_s": tokens / max(self.seconds, 1e-9),
        }


def _steps(engine: Engine, window: Tokens, plan: Plan, first: int, chunk: int) -> Iterator[tuple[int, np.ndarray]]:
    """Runs a window in chunks; yields (position, logits [rows, vocab]) of positions >= first after every step."""
    sequence = Sequence(engine.attention(plan.pinned, plan.window, plan.positions), engine.info.slab_tokens)
    arena = engine.arena(sequence.slabs_needed(len(window), chunk))
    for at in range(0, len(window), chunk):
        part = window[at : at + chunk]
        wanted = min(max(first - at, 0), len(part))
        yield at + wanted, engine.step([(sequence, part, wanted)], arena)[0]


def score(engine: Engine, windows: list[Tokens], plan: Plan, advance: Advance = lambda done, total: None,
          chunk: int | None = None, after_step: Callable[[], None] = lambda: None) -> Score:
    """Scores every window; `after_step` is called when a step's counters can be read."""
    size, begin = len(windows[0]), time.monotonic()
    first = size // 2 - 1 if plan.second_half else 0
    result = Score(size)
    for index, window in enumerate(windows):
        row = np.empty(size - 1 - first, np.float32)
        for at, logits in _steps(engine, window, plan, first, chunk or engine.max_tokens):
            after_step()
            for i, values in enumerate(logits[: size - 1 - at], at):
                row[i - first] = engine.score(values, int(window[i + 1])).logprob
            advance(index * size + at + len(logits), len(windows) * size)
        result.rows.append(row)
    result.seconds = time.monotonic() - begin
    return result


def report_lines(stream: TextIO) -> Advance:
    """Progress as a line every tenth."""
    begin, tenths = time.monotonic(), 0

    def advance(done: int, total: int) -> None:
        nonlocal tenths
        now = 10 * done // max(total, 1)
        if now > tenths:
            tenths, seconds = now, max(time.monotonic() - begin, 1e-9)
            print(f"scoring: {10 * now} %, {done} tokens, {done / seconds:.0f} tokens/s", file=stream, flush=True)

    return advance


# ---- routing ----------------------------------------------------------------------------------------------------


class _Routes:
    """The set of experts of every (token, layer), from the engine's counters after steps of one token."""

    def __init__(self, engine: Engine) -> None:
        counters = engine.expert_tokens
        if counters is None:
            raise ValueError("routes can be noted only of an engine opened with expert_tokens=True")
        self._counters = counters
        self.sets: list[np.ndarray] = []

    def note(self) -> None:
        self.sets.append(self._counters > 0)
        self._counters.fill(0)


def _part(advance: Advance, turn: int) -> Advance:
    """Progress of one of two runs over the same windows."""
    return lambda done, total: advance(turn * total + done, 2 * total)


def compare_routing(open_engine: Callable[[str], Engine], windows: list[Tokens], plan: Plan,
                    advance: Advance = lambda done, total: None) -> dict[str, Any]:
    """Float against int8 routing over the same windows, one token a step. open_engine(routing) must count experts.

    agreement is the share of (token, layer) with the same expert set, each run following its own routes.
    """
    scores, routes = {}, {}
    for turn, routing in enumerate(("float", "int8")):
        with open_engine(routing) as engine:
            seen = _Routes(engine)
            scores[routing] = score(engine, windows, plan, _part(advance, turn), 1, seen.note)
            routes[routing] = np.stack(seen.sets)
    same = (routes["float"] == routes["int8"]).all(axis=2)
    before, after = (scores[name].perplexity(plan.second_half) for name in ("float", "int8"))
    return {
        "agreement": float(same.mean()),
        "agreement_by_layer": [float(x) for x in same.mean(axis=0)],
        "perplexity_float": before,
        "perplexity_int8": after,
        "perplexity_change": after / before - 1,
        "tokens": int(same.shape[0]),
    }


# ---- for people -------------------------------------------------------------------------------------------------


def text(result: dict[str, Any], plan: Plan) -> str:
    """Score.describe() in a few lines."""
    cut = f"{result['windows']} windows of {result['window_tokens']} tokens"
    rows = [] if plan.second_half else [f"perplexity               {result['perplexity']:.4f}"]
    rows.append(f"perplexity, second half  {result['perplexity_second_half']:.4f}")
    rows.append(f"{cut}, {result['scored']} scored in {result['seconds']:.1f} s, {result['tokens_per_s']:.0f} tokens/s")
    return "\n".join(rows)


def routing_text(result: dict[str, Any]) -> str:
    """compare_routing() in a few lines."""
    worst = min(result["agreement_by_layer"])
    return "\n".join([
        f"same experts as float    {result['agreement']:.2%} of (token, layer), worst layer {worst:.2%}",
        f"perplexity, float        {result['perplexity_float']:.4f}",
        f"perplexity, int8         {result['perplexity_int8']:.4f} ({result['perplexity_change']:+.2%})",
        f"{result['tokens']} tokens",
    ])


@dataclass(frozen=True)
class Run:
    """What the command does, once its options are understood. threads None: the usable physical cores."""

    folder: Path
    plan: Plan
    windows: list[Tokens]
    threads: int | None
    routing: str
    progress: TextIO | None

    def _open(self, routing: str, **options: Any) -> Engine:
        size = len(self.windows[0])
        return Engine(self.folder, self.threads or lib.colibri_host_threads(), routing=routing, max_sequences=1,
                      max_context=size, max_tokens=min(size, CHUNK), **options)

    def _advance(self) -> Advance:
        return report_lines(self.progress) if self.progress else lambda done, total: None

    def measure(self) -> tuple[dict[str, Any], str]:
        """(for --json, for people)"""
        with self._open(self.routing) as engine:
            result = score(engine, self.windows, self.plan, self._advance()).describe(self.plan)
        return result, text(result, self.plan)

    def compare(self) -> tuple[dict[str, Any], str]:
        """Likewise for --compare-routing."""
        result = compare_routing(lambda routing: self._open(routing, expert_tokens=True), self.windows, self.plan,
                                 self._advance())
        return result, routing_text(result)
