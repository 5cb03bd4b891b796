"""Every message and its fields: the wire contract. SPEC.md and the Go types are made from this file.

Request ids are chosen by the client, unique among its live requests on the connection; messages about the connection
itself have id 0. Each accepted GENERATE or SCORE gets exactly one DONE or ERROR and nothing after it.
"""

from __future__ import annotations

from .admin_messages import (  # noqa: F401 - whoever imports this file has all messages
    AdminDrain,
    AdminDump,
    AdminEvict,
    AdminLogLevel,
    AdminReload,
    AdminReply,
    AdminResume,
)
from .kinds import U32, U53, U64, BiasMap, Blob, CountMap, Flag, Float, Floats, Int, ListOf, Text, Tokens
from .limits import (
    DEFAULT_DEADLINE_MS,
    DEFAULT_MAX_TOKENS,
    INITIAL_CREDIT,
    MAX_DEADLINE_MS,
    MAX_LOGPROBS,
    MAX_PING,
    MAX_STOP_IDS,
    MAX_STOP_LENGTH,
    MAX_STOP_SEQS,
)
from .message import BOTH, CLIENT, SERVER, message, nested, optional, required, struct

COUNT = Int(0, U53)
U31 = (1 << 31) - 1

# ---- handshake -----------------------------------------------------------------------------------------------------


@struct
class ModelInfo:
    """The model that is served."""

    name: str = required(Text(), "Its name; the only value that GENERATE.model accepts besides nothing.")
    id: str = required(Text(), "SHA-256 of everything that determines its logits, 64 hex digits.")
    fingerprint: str = required(Text(), "Numerics fingerprint of the engine, 64 hex digits.")
    vocab_size: int = required(Int(1, U32), "Token ids are below this.")
    max_len: int = required(Int(1, U32), "Most tokens of prompt and output together.")
    eos_ids: tuple[int, ...] = optional(ListOf(Int(0, U32), MAX_STOP_IDS), "End-of-text tokens; each stops.", ())
    pinned: int = optional(COUNT, "P: a query at t sees [0, P) and (t − W, t].", 0)
    window: int = optional(COUNT, "W; 0 = everything.", 0)
    positions: str = optional(Text(), "Position mode, cache or absolute.", "cache")
    block: int = optional(Int(1, U32), "Tokens of one KV slab.", 64)
    kv_format: str = optional(Text(), "How keys and values are stored, f16 or f32.", "f16")
    folder: str | None = optional(Text(4096), "Model folder on the daemon's host: tokenizer and chat template.")


@struct
class LimitInfo:
    """Limits that hold for this connection."""

    frame: int = required(COUNT, "Longest payload of a frame in bytes, both directions.")
    requests: int = required(COUNT, "Live requests of this connection.")
    credit: int = optional(COUNT, "Tokens a stream may send before the first CREDIT, if negotiated.", INITIAL_CREDIT)
    logprobs: int = optional(COUNT, "Largest logprobs, prompt_logprobs and top.", MAX_LOGPROBS)
    deadline_ms: int = optional(COUNT, "Largest deadline_ms.", MAX_DEADLINE_MS)


@message(1, "HELLO", CLIENT)
class Hello:
    """First message of a client, within 5 s of connecting."""

    proto_min: int = required(Int(0, U31), "Lowest protocol version the client speaks.")
    proto_max: int = required(Int(0, U31), "Highest; the server picks one in between.")
    features: tuple[str, ...] = optional(ListOf(Text(64), 64), "Features wanted: credit.", ())
    client: str = optional(Text(), "Name and version, for logs.", "")
    half_close_ok: bool = optional(Flag(), "Shutting the sending side is not a disconnect.", False)


@message(2, "WELCOME", SERVER)
class Welcome:
    """Answer to HELLO; requests may be sent from now on."""

    proto: int = required(Int(0, U31), "The version spoken from here on.")
    features: tuple[str, ...] = optional(ListOf(Text(64), 64), "Features that are on.", ())
    server: str = required(Text(), "Name and version.")
    generation: int = required(COUNT, "Number of the configuration; grows with each reload.")
    model: ModelInfo = required(nested(ModelInfo), "What is served.")
    limits: LimitInfo = required(nested(LimitInfo), "What is allowed.")


# ---- generation ----------------------------------------------------------------------------------------------------


@struct
class Cache:
    """Prefix cache use of one request."""

    use: bool = optional(Flag(), "Look for a cached prefix and leave one behind.", True)
    salt_extra: bytes = optional(Blob(64), "Only requests with the same value share prefixes.", b"")


@struct
class Receipt:
    """What the output is a function of: the same receipt and request give the same tokens."""

    model_id: str = required(Text(), "ModelInfo.id.")
    fingerprint: str = required(Text(), "ModelInfo.fingerprint.")
    seed: int = required(Int(0, U64), "The one used.")
    pinned: int = optional(COUNT, "P.", 0)
    window: int = optional(COUNT, "W.", 0)
    positions: str = optional(Text(), "Position mode.", "cache")
    kv_format: str = optional(Text(), "KV cache format.", "f16")
    max_tokens: int = optional(COUNT, "After clipping to what fits.", 0)


@struct
class Resume:
    """Continue a stream whose connection was lost: output goes on after these tokens, with the same bits."""

    tokens: bytes = required(Tokens(), "Tokens already received, in order.")
    seed: int = optional(Int(0, U64), "Seed of the first attempt.", 0)
    receipt: Receipt | None = optional(nested(Receipt), "What made them, but for max_tokens; refused with "
                                       "MODEL_MISMATCH where that cannot be gone on with.")


@message(3, "GENERATE", CLIENT)
class Generate:
    """Ask for a continuation. Answered by TOKENS and one DONE, or by ERROR."""

    tokens: bytes = required(Tokens(), "The prompt, at least one.")
    max_tokens: int = optional(Int(0, U31), "Most tokens to generate; 0 only checks and prefills nothing.",
                               DEFAULT_MAX_TOKENS)
    min_tokens: int = optional(Int(0, U31), "No stop before this many tokens.", 0)
    temperature: float = optional(Float(0, 100), "0 = greedy.", 0.0)
    top_k: int = optional(Int(0, U31), "Sample among the k best; 0 = all.", 0)
    top_p: float = optional(Float(0, 1, above=True), "Sample among the best that hold this probability.", 1.0)
    min_p: float = optional(Float(0, 1), "Drop what is less likely than this share of the best.", 0.0)
    repetition_penalty: float = optional(Float(0, 100, above=True), "Over prompt and output; 1 = off.", 1.0)
    presence_penalty: float = optional(Float(-100, 100), "Over output; 0 = off.", 0.0)
    frequency_penalty: float = optional(Float(-100, 100), "Over output, per occurrence; 0 = off.", 0.0)
    logit_bias: dict[int, float] = optional(BiasMap(256), "Added to the logits of these tokens.", {})
    seed: int | None = optional(Int(0, U64), "Of the sampling noise; absent: chosen by the daemon, told in DONE.")
    stop_ids: bytes = optional(Tokens(MAX_STOP_IDS), "Tokens that end the output; the token itself is sent.", b"")
    stop_seqs: tuple[bytes, ...] = optional(ListOf(Tokens(MAX_STOP_LENGTH), MAX_STOP_SEQS),
                                            "Token sequences that end the output; they are not sent.", ())
    ignore_eos: bool = optional(Flag(), "Do not stop at the model's end-of-text tokens.", False)
    logprobs: int | None = optional(Int(0, MAX_LOGPROBS), "Log probability of each token, and of this many best.")
    prompt_logprobs: int | None = optional(Int(0, MAX_LOGPROBS), "The same for the prompt, in SCORES first.")
    priority: int = optional(Int(-100, 100), "Higher goes first.", 0)
    deadline_ms: int = optional(Int(1, MAX_DEADLINE_MS), "From receipt, waiting included.", DEFAULT_DEADLINE_MS)
    cache: Cache = optional(nested(Cache), "Prefix cache use.", Cache())
    resume: Resume | None = optional(nested(Resume), "Continue a lost stream.")
    model: str | None = optional(Text(), "Refused if another model is served.")
    tenant: str | None = optional(Text(128), "On whose behalf; from trusted users only.")
    trace: str | None = optional(Text(), "W3C traceparent, passed to the logs.")
    request_id: str | None = optional(Text(128), "The caller's own name of the request, passed to the logs.")
    echo_usage: bool = optional(Flag(), "Put usage so far into every TOKENS.", False)


@struct
class Usage:
    """Token counts of one request."""

    prompt: int = optional(COUNT, "Prompt tokens.", 0)
    cached: int = optional(COUNT, "Of those, taken from the prefix cache.", 0)
    generated: int = optional(COUNT, "Tokens generated, resumed ones and a withheld stop sequence included.", 0)


@struct
class Times:
    """Where the time went, in ms."""

    queue: float = optional(Float(0, 1e12), "Waiting for a worker.", 0.0)
    prefill: float = optional(Float(0, 1e12), "From there to the first token.", 0.0)
    decode: float = optional(Float(0, 1e12), "From the first token to the last.", 0.0)


@message(5, "TOKENS", SERVER)
class TokensOut:
    """Generated tokens, one or more."""

    ids: bytes = required(Tokens(), "The tokens (bin).")
    index: int = optional(COUNT, "Index in the output of the first of them.", 0)
    logprobs: bytes | None = optional(Floats(), "[n] log probability of each, if asked for.")
    top_ids: bytes | None = optional(Tokens(), "[n, logprobs] the best alternatives, best first.")
    top_logprobs: bytes | None = optional(Floats(), "[n, logprobs] their log probabilities.")
    step: int = optional(COUNT, "Step of the worker that produced the last of them.", 0)
    cached_tokens: int | None = optional(COUNT, "In the first TOKENS of a request: prompt tokens found cached.")
    usage: Usage | None = optional(nested(Usage), "So far, with echo_usage.")
    generation: int | None = optional(COUNT, "In the first TOKENS of a request: what makes it, as in WELCOME or MODEL.")


@struct
class StopMatch:
    """What ended the output."""

    kind: str = required(Text(), "eos, id or sequence.")
    value: int = required(COUNT, "The token id, or the index in stop_seqs.")


@message(6, "DONE", SERVER)
class Done:
    """The request has ended."""

    finish_reason: str = required(Text(), "stop, length, abort or deadline.")
    stop_match: StopMatch | None = optional(nested(StopMatch), "With stop.")
    usage: Usage = optional(nested(Usage), "Counts.", Usage())
    times: Times = optional(nested(Times), "Durations.", Times())
    seed: int = optional(Int(0, U64), "Seed used.", 0)
    worker: int | None = optional(COUNT, "Slot of the worker that ended it.")
    receipt: Receipt | None = optional(nested(Receipt), "For GENERATE.")


@message(7, "ERROR", SERVER)
class Error:
    """The request has failed or, with id 0, the connection, which is then closed."""

    code: int = required(Int(0, U31), "See the table of codes.")
    message: str = required(Text(4096), "For people.")
    retryable: bool = optional(Flag(), "Sending it again can help.", False)
    retry_after_ms: int | None = optional(COUNT, "But not sooner than this.")
    field: str | None = optional(Text(), "The field at fault.")
    index: int | None = optional(COUNT, "The entry in it.")
    limit: int | None = optional(COUNT, "The limit that was exceeded.")
    tokens_sent: int = optional(COUNT, "Tokens sent before.", 0)
    usage: Usage | None = optional(nested(Usage), "If work was done.")


@message(8, "CANCEL", CLIENT)
class Cancel:
    """End a request: a live one is answered by DONE with abort, any other is ignored."""

    reason: str = optional(Text(), "For logs.", "")


@message(9, "CREDIT", CLIENT)
class Credit:
    """Allow a stream more tokens. Needs feature credit."""

    tokens: int = required(Int(1, U31), "How many more.")


# ---- connection and state ------------------------------------------------------------------------------------------


@message(10, "PING", BOTH)
class Ping:
    """Are you there? Either side may ask."""

    data: bytes = optional(Blob(MAX_PING), "Comes back.", b"")


@message(11, "PONG", BOTH)
class Pong:
    """Answer to PING."""

    data: bytes = optional(Blob(MAX_PING), "As it came.", b"")
    ns: int = optional(Int(0, U64), "Monotonic clock of the answering side.", 0)


@message(12, "HEALTH", CLIENT)
class Health:
    """Ask for the daemon's state."""


@struct
class WorkerHealth:
    """One worker slot."""

    slot: int = required(COUNT, "Index, from 0.")
    up: bool = optional(Flag(), "Loaded and taking requests.", False)
    busy: bool = optional(Flag(), "Has running requests.", False)
    progress_age_ms: float = optional(Float(0, 1e12), "Since it last showed progress; idle, it does twice a second.",
                                      0.0)
    restarts: int = optional(COUNT, "Since the daemon started.", 0)
    pid: int = optional(COUNT, "0 when it is down.", 0)
    resident_bytes: int = optional(COUNT, "Proportional set size.", 0)


@message(13, "HEALTH_REPLY", SERVER)
class HealthReply:
    """Answered by the dispatcher from what the supervisor last told it."""

    live: bool = required(Flag(), "The daemon answers.")
    ready: bool = required(Flag(), "Requests are being served.")
    state: str = required(Text(), "starting, ready, degraded, draining or failed.")
    reason: str = optional(Text(1024), "Why it is not ready.", "")
    progress: float | None = optional(Float(0, 1), "Share of the weights loaded or verified, while starting.")
    age_ms: float = optional(Float(0, 1e12), "Age of this knowledge.", 0.0)
    workers: tuple[WorkerHealth, ...] = optional(ListOf(nested(WorkerHealth), 256), "By slot.", ())


@message(14, "STATS", CLIENT)
class Stats:
    """Ask for counters."""

    experts: bool = optional(Flag(), "Also the tokens of every expert.", False)


@message(15, "STATS_REPLY", SERVER)
class StatsReply:
    """Counters and gauges by their metric names without the colibri_ prefix."""

    uptime_s: float = required(Float(0, 1e12), "Since the dispatcher started.")
    running: int = optional(COUNT, "Requests in workers.", 0)
    waiting: int = optional(COUNT, "Requests in the queue.", 0)
    waiting_tokens: int = optional(COUNT, "Their prompt tokens.", 0)
    connections: int = optional(COUNT, "Open now.", 0)
    kv_slabs: dict[str, float] = optional(CountMap(), "Slabs by state; they add up to total.", {})
    counters: dict[str, float] = optional(CountMap(), "Totals since the start.", {})
    workers: tuple[dict[str, float], ...] = optional(ListOf(CountMap(), 256), "Per slot.", ())
    experts: int = optional(COUNT, "Experts of a layer; 0: not asked for, or not counted.", 0)
    expert_tokens: bytes = optional(Blob(1 << 20), "Tokens routed to each, layer by layer, little-endian u64.", b"")


@message(16, "TOKEN_CHECK", CLIENT)
class TokenCheck:
    """Would this GENERATE be accepted, and what is cached of it? Nothing runs."""

    tokens: bytes = required(Tokens(), "The prompt.")
    max_tokens: int = optional(Int(0, U31), "As in GENERATE.", DEFAULT_MAX_TOKENS)
    cache: Cache = optional(nested(Cache), "As in GENERATE.", Cache())
    model: str | None = optional(Text(), "As in GENERATE.")
    tenant: str | None = optional(Text(128), "As in GENERATE.")


@message(17, "TOKEN_CHECK_REPLY", SERVER)
class TokenCheckReply:
    """The answer; a request that would be refused gets the ERROR that GENERATE would get."""

    prompt_tokens: int = required(COUNT, "How many.")
    cached_tokens: int = optional(COUNT, "Of these, in the prefix cache now.", 0)
    max_tokens: int = required(COUNT, "What max_tokens would become.")
    slabs: int = required(COUNT, "KV slabs it may need at most.")


@message(18, "GOAWAY", SERVER)
class GoAway:
    """No new requests on this connection; live ones go on until the deadline."""

    reason: str = required(Text(), "drain or limit.")
    last_id: int = optional(Int(0, U64), "Last request accepted.", 0)
    deadline_ms: int = optional(COUNT, "Then the rest ends with DRAINING.", 0)


@message(19, "BYE", CLIENT)
class Bye:
    """Finish what is live, then close."""


@message(20, "SCORE", CLIENT)
class Score:
    """Log probabilities of a given text. Answered by SCORES and one DONE, or by ERROR."""

    tokens: bytes = required(Tokens(), "The text, at least two.")
    top: int = optional(Int(0, MAX_LOGPROBS), "Alternatives per position.", 0)
    start: int = optional(Int(1, U31), "First position to score (a token is scored given those before it).", 1,
                          wire="from")
    priority: int = optional(Int(-100, 100), "As in GENERATE.", 0)
    deadline_ms: int = optional(Int(1, MAX_DEADLINE_MS), "As in GENERATE.", DEFAULT_DEADLINE_MS)
    cache: Cache = optional(nested(Cache), "As in GENERATE.", Cache())
    model: str | None = optional(Text(), "As in GENERATE.")
    tenant: str | None = optional(Text(128), "As in GENERATE.")
    trace: str | None = optional(Text(), "As in GENERATE.")
    request_id: str | None = optional(Text(128), "As in GENERATE.")


@message(21, "SCORES", SERVER)
class Scores:
    """Scores of consecutive positions, in frames of at most 256 KiB."""

    index: int = required(COUNT, "Position of the first.")
    logprobs: bytes = required(Floats(), "[n].")
    top_ids: bytes | None = optional(Tokens(), "[n, top], best first.")
    top_logprobs: bytes | None = optional(Floats(), "[n, top].")


@message(128, "MODEL", SERVER)
class Model:
    """Another model is served from now on (after a reload). May be ignored."""

    generation: int = required(COUNT, "As in WELCOME.")
    model: ModelInfo = required(nested(ModelInfo), "The new one.")
