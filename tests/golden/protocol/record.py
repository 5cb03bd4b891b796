"""Writes vectors.json: frames of every message with what they mean, and frames that must be refused.

Remake: python tests/golden/protocol/record.py --write
Vectors are only added: bytes that were valid once must be understood for ever. One that must go is deleted by hand.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "daemon")]

from colibri_protocol.codec import encode  # noqa: E402
from colibri_protocol.errors import Code  # noqa: E402
from colibri_protocol.framing import frame  # noqa: E402
from colibri_protocol.message import MESSAGES, Message  # noqa: E402
from colibri_protocol.messages import Done, Error, Generate, Ping, TokensOut, Usage  # noqa: E402
from fixtures.wire import filled, minimal, to_json  # noqa: E402

VECTORS = Path(__file__).with_name("vectors.json")
Vectors = dict[str, list[dict[str, Any]]]  # "messages" and "refused"
FAULT = True  # the connection ends, not only the request


def accepted() -> Iterator[tuple[str, Message, int]]:
    """(name, message, request id)."""
    for tag, made in MESSAGES.items():
        yield f"{made.NAME} minimal", minimal(made), tag
        yield f"{made.NAME} all fields", filled(made), 2**64 - 1
    for number in (0, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**53 - 1):
        yield f"integer {number}", TokensOut(ids=b"", index=number, step=number), number
    for number in (-1, -32, -33, -100):
        yield f"integer {number}", Generate(tokens=b"\1\0\0\0", priority=number), 1
    for length in (31, 32, 255, 256):
        yield f"text of {length}", Done(finish_reason="x" * length), 1
    yield "text of 4096 bytes", Error(code=599, message="é" * 2048), 1
    for count in (63, 64):
        yield f"{count} tokens", TokensOut(ids=struct.pack("<I", 7) * count), 1
    yield "double that is no float", Generate(tokens=b"\1\0\0\0", temperature=0.1, top_p=1e-300), 1
    yield "nested defaults are absent", TokensOut(ids=b"\1\0\0\0", usage=Usage()), 1
    yield "zero bytes", Ping(data=bytes(64)), 0


def body(kind: int, fields: Any, request: Any = 9) -> bytes:
    return frame(msgpack.packb([kind, request, fields]))


def generate(**fields: Any) -> bytes:
    return body(3, {"tokens": b"\1\0\0\0", **fields})


def raw(payload: str) -> bytes:
    return frame(bytes.fromhex(payload))


# name -> (bytes, code, fault, field, index)
Refused = tuple[bytes, Code, bool, str | None, int | None]


def refused() -> dict[str, Refused]:
    return {
        **{name: (data, code, FAULT, None, None) for name, (data, code) in broken_frames().items()},
        **{name: (data, Code.INVALID_ARGUMENT, False, field, None) for name, (data, field) in bad_fields().items()},
        **{name: (data, code, False, field, index) for name, (data, code, field, index) in bad_entries().items()},
    }


def broken_frames() -> dict[str, tuple[bytes, Code]]:
    head, protocol = "9303 09 81 a178".replace(" ", ""), Code.PROTOCOL  # GENERATE, id 9, {"x": ...
    return {
        "length 0": (bytes(4), protocol),
        "length 1 MiB + 1": (struct.pack(">I", (1 << 20) + 1), Code.FRAME_TOO_LARGE),
        "length 2^32-1": (b"\xff" * 4, Code.FRAME_TOO_LARGE),
        "nothing but array16 headers": (raw("dc0001" * 700), protocol),
        "nine deep": (raw(head + "91" * 7 + "00"), protocol),
        "nine deep with maps": (raw(head + "81a178" * 7 + "00"), protocol),
        "array32 of 2^32-1": (raw(head + "ddffffffff"), protocol),
        "map32 of 2^32-1": (raw(head + "dfffffffff"), protocol),
        "bin32 of 2^32-1": (raw(head + "c6ffffffff"), protocol),
        "str32 of 2^32-1": (raw(head + "dbffffffff"), protocol),
        "array of 4097": (raw(head + "dc1001" + "00" * 4097), protocol),
        "map of 257": (raw(head + "de0101" + "".join(f"cd{i:04x}00" for i in range(257))), protocol),
        "more values than allowed": (raw(head + "94" + ("dc1000" + "00" * 4096) * 4), protocol),
        "array of more than is there": (raw(head + "93c0c0"), protocol),
        "empty ext": (raw(head + "c70005"), protocol),
        "fixext 1": (raw(head + "d40500"), protocol),
        "timestamp": (raw(head + "d6ff00000000"), protocol),
        "reserved byte": (raw(head + "c1"), protocol),
        "value cut off": (raw(head + "cd00"), protocol),
        "text cut off": (raw(head + "a5616263"), protocol),
        "length cut off": (raw(head + "c500"), protocol),
        "a byte too many": (raw("93030980" + "00"), protocol),
        "not an array": (raw("80"), protocol),
        "array of two": (raw("920309"), protocol),
        "array of four": (raw("9403098000"), protocol),
        "type is text": (body("GENERATE", {}), protocol),  # type: ignore[arg-type]
        "type is negative": (body(-3, {}), protocol),
        "type is nil": (raw("93c00980"), protocol),
        "unknown type": (body(77, {}), protocol),
        **{f"id is {json.dumps(value)}": (body(3, {}, value), protocol)
           for value in (-1, 1.0, True, None, "9", [9], {})},
    }


def bad_fields() -> dict[str, tuple[bytes, str]]:
    """Data and the field that is named; INVALID_ARGUMENT."""
    one_fields: dict[str, list[Any]] = {
        "max_tokens": [-1, 2**31, 2**63, 2**64 - 1, 1.0, True, "8", [8], {}, None],
        "temperature": [float("nan"), float("inf"), -0.5, 100.5, "1", False, None],
        "top_p": [0, 0.0, 1.5, float("nan")],
        "min_p": [-0.1, 1.1],
        "repetition_penalty": [0, -1],
        "seed": [-1, 1.5, None],
        "logprobs": [21, -1, None],
        "deadline_ms": [0, 3600001],
        "priority": [-101, 101],
        "ignore_eos": [0, 1, "true", None],
        "stop_ids": [None, 5, "5", {}, b"\1\0\0", bytes(65 * 4), [5] * 65],
        "stop_seqs": [b"\1\0\0\0", 5, [[1]] * 17],
        "tokens": [b"\1\0\0", "text", 5, None],
        "logit_bias": [[], 5, {"5": 1.0}, None],
        "cache": [5, [], None],
        "model": [5, b"m", "m" * 257],
        "tenant": ["t" * 129],
    }
    rows = {f"{field} {_shown(value)}": (generate(**{field: value}), field)
            for field, values in one_fields.items() for value in values}
    return rows | {
        "body is a list": (body(3, []), "body"),
        "body is nil": (body(3, None), "body"),
        "a required field is missing": (body(3, {}), "tokens"),
        "a nested required field is missing": (generate(resume={"seed": 1}), "resume.tokens"),
        "a nested field is bad": (generate(cache={"use": 1}), "cache.use"),
        "a key twice": (raw("930309 83 a178 00 a6746f6b656e73 c400 a178 01"), "x"),
        "a nested key twice": (raw("930309 82 a6746f6b656e73 c400 a178 82 a179 00 a179 00"), "y"),
        "a token twice": (raw("930309 82 a6746f6b656e73 c400 aa6c6f6769745f62696173 82 05 00 cc05 00"), "5"),
        "a binary key": (raw("930309 81 c401 78 00"), "body"),
        "a nil key": (raw("930309 81 c0 00"), "body"),
        "an integer key": (raw("930309 82 a6746f6b656e73 c400 05 00"), "body"),
        "text that is not UTF-8": (raw("930309 82 a6746f6b656e73 c400 a56d6f64656c a2c328"), "model"),
        "a surrogate in text": (raw("930309 82 a6746f6b656e73 c400 a178 a3eda080"), "x"),
        "text that is not UTF-8 beside a key that is a map": (raw("930309 82 a178 a1ff 80 00"), "x"),
        "a key that is not UTF-8": (raw("930309 81 a1ff 00"), "body"),
        "ping of 65 bytes": (body(10, {"data": bytes(65)}), "data"),
        "credit of 0": (body(9, {"tokens": 0}), "tokens"),
        "score from 0": (body(20, {"tokens": bytes(8), "from": 0}), "from"),
        "a count over 2^53": (body(5, {"ids": b"", "index": 2**53}), "index"),
    }


def bad_entries() -> dict[str, tuple[bytes, Code, str, int | None]]:
    invalid, outside = Code.INVALID_ARGUMENT, Code.TOKEN_OUT_OF_RANGE
    rows: dict[str, tuple[bytes, Code, str, int | None]] = {
        f"token {_shown(value)}": (generate(tokens=[1, 2, value]), code, "tokens", 2)
        for value, code in ((-1, outside), (2**32, outside), (2**63, outside), (1.0, invalid), (True, invalid),
                            ("1", invalid), (None, invalid), ([], invalid))
    }
    return rows | {
        "stop id -1": (generate(stop_ids=[-1]), outside, "stop_ids", 0),
        "stop id nil": (generate(stop_ids=[5, None]), invalid, "stop_ids", 1),
        "stop sequence too long": (generate(stop_seqs=[[1], [1] * 33]), invalid, "stop_seqs", 1),
        "stop sequence is a number": (generate(stop_seqs=[5]), invalid, "stop_seqs", 0),
        "stop sequence with token -1": (generate(stop_seqs=[[1], [1], [1, -1]]), outside, "stop_seqs", 2),
        "bias of token -1": (generate(logit_bias={-1: 0.5}), outside, "logit_bias", None),
        "bias of token 2^32": (generate(logit_bias={5: 1, 2**32: 0.5}), outside, "logit_bias", 2**32),
        "bias infinite": (generate(logit_bias={5: float("inf")}), invalid, "logit_bias", 5),
        "bias NaN": (generate(logit_bias={5: float("nan")}), invalid, "logit_bias", 5),
        "bias is text": (generate(logit_bias={5: "1"}), invalid, "logit_bias", 5),
        "feature is a number": (body(1, {"proto_min": 1, "proto_max": 1, "features": ["a", 5]}), invalid,
                                "features", 1),
        "a worker without slot": (body(13, {"live": True, "ready": True, "state": "", "workers": [{}]}), invalid,
                                  "workers", 0),
    }


def _shown(value: Any) -> str:
    text = f"{len(value)} bytes" if isinstance(value, bytes) else json.dumps(value)
    return text if len(text) <= 24 else f"{text[:12]}... {len(value)} long"


def record() -> Vectors:
    """Everything this file makes."""
    return {
        "messages": [{"name": name, "tag": message.TAG, "id": request_id, "fields": to_json(message),
                      "hex": encode(message, request_id).hex()} for name, message, request_id in accepted()],
        "refused": [{"name": name, "code": code.name, "fault": fault, "field": field, "index": index, "hex": data.hex()}
                    for name, (data, code, fault, field, index) in refused().items()],
    }


def merged(old: Vectors, new: Vectors) -> Vectors:
    """old and what is new in new, under a name that is free."""
    for group, vectors in new.items():
        kept = old.setdefault(group, [])
        known, names = {v["hex"] for v in kept}, {v["name"] for v in kept}
        for vector in vectors:
            if vector["hex"] not in known:
                count = sum(name.split(" #")[0] == vector["name"] for name in names)
                vector["name"] += f" #{count + 1}" * (count > 0)
                kept.append(vector)
    return old


def text(vectors: Vectors) -> str:
    """JSON with a vector a line."""
    groups = (f'"{name}": [\n' + ",\n".join(json.dumps(v, ensure_ascii=False) for v in group) + "\n]"
              for name, group in vectors.items())
    return "{" + ",\n".join(groups) + "}\n"


if __name__ == "__main__":
    found = json.loads(VECTORS.read_text(encoding="utf-8")) if VECTORS.exists() else {}
    made = text(merged(found, record()))
    if sys.argv[1:] == ["--write"]:
        VECTORS.write_text(made, encoding="utf-8")
    else:
        sys.stdout.write(made)
