"""Results for people at a terminal, and for programs as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .figures import figures, samples
from .runner import Run
from .scenario import Scenario

TIMES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "E2E"}
BUSY_CORES, LATE_MS = 0.8, 20.0  # beyond these the generator may be what is measured


def result(label: str, scenario: Scenario, run: Run) -> dict[str, Any]:
    """Of one run: what was asked for, the figures, and each request."""
    return {"label": label, "scenario": scenario.model_dump(mode="json", exclude_none=True),
            "figures": figures(run, scenario.slo), "requests": samples(run)}


def write(path: Path, results: Any) -> None:
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def show(console: Console, results: Sequence[Mapping[str, Any]]) -> None:
    """One column for each result."""
    table = Table(*["", *(r["label"] for r in results)], title=results[0]["scenario"].get("title") or None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, cells in rows([r["figures"] for r in results]):
        table.add_row(name, *cells)
    console.print(table)
    for r in results:
        for warning in warnings(r["figures"]):
            console.print(f"{r['label']}: {warning}", style="yellow")


def rows(of: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """(name, a cell for each) of every figure."""
    made = [
        ("requests done / left / failed", [f"{f['done']} / {f['left']} / {sum(f['failed'].values())}" for f in of]),
        ("seconds", [f"{f['seconds']:.2f}" for f in of]),
        ("output tokens/s", [f"{f['output_tokens_per_s']:.1f}" for f in of]),
        ("requests/s", [f"{f['requests_per_s']:.2f}" for f in of]),
    ]
    made += [(f"{title} ms p50 / p90 / p99 / max", [_spread(f[name]) for f in of]) for name, title in TIMES.items()]
    made += [(f"goodput {name} ({slo['ttft_ms']:g} / {slo['tpot_ms']:g} ms)",
              [f"{f['goodput'][name]['requests_per_s']:.2f}/s = {f['goodput'][name]['share']:.0%}" for f in of])
             for name, slo in of[0]["goodput"].items()]  # fmt: skip
    return made


def _spread(values: Mapping[str, float] | None) -> str:
    return " / ".join(f"{v:.1f}" for v in values.values()) if values else "–"


def warnings(f: Mapping[str, Any]) -> list[str]:
    found = [f"{count} failed: {reason}" for reason, count in f["failed"].items()]
    if f["generator"]["cores"] > BUSY_CORES:
        found.append(f"the generator used {f['generator']['cores']:.2f} cores: it may be what was measured")
    if (late := f["generator"]["late_ms"]) and late["p99"] > LATE_MS:
        found.append(f"requests left up to {late['max']:.0f} ms late; latencies count from when they were due")
    return found
