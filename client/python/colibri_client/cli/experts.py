"""The heat map of colibri-client stats --experts: which experts of which layer the router gives tokens to."""

from __future__ import annotations

import click
from colibri_protocol.messages import StatsReply
from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.text import Text

COLD, HOT = (40, 44, 60), (255, 140, 40)
FULL_HEAT = 2.0  # times the mean of the layer, from which on a cell is as hot as can be
SHADES = " ·░▒▓█"  # where there are no colours


def grid(reply: StatsReply) -> list[list[int]]:
    """Tokens of each expert, layer by layer. ClickException if the daemon does not count them."""
    width, data = reply.experts, reply.expert_tokens
    if not width:
        raise click.ClickException("the daemon does not count the tokens of this model's experts")
    counts = list(memoryview(data).cast("Q"))
    return [counts[at : at + width] for at in range(0, len(counts), width)]


def shown(layers: list[list[int]], console: Console) -> RenderableType:
    """A line for each layer, hottest expert and imbalance at its end."""
    wide = len(layers[0]) if layers else 0
    cell = max(1, min(3, (console.width - 40) // max(1, wide)))
    lines = [Text(f"{'layer':>5}  {'experts 0 … ' + str(wide - 1):<{wide * cell}}  busiest        over mean",
                  style="bright_black")]
    lines += [_line(number, counts, cell, console) for number, counts in enumerate(layers)]
    total = sum(map(sum, layers))
    worst = max((imbalance(counts) for counts in layers), default=0.0)
    lines.append(Text(f"{total} tokens routed in {len(layers)} layers; worst layer {worst:.2f} times the mean; a cell is "
                      f"brightest at {FULL_HEAT:g} times", style="bright_black"))
    return Group(*lines)


def imbalance(counts: list[int]) -> float:
    """Busiest over mean; 0 without tokens."""
    return max(counts) * len(counts) / sum(counts) if any(counts) else 0.0


def _line(number: int, counts: list[int], cell: int, console: Console) -> Text:
    line, mean = Text(f"{number:>5}  "), sum(counts) / len(counts)
    for count in counts:
        heat = min(1.0, count / mean / FULL_HEAT) if mean else 0.0
        if console.color_system is None:
            line.append(SHADES[round(heat * (len(SHADES) - 1))] * cell)
        else:
            line.append(" " * cell, Style(bgcolor=_colour(heat)))
    busiest = max(range(len(counts)), key=counts.__getitem__)
    share = counts[busiest] / sum(counts) if any(counts) else 0.0
    return line.append(f"  {f'{busiest} ({share:.1%})':<14} {imbalance(counts):>9.2f}")


def _colour(heat: float) -> str:
    red, green, blue = (round(cold + heat * (hot - cold)) for cold, hot in zip(COLD, HOT, strict=True))
    return f"rgb({red},{green},{blue})"
