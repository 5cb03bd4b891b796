"""Faults under load: processes are killed, stopped or reloaded while streams run, and nothing may be lost.

    python loadtest/faults.py kill-workers --model build/soak/tiny-q4 --count 200 --streams 32
    python loadtest/faults.py soak --model build/soak/tiny-q4 --requests 20000

Every request is one of a few whose only right answer was found before the first fault, in the same daemon at rest. Each
output is compared with it token for token, log probabilities and usage included; outputs that the client cancels, with
its beginning. At the end nothing may be held: KV slabs, descriptors, threads, memory; all that was started must have
ended. The exit code is 1 if anything was lost, wrong or left.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import uvloop
from colibri_client import AsyncClient, errors
from overhead import BIN, processes
from subject import Daemon, resources

SETTLE_SECONDS = 30.0  # for everything to be back when the load has ended
RECONNECT_SECONDS = 30.0
PROBATION_SECONDS = 4.0  # ample for those who were in a step that failed to be cleared, one after the other


@dataclass(frozen=True)
class Ask:
    prompt: list[int]
    options: dict[str, Any]


@dataclass
class Run:
    """Counts are of requests. gaps: seconds from each fault to the next token of who waited longest. noticed, free:
    from each death of a worker with live streams until they moved, and its slabs were free. struck: wall times."""

    done: int = 0
    aborted: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    faults: int = 0
    hits: int = 0  # faults that struck a process with live streams
    gaps: list[float] = field(default_factory=list)
    noticed: list[float] = field(default_factory=list)
    free: list[float] = field(default_factory=list)
    struck: list[float] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)  # what is not as it must be at the end

    @property
    def clean(self) -> bool:
        return not self.failed and not self.wrong and not self.findings


# ---- the load ------------------------------------------------------------------------------------------------------


def make_asks(rng: random.Random, vocab: int, kinds: int, tokens: int) -> list[Ask]:
    """Prompts with and without a common beginning; greedy and seeded, with log probabilities, with stop sequences."""
    common = [rng.randrange(3, vocab) for _ in range(100)]
    made = []
    for kind in range(kinds):
        own = [rng.randrange(3, vocab) for _ in range(rng.randrange(4, 200))]
        options: dict[str, Any] = {"max_tokens": tokens + rng.randrange(50), "ignore_eos": True}
        if kind % 2:
            options |= {"temperature": 0.9, "seed": kind}
        if kind % 5 == 1:
            options |= {"logprobs": 1}
        if kind % 7 == 2:
            options |= {"stop_seqs": [[rng.randrange(3, vocab) for _ in range(3)]]}
        made.append(Ask((common if kind % 3 else []) + own, options))
    return made


class Load:
    """Streams without end until stop(). answers: by model id, for each ask."""

    def __init__(self, client: AsyncClient, asks: list[Ask], aborts: float, run: Run) -> None:
        self._client, self._asks, self._aborts, self._run = client, asks, aborts, run
        self.answers: dict[str, list[Any]] = {}
        self.latest: dict[int, float] = {}  # by stream: when its last token came
        self._left: float = float("inf")

    async def learn(self) -> None:
        """The right answers of the model that is served now."""
        found = [await self._client.complete(ask.prompt, **ask.options) for ask in self._asks]
        self.answers[found[0].receipt.model_id] = found

    def stop(self, after: float = 0) -> None:
        """No new requests after so many more."""
        self._left = after

    async def stream(self, number: int) -> None:
        rng = random.Random(number)
        while self._left > 0:
            self._left -= 1
            index = rng.randrange(len(self._asks))
            abort_at = rng.randrange(1, self._asks[index].options["max_tokens"]) if rng.random() < self._aborts else 0
            try:
                await self._one(number, index, abort_at)
            except errors.ColibriError as e:
                self._run.failed[getattr(e, "name", type(e).__name__)] += 1
                self._run.findings.append(f"request failed: {e}")
        self.latest.pop(number, None)

    async def _one(self, number: int, index: int, abort_at: int) -> None:
        ask = self._asks[index]
        stream = self._client.generate(ask.prompt, **ask.options)
        self.latest[number] = time.monotonic()
        count = 0
        async for _ in stream:
            self.latest[number] = time.monotonic()
            count += 1
            if count == abort_at:
                stream.cancel()
        self._judge(index, stream.result, bool(abort_at) and count >= abort_at)

    def _judge(self, index: int, result: Any, cancelled: bool) -> None:
        run = self._run
        candidates = [a[index] for model, a in self.answers.items()
                      if result.receipt is None or result.receipt.model_id == model]  # fmt: skip
        if cancelled and result.finish_reason == "abort":
            run.aborted += 1
            right = any(a.tokens[: len(result.tokens)] == result.tokens for a in candidates)
        else:
            run.done += 1
            right = any(_same(a, result) for a in candidates)
        if not right:
            run.wrong += 1
            run.findings.append(f"request {index} of {result.receipt}: another output than at rest")


def _same(right: Any, found: Any) -> bool:
    """Bit for bit, and the accounts."""
    return (
        right.tokens == found.tokens
        and [getattr(t, "logprob", None) for t in right.tokens] == [getattr(t, "logprob", None) for t in found.tokens]
        and (right.finish_reason, right.stop_match) == (found.finish_reason, found.stop_match)
        and (right.usage.prompt, right.usage.generated) == (found.usage.prompt, found.usage.generated)
    )


# ---- faults --------------------------------------------------------------------------------------------------------


class Scene:
    """What a fault can see and do."""

    def __init__(self, daemon: Daemon, client: AsyncClient, load: Load, run: Run, models: list[Path],
                 rng: random.Random) -> None:
        self.daemon, self.client, self.load, self.run, self.models, self.rng = daemon, client, load, run, models, rng

    def pid(self, role: str) -> int:
        return next((pid for title, pid in processes(self.daemon.pid).items() if title.startswith(role)), 0)

    async def ready(self) -> None:
        await self._until(lambda health: health.state == "ready")

    async def _until(self, wanted: Callable[[Any], bool]) -> None:
        while not wanted(await self.client.health()):
            await asyncio.sleep(0.01)

    async def kill_worker(self, number: signal.Signals) -> None:
        """A random one, at a random moment; back when all are up again."""
        await asyncio.sleep(self.rng.random() * 0.3)
        health = await self.client.health()
        victim = self.rng.choice([w for w in health.workers if w.up] or list(health.workers))
        if not victim.up or not victim.pid:
            return
        running = {int(w["pid"]): w["running"] for w in (await self.client.stats()).workers}
        self.strike(victim.pid, number, bool(running.get(victim.pid)))
        await self.await_tokens()
        await self._until(lambda h: any(w.slot == victim.slot and w.up and w.pid != victim.pid for w in h.workers))

    async def kill(self, role: str) -> None:
        await asyncio.sleep(self.rng.random() * 0.3)
        if pid := self.pid(role):
            self.strike(pid, signal.SIGKILL, bool(self.load.latest))
            await self.await_tokens()
            while self.pid(role) in (0, pid):
                await asyncio.sleep(0.01)
            await self.ready()

    async def reload(self, **changes: Any) -> None:
        before = len(self.daemon.lines(msg="reload done"))
        self.daemon.configure(**changes)
        self.strike(self.daemon.pid, signal.SIGHUP, bool(self.load.latest))
        while len(self.daemon.lines(msg="reload done")) == before:
            if failed := self.daemon.lines(msg="reload failed, nothing was changed"):
                self.run.findings.append(f"reload failed: {failed[-1]}")
                return
            await asyncio.sleep(0.02)

    def strike(self, pid: int, number: signal.Signals, live: bool) -> None:
        self.run.faults += 1
        self.run.hits += live
        self._struck = time.monotonic()
        self.run.struck += [time.time()] if number != signal.SIGHUP else []
        os.kill(pid, number)

    async def await_tokens(self) -> None:
        """Until every stream that was live has had a token since the fault, or ended; how long that took."""
        waiting = {number for number, at in self.load.latest.items() if at < self._struck}
        worst = 0.0
        while waiting:
            for number in list(waiting):
                at = self.load.latest.get(number)
                if at is None or at > self._struck:
                    waiting.discard(number)
                    worst = max(worst, (at or self._struck) - self._struck)
            await asyncio.sleep(0.002)
        self.run.gaps.append(worst)


async def _soak(scene: Scene) -> None:
    """A kill of something every now and then, workers most often."""
    await asyncio.sleep(1 + scene.rng.random() * 3)
    role = scene.rng.choice(["worker", "worker", "worker", "kvpool", "dispatcher"])
    if role == "worker":
        await scene.kill_worker(signal.SIGKILL)
    else:
        await scene.kill(role)


async def _fault(scene: Scene) -> None:
    """Not so soon after the last one that a request is struck twice while it is under suspicion: that is POISONED."""
    await asyncio.sleep(PROBATION_SECONDS)
    await scene.kill_worker(signal.SIGSEGV)


async def _reload_any(scene: Scene) -> None:
    """Nothing changed, other numbers, another model: in turn."""
    turn = scene.run.faults % 4
    if turn == 3 and len(scene.models) > 1:
        await scene.reload(model=scene.models[scene.run.faults // 4 % 2])
    else:
        await scene.reload(max_seqs=(32, 24, 32)[turn % 3], workers=(2, 3, 2)[turn % 3])


SCENARIOS: dict[str, Callable[[Scene], Awaitable[None]]] = {
    "kill-workers": lambda scene: scene.kill_worker(signal.SIGKILL),
    "segv-workers": _fault,
    "hang-workers": lambda scene: scene.kill_worker(signal.SIGSTOP),
    "kill-pool": lambda scene: scene.kill("kvpool"),
    "kill-dispatcher": lambda scene: scene.kill("dispatcher"),
    "reload": _reload_any,
    "soak": _soak,
}


# ---- the whole -----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def connected(daemon: Daemon) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(daemon.socket, reconnect=RECONNECT_SECONDS) as client:
        yield client


async def drive(daemon: Daemon, scenario: str, plan: dict[str, Any], models: list[Path]) -> Run:
    run, rng = Run(), random.Random(plan["seed"])
    async with connected(daemon) as client:
        asks = make_asks(rng, client.model.vocab_size, plan["kinds"], plan["tokens"])
        load = Load(client, asks, plan["aborts"], run)
        scene = Scene(daemon, client, load, run, models, rng)
        await scene.ready()
        await load.learn()
        if scenario == "reload":
            for model in reversed(models):
                await scene.reload(model=model)
                await load.learn()
        run.faults = run.hits = 0
        before = resources(daemon)
        if plan["requests"]:
            load.stop(after=plan["requests"])
        streams = [asyncio.create_task(load.stream(number)) for number in range(plan["streams"])]
        until = time.monotonic() + (plan["seconds"] or float("inf"))
        while run.faults < plan["count"] and time.monotonic() < until and not all(s.done() for s in streams):
            await SCENARIOS[scenario](scene)
        if not plan["requests"] or time.monotonic() >= until:
            load.stop()
        await asyncio.gather(*streams)
        await settle(daemon, scene, before, run)
        run.noticed = delays(run, daemon, "worker lost, its requests move")
        run.free = delays(run, daemon, "a dead worker's leases are free")
    return run


def delays(run: Run, daemon: Daemon, msg: str) -> list[float]:
    """From each death to this line of the log, if it comes before the next death. The log has whole milliseconds."""
    told = [datetime.fromisoformat(line["ts"]).timestamp() for line in daemon.lines(msg=msg)]
    spans = zip(run.struck, [*run.struck[1:], float("inf")], strict=False)
    found = [[at - begin for at in told if begin - 0.001 < at < end] for begin, end in spans]
    return [max(0.0, first[0]) for first in found if first]


async def settle(daemon: Daemon, scene: Scene, before: dict[str, dict[str, int]], run: Run) -> None:
    """Looks until everything is back, and notes what is not."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        await scene.ready()
        findings = _leftovers(await scene.client.stats(), before, resources(daemon))
        if not findings or time.monotonic() > deadline:
            run.findings += findings
            return
        await asyncio.sleep(0.2)


def _leftovers(stats: Any, before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]) -> list[str]:
    found = []
    slabs, counts = stats.kv_slabs, stats.counters
    if slabs["live"] or slabs["free"] + slabs["cached"] + slabs["quarantined"] != slabs["total"]:
        found.append(f"KV slabs: {slabs}")
    ended = sum(value for name, value in counts.items() if name.startswith("request_success_total"))
    if counts["requests_started_total"] != ended:
        found.append(f"{counts['requests_started_total']} requests were started, {ended} have ended")
    if before.keys() != after.keys():
        found.append(f"processes: {sorted(before)} before, {sorted(after)} after")
    for role in before.keys() & after.keys():
        for what, more in (("fds", 0), ("threads", 0), ("anon_kib", 8192)):
            if after[role][what] > before[role][what] + more:
                found.append(f"{role} has {after[role][what]} {what}, {before[role][what]} before")
    return found


def _spread(seconds: list[float]) -> str:
    ordered = [1000 * value for value in sorted(seconds)] or [float("nan")]
    p99 = ordered[len(ordered) * 99 // 100]
    return f"median {statistics.median(ordered):.1f} ms, p99 {p99:.1f} ms, worst {ordered[-1]:.1f} ms of {len(ordered)}"


def show(scenario: str, run: Run, seconds: float) -> str:
    return "\n".join([
        f"{scenario}: {run.done} requests done, {run.aborted} cancelled, {sum(run.failed.values())} failed "
        f"{dict(run.failed) or ''}, {run.wrong} wrong in {seconds:.0f} s",
        f"  {run.faults} faults, {run.hits} of them struck live streams; from a fault to the next token of the stream "
        f"that waited longest: {_spread(run.gaps)}",
        f"  from a death to its streams' move: {_spread(run.noticed)}",
        f"  from a death to the end of its leases: {_spread(run.free)}",
        *(f"  NOT CLEAN: {finding}" for finding in run.findings[:20]),
    ])  # fmt: skip


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("scenario", type=click.Choice(list(SCENARIOS)))
@click.option("--model", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--other-model", type=click.Path(exists=True, path_type=Path), help="For reload: switched to and from.")
@click.option("--count", type=click.IntRange(0), default=20, help="Faults.")
@click.option("--requests", type=click.IntRange(0), default=0, help="0: until the faults are done.")
@click.option("--seconds", type=float, default=0.0, help="At most; 0: no limit.")
@click.option("--streams", type=click.IntRange(1), default=32, help="At once.")
@click.option("--tokens", type=click.IntRange(1), default=300, help="At least, of each request.")
@click.option("--kinds", type=click.IntRange(1), default=16, help="Different requests.")
@click.option("--aborts", type=click.FloatRange(0, 1), default=0.0, help="Share of requests that the client cancels.")
@click.option("--workers", type=click.IntRange(1), default=2)
@click.option("--seed", type=int, default=0)
@click.option("--json", "as_json", is_flag=True)
def main(scenario: str, model: Path, other_model: Path | None, workers: int, as_json: bool, **plan: Any) -> None:
    """Run SCENARIO against a daemon of its own."""
    models = [path.resolve() for path in (model, other_model) if path is not None]
    with tempfile.TemporaryDirectory(prefix="colibri-") as name:
        daemon = Daemon(Path(name), {"model": models[0], "workers": workers, "threads": 1, "hang_seconds": 2,
                                     "trusted_uids": [os.getuid()]})
        try:
            subprocess.run([BIN / "colibri-client", "--socket", daemon.socket, "health", "--wait", "60"], check=True,
                           stdout=subprocess.DEVNULL)
            begin = time.monotonic()
            run = uvloop.run(drive(daemon, scenario, plan, models))
            seconds = time.monotonic() - begin
            if (code := daemon.stop()) != 0:
                run.findings.append(f"the daemon ended with {code}")
        except BaseException:
            daemon.kill()
            sys.stderr.write(daemon.log.read_text()[-8000:])
            raise
    report = {"scenario": scenario, "seconds": seconds, "done": run.done, "aborted": run.aborted, "wrong": run.wrong,
              "failed": dict(run.failed), "faults": run.faults, "hits": run.hits, "findings": run.findings}
    report |= {f"{name}_ms": [round(1000 * s, 1) for s in getattr(run, name)] for name in ("gaps", "noticed", "free")}
    click.echo(json.dumps(report) if as_json else show(scenario, run, seconds))
    sys.exit(0 if run.clean else 1)


if __name__ == "__main__":
    main()
