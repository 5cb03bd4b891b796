"""The dashboards' queries and the alerts' rules in a real Prometheus that scrapes a real daemon under load, and what a
scrape costs meanwhile.

    python loadtest/dashboards.py --model build/demo/smollm2-moe-q4 --seconds 120 --pictures deploy/grafana/pictures

Streams with shared and with new prompts run, some are cancelled, some requests are refused, a worker is killed. Then
each query of deploy/grafana must give numbers, and every rule of deploy/prometheus must have been evaluated. Scrapes
are timed by a client of their own, over one connection, from the request to the last byte. Needs Debian's package
prometheus. --pictures plots the panels with matplotlib: what Grafana would show, from the same queries.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import multiprocessing
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import click
import uvloop
from colibri_client import AsyncClient, errors
from overhead import daemon, processes

DEPLOY = Path(__file__).parents[1] / "deploy"
STEP = 2  # seconds, of scrapes and of what is asked
RATE_INTERVAL = "20s"
Series = dict[str, Any]  # of Prometheus' answer: "metric" and "values"


@dataclass
class Panel:
    """As in the dashboard; answers: of its queries."""

    dashboard: str
    row: str
    title: str
    kind: str
    unit: str
    legends: list[str]
    queries: list[str]
    stacked: bool
    answers: list[list[Series]] = field(default_factory=list)


def panels() -> Iterator[Panel]:
    for path in sorted((DEPLOY / "grafana").glob("*.json")):
        row = ""
        for panel in json.loads(path.read_text())["panels"]:
            if panel["type"] == "row":
                row = panel["title"]
                continue
            defaults = panel["fieldConfig"]["defaults"]
            targets = panel["targets"]
            yield Panel(path.stem, row, panel["title"], panel["type"], defaults["unit"],
                        [target["legendFormat"] for target in targets], [target["expr"] for target in targets],
                        defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal")


# ---- Prometheus ------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Prometheus:
    """instance: the scraped address."""

    def __init__(self, port: int, instance: str) -> None:
        self._url, self.instance = f"http://127.0.0.1:{port}/api/v1", instance

    def get(self, path: str, **query: object) -> Any:
        """The data of an answer. RuntimeError if it is an error."""
        url = f"{self._url}/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                body = json.load(answer)
        except urllib.error.HTTPError as e:
            raise RuntimeError(e.read().decode()) from None
        return body["data"]

    def range(self, expression: str, begin: float, end: float) -> list[Series]:
        for variable, value in (("$__rate_interval", RATE_INTERVAL), ("$instance", self.instance), ("$job", "colibri")):
            expression = expression.replace(variable, value)
        result: list[Series] = self.get("query_range", query=expression, start=begin, end=end, step=STEP)["result"]
        return result


@contextmanager
def prometheus(folder: Path, instance: str) -> Iterator[Prometheus]:
    """With the rules of deploy/prometheus, and its configuration but for the times and the target."""
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    for old, new in (("127.0.0.1:9464", instance), (": 15s", f": {STEP}s")):
        assert old in text
        text = text.replace(old, new)
    (folder / "prometheus.yml").write_text(text)
    for name in ("rules.yml", "alerts.yml"):
        shutil.copy(DEPLOY / "prometheus" / name, folder)
    port = free_port()
    process = subprocess.Popen(["prometheus", f"--config.file={folder}/prometheus.yml",
                                f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}",
                                "--log.level=warn"])  # fmt: skip
    try:
        server, deadline = Prometheus(port, instance), time.monotonic() + 60
        while not _scraped(server):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("Prometheus does not scrape the daemon")
            time.sleep(0.2)
        yield server
    finally:
        process.terminate()
        process.wait()


def _scraped(server: Prometheus) -> bool:
    with suppress(OSError):
        return any(target["health"] == "up" for target in server.get("targets")["activeTargets"])
    return False


# ---- load ------------------------------------------------------------------------------------------------------------


async def load(path: Path, supervisor: int, seconds: float, streams: int) -> None:
    """Until the time is over. In the middle a worker is killed."""
    async with AsyncClient(path) as client:
        end = time.monotonic() + seconds
        work = [stream(client, random.Random(number), end) for number in range(streams)]
        await asyncio.gather(*work, kill(supervisor, seconds / 2))


async def stream(client: AsyncClient, rng: random.Random, end: float) -> None:
    """One request after another: a third with a system prompt that others have too, some cancelled, some senseless."""
    vocab = client.model.vocab_size
    system = [3 + i * 7919 % (vocab - 3) for i in range(192)]
    while time.monotonic() < end:
        own = [rng.randrange(3, vocab) for _ in range(rng.randrange(8, 200))]
        prompt = (system if rng.random() < .34 else []) + own
        most, given_up = rng.choice((8, 24, 64, 128)), rng.random() < .1
        if rng.random() < .05:
            prompt = [vocab]
        with suppress(errors.ColibriError):
            async for _ in (generated := client.generate(prompt, max_tokens=most, ignore_eos=True)):
                if given_up and rng.random() < .2:
                    generated.cancel()
        await asyncio.sleep(rng.random() * .2)


async def kill(supervisor: int, after: float) -> None:
    await asyncio.sleep(after)
    with suppress(StopIteration, ProcessLookupError):
        pid = next(pid for role, pid in processes(supervisor).items() if role.startswith("worker"))
        await asyncio.to_thread(subprocess.run, ["kill", "-KILL", str(pid)], check=False)


def scrape(port: int, over: Event, answer: Connection) -> None:
    """Asks ten times a second, as Prometheus does but more often, and sends what each answer took, in seconds, and the
    largest one's bytes. In a process of its own: it must not wait for the load's interpreter."""
    seconds, most = [], 0
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    while not over.wait(0.1):
        begin = time.perf_counter()
        connection.request("GET", "/metrics", headers={"Accept-Encoding": "gzip"})
        most = max(most, len(connection.getresponse().read()))
        seconds.append(time.perf_counter() - begin)
    answer.send((seconds, most))


@contextmanager
def scraping(port: int, report: dict[str, Any]) -> Iterator[None]:
    """Within it /metrics is asked for; afterwards the report says how long that took."""
    context = multiprocessing.get_context("spawn")
    over, (ours, theirs) = context.Event(), context.Pipe()
    process = context.Process(target=scrape, args=(port, over, theirs))
    process.start()
    try:
        yield
    finally:
        over.set()
        seconds, most = ours.recv() if ours.poll(30) else ([0.0], 0)
        process.join()
        took = sorted(1000 * second for second in seconds)
        report["scrape"] = {"scrapes": len(took), "median_ms": round(statistics.median(took), 2),
                            "p99_ms": round(took[math.ceil(.99 * len(took)) - 1], 2), "max_ms": round(took[-1], 2),
                            "bytes": most}  # fmt: skip


# ---- report ----------------------------------------------------------------------------------------------------------


def ask(server: Prometheus, begin: float, end: float) -> tuple[list[Panel], dict[str, Any]]:
    """All panels with their answers; what is wrong with them or with a rule."""
    found, failed, empty = list(panels()), [], []
    for panel in found:
        for query in panel.queries:
            try:
                panel.answers.append(server.range(query, begin, end))
            except RuntimeError as e:
                failed.append(f"{panel.dashboard}: {panel.title}: {e}")
                continue
            numbers = [float(value) for series in panel.answers[-1] for _, value in series["values"]]
            if not any(math.isfinite(number) for number in numbers):
                empty.append(f"{panel.dashboard}: {panel.title}: {query}")
    groups = server.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    failed += [f"{rule['name']}: {rule.get('lastError')}" for rule in rules if rule["health"] != "ok"]
    return found, {"panels": len(found), "queries": sum(len(panel.queries) for panel in found), "rules": len(rules),
                   "failed": failed, "empty": empty,
                   "firing": sorted({rule["name"] for rule in rules if rule.get("state") == "firing"})}


@click.command(help=__doc__.splitlines()[0])
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--seconds", type=float, default=60, show_default=True, help="Of load.")
@click.option("--workers", type=int, default=2, show_default=True)
@click.option("--streams", type=int, default=24, show_default=True)
@click.option("--pictures", type=click.Path(path_type=Path), help="Folder for PNG files.")
def main(model: Path, seconds: float, workers: int, streams: int, pictures: Path | None) -> None:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="colibri-") as name, \
            daemon(model, Path(name), workers, 1, metrics=f"127.0.0.1:{port}", max_seqs=8) as (path, supervisor), \
            prometheus(Path(name), f"127.0.0.1:{port}") as server:
        begin, report = time.time(), dict[str, Any]()
        with scraping(port, report):
            uvloop.run(load(path, supervisor, seconds, streams))
        time.sleep(2 * STEP)  # for the last scrape and the rules after it
        found, asked = ask(server, begin, time.time())
        report |= asked
    print(json.dumps(report, indent=1))
    if pictures:
        from pictures import plot  # only here: it needs matplotlib

        plot(found, pictures)
    sys.exit(bool(report["failed"] or report["empty"]))


if __name__ == "__main__":
    main()
