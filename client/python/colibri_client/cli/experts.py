"""The heat map of colibri-client stats --experts: which experts of which layer the router gives tokens to."""

from __future__ import annotations

import time

import click
from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.text import Text

from ..sync import Client
from .output import dump

COLD, HOT = (40, 44, 60), (255, 140, 40)  # red, green, blue
FULL_HEAT = 2.0  # times the mean of the layer, from which on a cell is as hot as can be
SHADES = " ·░▒▓█"  # where there are no colours
MARGIN = 35  # columns beside the cells
PATIENCE = 10.0  # seconds for an answer

Grid = list[list[int]]  # tokens of each expert, layer by layer


def show(client: Client, seconds: float, as_json: bool) -> None:
    """seconds: of which tokens are counted; 0: all since the service started."""
    grid = taken(client)
    if seconds:
        time.sleep(seconds)
        grid = [[now - then for now, then in zip(*layers, strict=True)]
                for layers in zip(taken(client), grid, strict=True)]
    if as_json:
        return dump({"layers": len(grid), "experts": len(grid[0]), "tokens": grid})
    console = Console(highlight=False)
    console.print(heat_map(grid, console.width, console.color_system is not None))


def taken(client: Client) -> Grid:
    """ClickException if the daemon does not count them."""
    reply = client.stats(experts=True, timeout=PATIENCE)
    if not reply.experts:
        raise click.ClickException("the daemon does not count the tokens of this model's experts")
    counts = memoryview(reply.expert_tokens).cast("Q").tolist()
    return [counts[at : at + reply.experts] for at in range(0, len(counts), reply.experts)]


def heat_map(grid: Grid, width: int, colours: bool) -> RenderableType:
    """A line for each layer, with its busiest expert. width: of the terminal."""
    wide = len(grid[0])
    cell = max(1, min(3, (width - MARGIN) // wide))
    head = f"layer  {f'experts 0 … {wide - 1}'[: wide * cell]:<{wide * cell}}  busiest          over mean"
    worst = max(map(imbalance, grid))
    total = f"{sum(map(sum, grid))} tokens routed; worst layer {worst:.2f}; a cell is hottest at {FULL_HEAT:g} × mean"
    lines = [_line(number, counts, cell, colours) for number, counts in enumerate(grid)]
    return Group(Text(head, "bright_black", no_wrap=True), *lines, Text(total, "bright_black"))


def imbalance(counts: list[int]) -> float:
    """Busiest over mean; 0 without tokens."""
    return max(counts) * len(counts) / sum(counts) if any(counts) else 0.0


def _line(number: int, counts: list[int], cell: int, colours: bool) -> Text:
    line, total = Text(f"{number:>5}  ", no_wrap=True), sum(counts)
    for count in counts:
        heat = min(1.0, count * len(counts) / total / FULL_HEAT) if total else 0.0
        shade = " " if colours else SHADES[round(heat * (len(SHADES) - 1))]
        line.append(shade * cell, Style(bgcolor=_colour(heat)) if colours else None)
    busiest = max(range(len(counts)), key=counts.__getitem__)
    share = f"{busiest} ({counts[busiest] / total:.1%})" if total else "none"
    return line.append(f"  {share:<16} {imbalance(counts):>9.2f}")


def _colour(heat: float) -> str:
    red, green, blue = (round(cold + heat * (hot - cold)) for cold, hot in zip(COLD, HOT, strict=True))
    return f"rgb({red},{green},{blue})"
