"""Messages to frames and back, beyond what the golden vectors say."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import pytest
from colibri_protocol.codec import decode, encode, error_message, plain_tokens, tokens_frame
from colibri_protocol.errors import Code, ConnectionFault, InvalidMessage, LocalError
from colibri_protocol.kinds import Int
from colibri_protocol.message import MESSAGES, SERVER, message, required
from colibri_protocol.messages import Done, Error, Generate, Ping, Score, TokensOut, Usage
from hypothesis import given
from hypothesis import strategies as st

words = st.lists(st.integers(0, 2**32 - 1), max_size=8).map(lambda w: struct.pack(f"<{len(w)}I", *w))
counts = st.integers(0, 2**53 - 1)
rare = {"logprobs": words, "top_ids": words, "top_logprobs": words, "cached_tokens": counts,
        "usage": st.builds(Usage, prompt=counts, cached=counts, generated=counts)}


def payload(data: bytes) -> bytes:
    assert int.from_bytes(data[:4], "big") == len(data) - 4
    return data[4:]


@given(request_id=st.integers(1, 2**64 - 1), ids=words, index=counts, step=counts,
       rare=st.fixed_dictionaries({}, optional={name: st.none() | values for name, values in rare.items()}))
def test_tokens_frame_is_the_encoders(request_id: int, ids: bytes, index: int, step: int, rare: dict[str, Any]) -> None:
    wanted = encode(TokensOut(ids=ids, index=index, step=step, **rare), request_id)
    if rare.get("usage") is not None:
        rare["usage"] = rare["usage"].to_body()
    assert tokens_frame(request_id, ids, index, step, **rare) == wanted


@given(request_id=st.integers(1, 2**53 - 1), token=st.integers(0, 2**32 - 1), index=counts, step=counts,
       cached=st.none() | counts)
def test_plain_tokens_are_decoded_as_by_the_general_way(request_id: int, token: int, index: int, step: int,
                                                        cached: int | None) -> None:
    rare = {} if cached is None else {"cached_tokens": cached}
    sent = payload(tokens_frame(request_id, struct.pack("<I", token), index, step, **rare))
    assert plain_tokens(sent) == decode(sent)


# What a plain TOKENS is made of, and what is close to it.
_PIECES = st.sampled_from([bytes.fromhex(piece) for piece in (
    "93", "05", "07", "cc81", "cc07", "cd0100", "ce00010000", "cf0000000100000000", "cf001fffffffffffff",
    "cf0020000000000000", "d007", "80", "81", "82", "83", "84", "85", "de0001", "a3696473c40401020304",
    "a3696473c40801020304", "a3696473c403010203", "a5696e646578", "a473746570", "ad6361636865645f746f6b656e73", "c0",
    "cb3ff0000000000000")])


@given(start=st.sampled_from(["", "930507 82 a3696473c40401020304"]), pieces=st.lists(_PIECES, max_size=8))
def test_plain_tokens_are_never_decoded_otherwise(start: str, pieces: list[bytes]) -> None:
    sent = bytes.fromhex(start) + b"".join(pieces)
    plain = plain_tokens(sent)
    assert plain is None or plain == decode(sent)


@pytest.mark.parametrize("entries", ["81", "83", "84"])
def test_plain_tokens_counts_the_entries(entries: str) -> None:
    """Two that are there; another count is another message, or none."""
    tail = "a3696473c40401020304 a5696e64657803"
    assert plain_tokens(bytes.fromhex(f"930507 82 {tail}")) == (TokensOut(ids=b"\1\2\3\4", index=3), 7)
    assert plain_tokens(bytes.fromhex(f"930507 {entries} {tail}")) is None


def test_fields_travel_in_the_order_of_declaration() -> None:
    sent = encode(Generate(stop_ids=b"\1\0\0\0", temperature=0.5, max_tokens=1, tokens=b"\1\0\0\0"), 1)
    assert list(msgpack.unpackb(payload(sent))[2]) == ["tokens", "max_tokens", "temperature", "stop_ids"]


def test_maps_travel_sorted() -> None:
    def sent(*tokens: int) -> bytes:
        return encode(Generate(tokens=b"", logit_bias=dict.fromkeys(tokens, 0.5)), 1)

    assert sent(70000, 5, 300) == sent(5, 300, 70000)
    assert list(decode(payload(sent(300, 5)))[0].logit_bias) == [5, 300]


def test_a_long_prompt_comes_back() -> None:
    prompt = struct.pack("<I", 7) * 100_000
    assert decode(payload(encode(Generate(tokens=prompt), 1))) == (Generate(tokens=prompt), 1)


def test_a_wire_name_that_python_cannot_have() -> None:
    sent = payload(encode(Score(tokens=bytes(8), start=3), 1))
    assert msgpack.unpackb(sent)[2] == {"tokens": bytes(8), "from": 3}
    assert decode(sent)[0].start == 3


@pytest.mark.parametrize("tail", ["09", "cc09", "cd0009", "ce00000009", "cf0000000000000009", "d009", "d10009",
                                  "d200000009", "d30000000000000009"])
def test_ids_and_numbers_of_any_width(tail: str) -> None:
    data = bytes.fromhex(f"93 03 {tail} 82 a6746f6b656e73 c40401000000 aa6d61785f746f6b656e73 {tail}")
    assert decode(data) == (Generate(tokens=b"\1\0\0\0", max_tokens=9), 9)


def test_lists_of_token_ids_become_bytes() -> None:
    data = msgpack.packb([3, 1, {"tokens": [1, 2**32 - 1], "stop_seqs": [[5], b"\6\0\0\0"]}])
    assert decode(data)[0] == Generate(tokens=struct.pack("<2I", 1, 2**32 - 1), stop_seqs=(b"\5\0\0\0", b"\6\0\0\0"))


def test_unknown_fields_are_skipped() -> None:
    data = msgpack.packb([10, 0, {"data": b"x", "new": {"a": [1, {5: "ü"}]}}])
    assert decode(data) == (Ping(data=b"x"), 0)


def test_an_unknown_type_may_be_skipped_from_128_on() -> None:
    assert decode(msgpack.packb([200, 5, {}])) == (None, 5)
    with pytest.raises(ConnectionFault, match="type 127 is unknown"):
        decode(msgpack.packb([127, 5, {}]))


@pytest.mark.parametrize("broken", [
    Ping(data=object()),  # type: ignore[arg-type]
    Generate(tokens=b"", logit_bias={5: 0.5, "6": 0.5}),  # type: ignore[dict-item]
    Done(finish_reason="\udc00"),
    TokensOut(ids=b"", step=2**64),
])
def test_what_cannot_be_encoded_is_the_callers_fault(broken: Any) -> None:
    with pytest.raises(LocalError, match=f"{broken.NAME} cannot be encoded"):
        encode(broken, 1)
    assert encode(Ping(), 0) == bytes.fromhex("00000004 930a0080")  # the packer has not kept anything of it


def test_a_tag_and_a_name_are_given_once() -> None:
    before = dict(MESSAGES)
    for tag, name in ((3, "NEW"), (99, "GENERATE")):
        with pytest.raises(LocalError, match="is taken"):
            @message(tag, name, SERVER)
            class Taken:
                """A second one."""

                n: int = required(Int(), "A number.")
    assert before == MESSAGES


# ---- ERROR ---------------------------------------------------------------------------------------------------------


def test_error_message_says_what_the_exception_says() -> None:
    refused = InvalidMessage(Code.TOKEN_OUT_OF_RANGE, "tokens[2] is 9", "tokens", 2, 8)
    assert error_message(refused) == Error(code=203, message="tokens[2] is 9", field="tokens", index=2, limit=8)


@pytest.mark.parametrize(("code", "sent", "retryable"), [
    (Code.QUEUE_FULL, 0, True), (Code.WORKER_LOST, 0, True), (Code.WORKER_LOST, 3, False), (Code.POISONED, 0, False),
])
def test_error_message_says_whether_to_retry(code: Code, sent: int, retryable: bool) -> None:
    made = error_message(InvalidMessage(code, "no"), tokens_sent=sent, retry_after_ms=50)
    assert (made.retryable, made.tokens_sent, made.retry_after_ms) == (retryable, sent, 50)


@given(text=st.text(max_size=40).map(lambda t: t * 150), index=st.integers(), limit=st.integers())
def test_error_messages_can_always_be_sent(text: str, index: int, limit: int) -> None:
    """What the peer may have put into them is cut to what ERROR can carry."""
    made = error_message(InvalidMessage(Code.INVALID_ARGUMENT, text + "\udc00", text, index, limit))
    assert decode(payload(encode(made, 1)))[0] == made
