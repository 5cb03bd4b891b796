"""What both sides refuse to exceed, and the daemon's defaults. SPEC.md's table of limits is made from here."""

from __future__ import annotations

from dataclasses import dataclass, fields

PROTOCOL_VERSION = 1
FEATURES = ("credit",)  # names that HELLO may ask for

HEADER_BYTES = 4  # big-endian length of the payload
MAX_FRAME = 1 << 20  # default; configurable up to FRAME_CEILING
FRAME_CEILING = 8 << 20
MAX_ARRAY, MAX_MAP, MAX_TEXT = 4096, 256, 64 << 10
MAX_DEPTH = 8  # nesting of arrays and maps, the outermost array included
MAX_ITEMS = 16384  # values in one frame, so that a frame of one-byte values costs no more than a large prompt
SCORES_FRAME = 256 << 10  # SCORES come in frames of at most this

MAX_LOGPROBS = 20
MAX_STOP_IDS, MAX_STOP_SEQS, MAX_STOP_LENGTH = 64, 16, 32
MAX_PING = 64
DEFAULT_MAX_TOKENS = 256
DEFAULT_DEADLINE_MS, MAX_DEADLINE_MS = 300_000, 3_600_000
INITIAL_CREDIT = 1024  # tokens per request, with feature "credit"

HELLO_SECONDS = 5.0
FRAME_SECONDS = 10.0  # rest of a started frame
PING_SECONDS, PINGS_UNANSWERED = 30.0, 3
QUEUE_SECONDS = 30.0
SLOW_READER_SECONDS = 10.0
OUTPUT_SOFT, OUTPUT_HARD = 256 << 10, 1 << 20
PAUSED_SECONDS = 1.0  # a stream out of credit for longer leaves the batch


@dataclass(frozen=True)
class ServerLimits:
    """Limits that a daemon's configuration may change. requests: live on one connection."""

    frame: int = MAX_FRAME
    connections: int = 256
    connections_per_uid: int = 64
    requests: int = 64
    requests_trusted: int = 1024
    queue_tokens: int = 65536

    def __post_init__(self) -> None:
        for f in fields(self):
            if getattr(self, f.name) < 1:
                raise ValueError(f"{f.name} is {getattr(self, f.name)}; it must be at least 1")
        if self.frame > FRAME_CEILING:
            raise ValueError(f"frame is {self.frame}; it must be at most {FRAME_CEILING}")
