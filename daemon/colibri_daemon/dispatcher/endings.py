"""What is said when a request ends: the errors of this process, the ERROR message, the line in the log."""

from __future__ import annotations

from dataclasses import replace

from colibri_protocol.codec import error_message
from colibri_protocol.errors import Code, InvalidMessage
from colibri_protocol.messages import Error, Times, Usage

from ..common import log
from .admission import Refused
from .streams import Stream

_log = log.get("requests")


def draining() -> Refused:
    return Refused(Code.DRAINING, "the daemon is stopping; send it to another instance", "draining")


def kv_exhausted(retry_after_ms: int) -> Refused:
    return Refused(Code.KV_EXHAUSTED, "no KV slab is left and no other request can give way; try again later or raise "
                   "kv_bytes", "kv_exhausted", retry_after_ms)


def waited_too_long(seconds: float, loaded: bool, place: bool, retry_after_ms: int) -> Refused:
    """Of a request that no worker took in time. loaded: a worker is there; place: it would have had one for it."""
    if place:
        return Refused(Code.KV_EXHAUSTED, f"no KV slabs for it were free within {seconds:g} s", "kv_exhausted",
                       retry_after_ms)
    if loaded:
        return Refused(Code.QUEUE_FULL, f"no worker was free within {seconds:g} s", "queue_full", retry_after_ms)
    return Refused(Code.NOT_READY, f"no worker was ready within {seconds:g} s", "not_ready", retry_after_ms)


def nobody_took_over(cause: str) -> InvalidMessage:
    """Within the deadline of a request whose worker had died of this."""
    code, what = (Code.WORKER_HUNG, "hung") if cause == "hang" else (Code.WORKER_LOST, "was lost")
    return InvalidMessage(code, f"its worker {what}, and no other could take the request over within its deadline")


def generation_gone() -> InvalidMessage:
    return InvalidMessage(Code.WORKER_LOST, "another configuration is served now, and no worker of the one that this "
                          "request began with can work any more")


def no_answer() -> InvalidMessage:
    return InvalidMessage(Code.WORKER_HUNG, "its worker does not answer, and its deadline has passed")


def poisoned(seconds: float = 0.0) -> Refused:
    """seconds: for which it is refused yet; 0: it has just been proven."""
    return Refused(Code.POISONED, f"this request has ended two workers; it is refused for {seconds:.0f} s more"
                   if seconds else "the request ended two workers, the second one while it was alone there", "poisoned")


def failure(stream: Stream, error: InvalidMessage, usage: Usage) -> Error:
    """The ERROR that ends a stream that was live."""
    sent = stream.sent - stream.base
    message = error_message(error, sent, getattr(error, "retry_after_ms", None))
    return replace(message, usage=usage) if stream.attempt else message


def log_end(stream: Stream, finish: str, error: InvalidMessage | None, usage: Usage, times: Times) -> None:
    """One line per request, without its tokens."""
    optional = {"code": error and error.code.name, "tenant": stream.owner[1], "trace": stream.job.trace,
                "request_id": stream.job.request_id}  # fmt: skip
    _log.info("request ended", id=stream.id, key=stream.key, connection=stream.connection, uid=stream.owner[0],
              prompt=usage.prompt, cached=usage.cached, generated=usage.generated, finish=finish, queue_ms=times.queue,
              prefill_ms=times.prefill, decode_ms=times.decode, worker=stream.slot, attempt=stream.attempt,
              **{name: value for name, value in optional.items() if value is not None})  # fmt: skip
