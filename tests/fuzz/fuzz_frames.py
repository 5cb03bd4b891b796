"""Fuzzes what a server makes of a client's bytes, for FUZZ_SECONDS (30): python tests/fuzz/fuzz_frames.py

Coverage-guided by atheris where that is installed, else by random changes of the seeds. Seeds: tests/fuzz/corpus/frames
(whole sessions) and the golden vectors; what is found stays under build/fuzz.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "daemon")]

try:
    import atheris
except ImportError:
    atheris = None

with atheris.instrument_imports(include=["colibri_protocol"]) if atheris else contextlib.nullcontext():
    from colibri_protocol.codec import decode, encode, error_message
    from colibri_protocol.errors import InvalidMessage
    from fixtures.connections import HELLO, heard

SECONDS = int(os.environ.get("FUZZ_SECONDS", "30"))
FOUND = ROOT / "build" / "fuzz" / "corpus" / "fuzz_frames"
MOST = 4096  # bytes of an input


def check(data: bytes) -> None:
    """The first byte says where to cut. Nothing but the connection's own errors; the same events in any pieces; what
    was accepted or refused can be said again."""
    if not data:
        return
    step, stream = data[0] + 1, data[1:]
    whole = heard([stream])
    assert heard([stream[at : at + step] for at in range(0, len(stream), step)]) == whole
    for event in whole[0]:
        if isinstance(event[0], int):  # a refused request
            message, request_id = error_message(InvalidMessage(event[0], "refused")), event[1]
        else:
            message, request_id = event
        assert decode(encode(message, request_id)[4:]) == (message, request_id)


def seeds() -> list[bytes]:
    vectors = json.loads((ROOT / "tests" / "golden" / "protocol" / "vectors.json").read_text(encoding="utf-8"))
    frames = [bytes.fromhex(v["hex"]) for group in vectors.values() for v in group]
    sessions = [path.read_bytes() for path in sorted((ROOT / "tests" / "fuzz" / "corpus" / "frames").iterdir())]
    return sessions + [b"\7" + encode(HELLO) + frame for frame in frames if len(frame) < MOST // 2]


def guided() -> None:
    """Ends the process: libFuzzer does."""
    FOUND.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()):
        (FOUND / f"seed-{number}").write_bytes(seed)
    atheris.Setup([sys.argv[0], str(FOUND), f"-max_total_time={SECONDS}", f"-max_len={MOST}", "-timeout=10",
                   "-rss_limit_mb=1024", "-verbosity=0", "-print_final_stats=1",
                   f"-artifact_prefix={FOUND.parents[1]}/"], check)
    atheris.Fuzz()


def mutated(chance: random.Random, known: list[bytes]) -> bytes:
    data = bytearray(chance.choice(known))
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        other = chance.choice(known)
        start = chance.randrange(len(other))
        data[at : at + chance.randint(0, 4)] = chance.choice(
            [bytes([chance.randrange(256)]), other[start : start + chance.randint(1, 40)], b""])
    return bytes(data[:MOST])


def blind() -> None:
    chance, known, end, count = random.Random(), seeds(), time.monotonic() + SECONDS, 0
    for seed in known:
        check(seed)
    while time.monotonic() < end:
        data = mutated(chance, known)
        try:
            check(data)
        except BaseException:
            print(f"fuzz_frames: failed for the bytes {data.hex()}", file=sys.stderr)
            raise
        count += 1
    print(f"fuzz_frames: {count} inputs in {SECONDS} s without atheris")


if __name__ == "__main__":
    guided() if atheris else blind()
