"""The command line of colibri-bench."""

from __future__ import annotations

from pathlib import Path

import click

from ..commands import reporting

PROBE_RUNS = 3  # of each rate, every time: so many probes stand beside a result that each may be short


class _Numbers(click.ParamType):
    """1,2,4"""

    name = "N,N…"

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        try:
            numbers = [int(part) for part in str(value).split(",")]
        except ValueError:
            numbers = []
        if not numbers or min(numbers) < self._least or max(numbers) > self._most:
            self.fail(f"{value!r} is not a list of integers in {self._least}...{self._most}, as in 1,2", param, ctx)
        return numbers


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", "folder", required=True, type=click.Path(path_type=Path), metavar="DIR")
@click.option("-p", "prefill", type=click.IntRange(0), default=256, show_default=True, help="Tokens to prefill; 0: no.")
@click.option("-n", "decode", type=click.IntRange(0), default=32, show_default=True, help="Decode steps; 0: no.")
@click.option("-d", "depths", type=_Numbers(0, 1 << 24), default="0", show_default=True, help="Context depths.")
@click.option("-t", "threads", type=_Numbers(1, 1024), help="Thread counts; default: 1 and all usable cores.")
@click.option("-b", "batches", type=_Numbers(1, 1 << 16), default="1,8,16", show_default=True,
              help="Streams to decode at once.")
@click.option("-r", "repeats", type=click.IntRange(1), default=5, show_default=True, help="Repeats; the median counts.")
@click.option("--isa", type=click.Choice(["ref", "avx2", "avx512"]), help="Instead of the best (or COLIBRI_ISA).")
@click.option("--json", "as_json", is_flag=True, help="A list of results on stdout, each with the machine's rates.")
@reporting
def bench(folder: Path, prefill: int, decode: int, depths: list[int], threads: list[int] | None, batches: list[int],
          repeats: int, isa: str | None, as_json: bool) -> None:
    """Measure prefill and decode speed of the model in DIR, each beside what this machine could do at best.

    The ceiling of a test is its roofline: the weights and KV it must read at the measured read rate, or the products
    of its active weights at the measured int8 and float rates, whichever takes longer. The rates are measured before
    and after each repeat, and the better ones count.
    """
    from functools import partial

    from .._colibri import lib
    from . import probe, report
    from .run import Bench, Case, Result

    tests = [Case("prefill", prefill, d, 1) for d in depths if prefill]
    tests += [Case("decode", decode, d, b) for d in depths for b in batches if decode]
    if not tests:
        raise click.UsageError("-p 0 and -n 0 leave nothing to measure")
    results: list[Result] = []
    for count in threads or sorted({1, lib.colibri_host_threads()}):
        with Bench(folder, count, tests, isa) as engine:
            for index, test in enumerate(tests):
                results.append(engine.run(test, repeats, partial(probe.measure, engine.isa, count, PROBE_RUNS)))
                if not as_json:
                    click.echo(f"{report.header()}\n" * (index == 0) + report.row(results[-1]))
            click.echo(report.machine(results[-len(tests):]), err=as_json)
    if as_json:
        click.echo(report.as_json(results))
