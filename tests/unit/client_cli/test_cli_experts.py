"""colibri-client stats --experts."""

from __future__ import annotations

import io
from array import array
from dataclasses import replace

import pytest
from colibri_client.cli.experts import FULL_HEAT, Grid, heat_map, imbalance
from fixtures.command import Cli
from fixtures.little_daemon import STATS, LittleDaemon
from rich.console import Console

GRID: Grid = [[10, 10, 10, 10], [40, 0, 0, 0], [0, 0, 0, 0]]


def reply(grid: Grid) -> object:
    counts = array("Q", [count for layer in grid for count in layer])
    return replace(STATS, experts=len(grid[0]), expert_tokens=counts.tobytes())


def drawn(grid: Grid, width: int = 100, colours: bool = False) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, color_system="truecolor" if colours else None, force_terminal=colours).print(
        heat_map(grid, width, colours))
    return out.getvalue().splitlines()


def test_a_line_for_each_layer(cli: Cli, daemon: LittleDaemon) -> None:
    daemon.stats = [reply(GRID)]
    outcome = cli("stats", "--experts")
    assert outcome.code == 0
    head, even, one, none, total = outcome.out.splitlines()
    assert "experts 0 … 3"[:12] in head
    assert even.split()[-3:] == ["0", "(25.0%)", "1.00"]
    assert one.split()[-3:] == ["0", "(100.0%)", "4.00"]
    assert none.split()[-2:] == ["none", "0.00"]
    assert total.startswith("80 tokens routed; worst layer 4.00")


def test_for_machines(cli: Cli, daemon: LittleDaemon) -> None:
    daemon.stats = [reply(GRID)]
    assert cli("stats", "--experts", "--json").json == {"layers": 3, "experts": 4, "tokens": GRID}


def test_only_what_comes_next(cli: Cli, daemon: LittleDaemon) -> None:
    daemon.stats = [reply(GRID), reply([[11, 10, 10, 17], *GRID[1:]])]
    assert cli("stats", "--experts", "--seconds", 0.01, "--json").json["tokens"] == [[1, 0, 0, 7], [0] * 4, [0] * 4]


def test_a_daemon_that_does_not_count(cli: Cli) -> None:
    outcome = cli("stats", "--experts")
    assert outcome.code == 1
    assert "does not count" in outcome.err


@pytest.mark.parametrize("colours", [False, True])
def test_hotter_is_brighter(colours: bool) -> None:
    cold, warm, hot = (drawn([[1, 1, count, 2 * int(FULL_HEAT)]], colours=colours)[1] for count in (0, 3, 20))
    assert len({cold, warm, hot}) == 3
    assert ("█" in hot) != colours
    assert ("\x1b[48;2;255;140;40m" in hot) == colours


@pytest.mark.parametrize(("experts", "width"), [(8, 100), (8, 60), (256, 300), (1, 80)])
def test_it_fits_the_terminal_if_that_is_possible(experts: int, width: int) -> None:
    lines = drawn([list(range(experts))] * 3, width)
    assert len(lines) == 5 + (width < 66)  # the last one is wrapped
    assert max(map(len, lines)) <= width


def test_imbalance() -> None:
    assert [imbalance(layer) for layer in GRID] == [1.0, 4.0, 0.0]
