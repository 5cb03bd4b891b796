"""Panels of the dashboards plotted with matplotlib, from Prometheus' answers to their queries."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: there is no screen
import matplotlib.pyplot as plt  # noqa: E402

if TYPE_CHECKING:
    from dashboards import Panel, Series

COLUMNS, WIDTH, HEIGHT = 3, 4.3, 2.4  # of a picture, inches of a panel
MOST_LINES = 8
SCALES = {"bytes": (1 / (1 << 20), "MiB"), "percentunit": (100.0, "%"), "s": (1000.0, "ms")}


def plot(panels: list[Panel], folder: Path) -> None:
    """One picture for each row of each dashboard; single numbers are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[tuple[str, str], list[Panel]] = {}
    for panel in panels:
        if panel.kind != "stat":
            rows.setdefault((panel.dashboard, panel.row), []).append(panel)
    for (dashboard, row), members in rows.items():
        lines = math.ceil(len(members) / COLUMNS)
        figure, axes = plt.subplots(lines, COLUMNS, figsize=(COLUMNS * WIDTH, lines * HEIGHT), squeeze=False)
        for axis in axes.flat[len(members) :]:
            axis.axis("off")
        for axis, panel in zip(axes.flat, members, strict=False):
            _draw(axis, panel)
        figure.tight_layout()
        name = re.sub("[^a-z]+", "-", f"{dashboard} {row}".lower())
        figure.savefig(folder / f"{name}.png", dpi=72)
        plt.close(figure)


def _draw(axis: Any, panel: Panel) -> None:
    scale, unit = SCALES.get(panel.unit, (1.0, "" if panel.unit == "short" else panel.unit))
    axis.set_title(f"{panel.title}{f' [{unit}]' if unit else ''}", fontsize=9)
    axis.tick_params(labelsize=7)
    if panel.kind == "heatmap":
        return _heatmap(axis, panel.answers[0], scale)
    begin = min((float(at) for answer in panel.answers for series in answer for at, _ in series["values"]), default=0)
    drawn = [(_legend(legend, series["metric"]), [float(at) - begin for at, _ in series["values"]],
              [scale * float(value) for _, value in series["values"]])
             for legend, answer in zip(panel.legends, panel.answers, strict=False) for series in answer]
    drawn.sort(key=lambda line: -sum(value for value in line[2] if math.isfinite(value)))
    drawn = drawn[:MOST_LINES]
    if panel.stacked and len({len(times) for _, times, _ in drawn}) == 1:
        axis.stackplot(drawn[0][1], [values for _, _, values in drawn], labels=[label for label, _, _ in drawn])
    else:
        for label, times, values in drawn:
            axis.plot(times, values, label=label, linewidth=1)
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=6, loc="upper left")


def _heatmap(axis: Any, answer: list[Series], scale: float) -> None:
    """From cumulative buckets: what is in each alone."""
    buckets = sorted(answer, key=lambda series: float(series["metric"]["le"]))
    times = [float(at) - float(buckets[0]["values"][0][0]) for at, _ in buckets[0]["values"]]
    below = [0.0] * len(times)
    rows, bounds = [], []
    for series in buckets:
        values = [float(value) for _, value in series["values"]]
        rows.append([max(0.0, value - low) for value, low in zip(values, below, strict=False)])
        bounds.append(series["metric"]["le"])
        below = values
    used = [index for index, row in enumerate(rows) if any(row)] or [0]
    first, last = max(0, used[0] - 1), min(len(rows), used[-1] + 2)
    axis.pcolormesh(times, range(first, last), rows[first:last], cmap="Oranges", shading="nearest")
    names = [bound if bound == "+Inf" else f"{scale * float(bound):g}" for bound in bounds[first:last]]
    axis.set_yticks(range(first, last), names)


def _legend(pattern: str, labels: dict[str, str]) -> str:
    if pattern == "__auto":
        return ",".join(labels.values())
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), pattern)
