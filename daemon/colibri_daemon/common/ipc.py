"""Messages between the daemon's own processes. Both ends are of one epoch, so nothing here is versioned.

Link (dispatcher ↔ worker): a stream socketpair; each message is a 4-byte big-endian length and a msgpack array whose
first element is a tag below. Control (supervisor ↔ child): a SOCK_SEQPACKET pair; each packet is one msgpack map with
"t", and may carry file descriptors.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Iterator
from typing import Any

import msgpack

# ---- link: dispatcher → worker -------------------------------------------------------------------------------------
ASSIGN = 1  # [ASSIGN, key, Job.to_wire()]; key: unique in the life of the dispatcher
CANCEL = 2  # [CANCEL, key, finish]: end it with this finish reason ("abort", "deadline"); unknown keys are ignored
PAUSE = 3  # [PAUSE, key]: leave the batch, keep the KV cache
RESUME = 4  # [RESUME, key]: back into the batch
PREEMPT = 5  # [PREEMPT, key]: leave, to go on from what was sent when assigned again; committed KV slabs stay cached

# ---- link: worker → dispatcher -------------------------------------------------------------------------------------
READY = 16  # [READY, {"max_seqs", "slabs", "chunk", "stall_ms"}]: once, when loaded
STEP = 17  # [STEP, step number, [row, ...], {"free": slabs, "rows": rows computed, "us": duration, "misses"}]; short
#            steps share one, whose number is the last one's
#            free: in the worker's free list. misses: decode rows so far that sat a step out for want of a slab
# A row is [key, ids (bin), details or None]; ids are released output tokens, possibly none. details: a map with any of
#   "lp", "top", "toplp"  bin: log probabilities [n], alternatives [n, logprobs] and theirs
#   "scores"              [index, lp, top or None, toplp or None]: SCORES of the prompt
#   "cached"              prompt tokens found in the prefix cache (in the first row of a request)
#   "finish"              "stop", "length", "abort", "deadline", "preempted" or "error": the last row of the key
#   "match"               [kind, value] of StopMatch
#   "generated"           with finish: tokens generated in all, resumed and withheld ones included
#   "error"               [code, message] with finish "error"

# ---- control: supervisor → dispatcher ------------------------------------------------------------------------------
# generation: number of a configuration with its workers; a reload makes the next one. pool: number of a KV pool.
# {"t": "worker", "generation", "slot", "epoch", "pid", "page"} + fd   a worker's link; the last one for a slot counts.
#                                                page: its index in the book
# {"t": "doomed", "slot", "epoch"}               the supervisor is about to signal it: only "dead" says how it died
# {"t": "state", ...HealthReply fields...}       pushed on change and at least every 0.5 s; "refuse": why no request is
#                                                taken; "reloaded": {"ok", "at" (Unix time), "good" (of the last good
#                                                one)} of the last reload
# {"t": "generation", "generation", "pool", "settings" (Settings.to_json()), "facts"}   it will come; nothing changes
#                                                yet. The first one is told at the start of the process
# {"t": "serve", "generation"}                   new requests use it from now on; those of older ones with the same pool
#                                                move to it. Answered by "empty" for each older one, when that is so
# {"t": "forget", "generation"}                  its processes are gone, or never came
# {"t": "dead", "slot", "epoch", "cause", "keys"}  a worker is reaped; the pool knows. cause: "fault" (signal), "exit"
#                                                (code), "hang", "killed" (from outside), "stopped" (in good order).
#                                                keys: the requests in the step that was running
# {"t": "drain", "seconds"}                      GOAWAY to all, finish what is live, then answer "drained"
# {"t": "retire"}                                a new dispatcher has taken over: accept no more, then as with "drain"
#                                                but for the time; SIGTERM follows
# {"t": "admin", "id", "ok", "error", "result"}  the answer to its "admin"
# control: supervisor → worker and dispatcher
# {"t": "pool", "pool", "slot", "epoch"} + fd    the link to the KV pool (pool_ipc.py); the last one counts. slot and
#                                                epoch: who the receiver is (slot 0 for the dispatcher)
# control: supervisor → any child
# {"t": "log_level", "level"}                    what is less important is not logged from now on
# control: supervisor → worker
# {"t": "link"} + fd                             the link to a new dispatcher; what the old one wanted is forgotten
# control: supervisor → metrics process
# {"t": "state", …, "about": {"model", "id", "version", "isa", "protocol", "slabs", "slab_tokens", "pinned", "window"}}
#                                                as to the dispatcher; about: what serves, empty until that is known
# control: child → supervisor
# {"t": "ready", ...}                            dispatcher: accepting; worker: loaded, with threads, chunk and stall_ms
# {"t": "failed", "reason"}                      worker: the model cannot be loaded; it then exits with CANNOT_LOAD
# {"t": "drained"}                               dispatcher: nothing is live any more
# {"t": "empty", "generation"}                   dispatcher: no request of this earlier generation is live any more
# {"t": "kill", "kind", "slot", "epoch", "reason"}   dispatcher and pool: a process that broke the protocol is to end
# {"t": "admin", "id", "do", ...}                dispatcher, from the admin socket; "do": "reload" ("everything"),
#                                                answered when the reload has ended, or "log_level" ("level", "role")
# Supervisor → child to stop it: SIGTERM; end of file on control means the supervisor is gone: exit at once.

MAX_MESSAGE = 64 << 20  # a broken peer must not make us reserve more
MAX_PACKET, MAX_FDS = 1 << 16, 8  # of a control message
_HEADER = 4


def pack(message: Any) -> bytes:
    """One framed link message."""
    payload: bytes = msgpack.packb(message, use_bin_type=True)
    return len(payload).to_bytes(_HEADER, "big") + payload


class Unframer:
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages completed by data; to be exhausted before the next feed(). ValueError if the peer does not
        speak this protocol."""
        buffer = self._buffer
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= _HEADER:
                size = int.from_bytes(buffer[at : at + _HEADER], "big")
                if size > MAX_MESSAGE:
                    raise ValueError(f"a message of {size} bytes between processes")
                if len(buffer) - at - _HEADER < size:
                    break
                payload = bytes(buffer[at + _HEADER : at + _HEADER + size])
                at += _HEADER + size
                yield _unpack(payload)
        finally:
            del buffer[:at]


def link() -> tuple[socket.socket, socket.socket]:
    """A non-blocking stream pair for dispatcher and worker."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in pair:
        end.setblocking(False)
    return pair


def control() -> tuple[socket.socket, socket.socket]:
    """A non-blocking packet pair for supervisor and child."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setblocking(False)
    return pair


def send_control(sock: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> bool:
    """Sends one packet. False if the peer is gone or does not read (the caller decides what that means)."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        sock.sendmsg([msgpack.packb(message, use_bin_type=True)], ancillary)
    except OSError:  # BlockingIOError included
        return False
    return True


def receive_control(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """One packet and its descriptors, which are the caller's to close; None at end of file. BlockingIOError if there is
    none. ValueError if it is not whole or not one of ours; its descriptors are closed then."""
    # Not socket.recv_fds(): it ignores its flags, and so can only make inheritable descriptors.
    data, ancillary, flags, _ = sock.recvmsg(MAX_PACKET, socket.CMSG_LEN(MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) // 4 * 4])
    if not data:
        return None
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ValueError(f"a packet of over {MAX_PACKET} bytes or {MAX_FDS} descriptors between processes")
        return _map(data), list(fds)
    except ValueError:
        for fd in fds:
            os.close(fd)
        raise


def _map(data: bytes) -> dict[str, Any]:
    message = _unpack(data)
    if not isinstance(message, dict):
        raise ValueError(f"a packet holds a {type(message).__name__}, not a map")
    return message


def _unpack(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, TypeError) as e:  # TypeError: a list or map as a map's key
        raise ValueError(f"{len(data)} bytes between processes are no message: {type(e).__name__} {e}") from None
