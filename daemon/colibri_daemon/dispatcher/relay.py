"""From a worker's rows to frames in the clients' output: the hot path. One call per STEP, one short path per row.

A stream's short path is open (``plain``) while its row needs nothing but a TOKENS frame: the first one was sent,
nothing waits for credit, no usage is wanted, its client is there and it is no suspect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from colibri_protocol.codec import tokens_frame
from colibri_protocol.limits import SCORES_FRAME
from colibri_protocol.messages import Scores, Usage

from .stats import Stats
from .streams import TOKEN, Match, Stream
from .workers import Worker

FRAME_SPARE = 512  # bytes of a frame for everything but its arrays
TOKENS_MOST = 1024  # in one frame
PROBABILITIES = {"lp", "top", "toplp"}  # keys of a row that needs nothing more


class Ends(Protocol):
    """Who is told what a row means for the request."""

    def last_row(self, stream: Stream, finish: str, match: Match, error: tuple[int, str] | None) -> None: ...

    def prefilled(self, stream: Stream) -> None: ...

    def tried(self, stream: Stream) -> None: ...

    def starve(self, stream: Stream) -> None: ...


class Relay:
    def __init__(self, ends: Ends, clock: Callable[[], float], stats: Stats) -> None:
        self._ends, self._clock, self._stats = ends, clock, stats
        self._waited = stats.between_tokens.observe

    def step(self, worker: Worker, number: int, rows: list[Any]) -> None:
        """Rows as in ipc.py. Those of unknown keys are dropped."""
        now, running, frame_of, relayed, frames = self._clock(), worker.running, tokens_frame, 0, 0
        since, alike = now, 0  # rows of one step have mostly waited for the same time: observed together
        for key, ids, details in rows:
            stream = running.get(key)
            if stream is None:
                continue
            count = len(ids) >> 2
            relayed += count
            if stream.plain and 0 < count <= stream.credit and (details is None or details.keys() <= PROBABILITIES):
                index = stream.sent
                channel = stream.session.channel  # type: ignore[union-attr]
                if details is None:
                    channel.out.append(frame_of(stream.id, ids, index, number))
                else:
                    channel.out.append(frame_of(stream.id, ids, index, number, logprobs=details["lp"],
                                                top_ids=details.get("top"), top_logprobs=details.get("toplp")))
                if not channel.marked:
                    channel.mark()
                stream.tokens += ids
                stream.sent = index + count
                stream.credit -= count
                frames += 1
                if stream.last_at == since:
                    alike += 1
                else:
                    if alike:
                        self._waited(now - since, alike)
                    since, alike = stream.last_at, 1
                stream.last_at = now
            else:
                self._row(stream, ids, details or {}, number, now)
        if alike:
            self._waited(now - since, alike)
        self._stats.tokens.add(relayed)
        self._stats.token_frames.add(frames)

    def _row(self, stream: Stream, ids: bytes, details: dict[str, Any], step: int, now: float) -> None:
        """The long way."""
        if not stream.first_at:  # what a later attempt finds was mostly left there by this one
            stream.cached = min(details.get("cached", stream.cached), stream.prompt)
        if ids and stream.promised:
            self._ends.prefilled(stream)
        if ids:
            self._observe(stream, now)
        if not stream.first_at and (ids or "scores" in details):
            stream.first_at = now
        stream.last_at, stream.step = now, step
        if "scores" in details:
            self._scores(stream, *details["scores"])
        stream.tokens += ids
        if stream.held is not None and ids:
            stream.held.put(details["lp"], details.get("top") or b"", details.get("toplp") or b"")
        if stream.struck_at is not None:
            self._ends.tried(stream)
        self.release(stream)
        if "finish" in details:
            stream.generated = details.get("generated", 0)
            self._ends.last_row(stream, details["finish"], details.get("match"), details.get("error"))

    def _observe(self, stream: Stream, now: float) -> None:
        """Tokens have come."""
        if stream.first_at:
            self._waited(now - stream.last_at)
        else:
            self._stats.first_token.observe(now - stream.arrived)

    def release(self, stream: Stream) -> None:
        """Sends what is there and credit allows."""
        if stream.session is None:
            stream.sent += stream.pending
            return
        most = _most(stream, stream.session.max_frame)
        while (count := min(stream.pending, stream.credit, most)) > 0:
            stream.session.channel.write(self._tokens(stream, count))
            self._stats.token_frames.add(1)
        if stream.pending and not stream.credit:
            self._ends.starve(stream)
        stream.plain = (not stream.pending and stream.sent > stream.base and not stream.echo_usage
                        and stream.struck_at is None)  # fmt: skip

    def _tokens(self, stream: Stream, count: int) -> bytes:
        """The TOKENS frame of the next count tokens, which then count as sent."""
        index, after = stream.sent, stream.sent + count
        rare: dict[str, Any] = {} if stream.held is None else dict(stream.held.take(count))
        if index == stream.base:
            rare["cached_tokens"] = stream.cached
            rare["generation"] = stream.origin.number
        if stream.echo_usage:
            rare["usage"] = Usage(prompt=stream.prompt, cached=stream.cached, generated=after).to_body()
        stream.sent = after
        stream.credit -= count
        ids = bytes(stream.tokens[TOKEN * index : TOKEN * after])
        return tokens_frame(stream.id, ids, index, stream.step, **rare)

    def _scores(self, stream: Stream, index: int, logprobs: bytes, top: bytes | None,
                top_logprobs: bytes | None) -> None:
        """Sends the scores from position index on, but for those that an earlier worker had delivered."""
        count = len(logprobs) // TOKEN
        width = len(top or b"") // max(1, count)  # bytes of a position in top
        frame = SCORES_FRAME if stream.session is None else min(SCORES_FRAME, stream.session.max_frame)
        most = max(1, (frame - FRAME_SPARE) // (TOKEN + 2 * width))
        for at in range(max(0, stream.scored - index), count, most):
            end = min(count, at + most)
            if stream.session is not None:
                stream.session.send(Scores(
                    index=index + at, logprobs=logprobs[TOKEN * at : TOKEN * end],
                    top_ids=top[width * at : width * end] if top else None,
                    top_logprobs=top_logprobs[width * at : width * end] if top_logprobs else None,
                ), stream.id)  # fmt: skip
            stream.scored = index + end


def _most(stream: Stream, max_frame: int) -> int:
    """Tokens that fit into one frame."""
    width = TOKEN if stream.held is None else 2 * TOKEN * (1 + (stream.job.logprobs or 0))
    return max(1, min(TOKENS_MOST, (max_frame - FRAME_SPARE) // width))
