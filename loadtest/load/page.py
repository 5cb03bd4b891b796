"""Results as one HTML page that needs nothing else: the table of figures and plots as SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .report import rows, warnings

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 460, 260, 52, 34, 8
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart by colour-blind people
MOST_POINTS = 400
Points = list[tuple[float, float]]
Result = Mapping[str, Any]

STYLE = """body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:62em;padding:0 1em}
body{color:#222;background:#fff}
table{border-collapse:collapse}td,th{padding:.25em .8em;border-bottom:1px solid #ddd;text-align:right}
td:first-child{text-align:left}figure{display:inline-block;margin:1em 1em 0 0}figcaption{font-weight:600}
svg text{font-size:11px;fill:#555}svg .grid{stroke:#e4e4e4}.key{margin-right:1em}pre{background:#f5f5f5;padding:1em}
@media(prefers-color-scheme:dark){body{background:#16181c;color:#ddd}td,th{border-color:#333}svg text{fill:#aaa}
svg .grid{stroke:#33363c}pre{background:#22252b}}"""


def write(path: Path, results: Sequence[Result], notes: str = "") -> None:
    path.write_text(page(results, notes), encoding="utf-8")


def page(results: Sequence[Result], notes: str = "") -> str:
    """notes: text under the table."""
    title = results[0]["scenario"].get("title") or "Load test"
    head = "".join(f"<th>{escape(r['label'])}</th>" for r in results)
    body = "".join(f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
                   for name, cells in rows([r["figures"] for r in results]))  # fmt: skip
    told = "".join(f"<p>{escape(r['label'])}: {escape(w)}</p>" for r in results for w in warnings(r["figures"]))
    key = "".join(f'<span class="key"><span style="color:{_colour(i)}">■</span> {escape(r["label"])}</span>'
                  for i, r in enumerate(results))  # fmt: skip
    plots = "".join(_figure(*plot, results) for plot in PLOTS)
    return (f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
            f"<h1>{escape(title)}</h1><table><tr><th></th>{head}</tr>{body}</table>{told}"
            f"{f'<pre>{escape(notes)}</pre>' if notes else ''}<p>{key}</p>{plots}</html>\n")  # fmt: skip


# ---- what is plotted -------------------------------------------------------------------------------------------------


def _ttft(r: Result) -> Points:
    return _shares([1000 * (q["first"] - q["due"]) for q in r["requests"] if q["first"] is not None])


def _itl(r: Result) -> Points:
    return _shares([gap for q in r["requests"] for gap in q["gaps_ms"]])


def _e2e(r: Result) -> Points:
    done = [q for q in r["requests"] if q["failure"] is None and not q["left"]]
    return _shares([1000 * (q["end"] - q["due"]) for q in done])


def _speed(r: Result) -> Points:
    """Output tokens per second, in fifty slices of the run."""
    seconds, slices = r["figures"]["seconds"], [0.0] * 50
    for q in r["requests"]:
        at = q["first"]
        for gap in [0.0, *q["gaps_ms"]] if at is not None else []:
            at += gap / 1000
            slices[min(49, int(50 * at / seconds))] += 50 / seconds
    return [((i + 0.5) * seconds / 50, value) for i, value in enumerate(slices)]


def _running(r: Result) -> Points:
    """Requests due and not ended."""
    changes = sorted([(q["due"], 1) for q in r["requests"]] + [(q["end"], -1) for q in r["requests"]])
    points, now = [], 0
    for at, change in changes:
        points.append((at, float(now)))
        now += change
        points.append((at, float(now)))
    return points


PLOTS: tuple[tuple[str, str, Callable[[Result], Points]], ...] = (
    ("Time to first token: % of requests within", "ms", _ttft),
    ("Between tokens: % of gaps within", "ms", _itl),
    ("Whole request: % within", "ms", _e2e),
    ("Output tokens per second", "s", _speed),
    ("Requests due and not ended", "s", _running),
)


def _shares(values: list[float]) -> Points:
    """The empirical distribution, thinned out."""
    ordered = sorted(values)
    step = max(1, len(ordered) // MOST_POINTS)
    kept = [*range(0, len(ordered), step), len(ordered) - 1] if ordered else []
    return [(ordered[i], 100 * (i + 1) / len(ordered)) for i in kept]


# ---- how -------------------------------------------------------------------------------------------------------------


def _figure(title: str, unit: str, points: Callable[[Result], Points], results: Sequence[Result]) -> str:
    lines = [points(r) for r in results]
    across, up = (max((p[axis] for line in lines for p in line), default=1.0) or 1.0 for axis in (0, 1))
    x_scale, y_scale = (WIDTH - LEFT - 12) / across, (HEIGHT - BOTTOM - TOP) / up

    def x(value: float) -> float:
        return LEFT + value * x_scale

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value * y_scale

    grid = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 12}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y(v) + 4:.1f}" text-anchor="end">{v:g}</text>' for v in _ticks(up))
    feet = "".join(f'<text x="{x(v):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{v:g}</text>'
                   for v in _ticks(across))  # fmt: skip
    drawn = "".join(f'<polyline fill="none" stroke="{_colour(i)}" stroke-width="1.6" points="{_path(line, x, y)}"/>'
                    for i, line in enumerate(lines))  # fmt: skip
    return (f'<figure><figcaption>{escape(title)}</figcaption><svg width="{WIDTH}" height="{HEIGHT}" role="img" '
            f'aria-label="{escape(title)}">{grid}{feet}<text x="{WIDTH - 12}" y="{HEIGHT - 4}" text-anchor="end">{unit}'
            f"</text>{drawn}</svg></figure>")


def _path(line: Points, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    return " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line)


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 to at most most, about five."""
    power = 10.0
    while power > most:
        power /= 10
    while power * 10 <= most:
        power *= 10
    step = next(power * m for m in (0.2, 0.5, 1.0, 2.0) if most / (power * m) <= 6)
    return [round(i * step, 10) for i in range(int(most / step + 1e-9) + 1)]


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
