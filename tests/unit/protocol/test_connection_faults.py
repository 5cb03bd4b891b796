"""What a connection makes of a peer that breaks the rules, and of any bytes in any pieces."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import msgpack
import pytest
from colibri_protocol.codec import encode, error_message
from colibri_protocol.connection import (
    ABOUT_LIVE,
    Connection,
    Event,
    Role,
)
from colibri_protocol.errors import Code, ConnectionFault, LocalError
from colibri_protocol.framing import frame
from colibri_protocol.message import MESSAGES, SERVER
from colibri_protocol.messages import (
    Bye,
    Cancel,
    Error,
    Generate,
    Health,
    Hello,
    Ping,
    Score,
    TokenCheck,
    Welcome,
)
from fixtures.connections import DONE, GENERATE, HELLO, ONE, WELCOME, fault, greeted, heard, refusal, say
from fixtures.wire import minimal
from hypothesis import given
from hypothesis import strategies as st

VECTORS = json.loads((Path(__file__).parents[2] / "golden" / "protocol" / "vectors.json").read_text(encoding="utf-8"))
FROM_CLIENTS = {tag for tag, made in MESSAGES.items() if made.SENDER != SERVER} - {Hello.TAG}
BAD_REQUESTS = [v for v in VECTORS["refused"] if not v["fault"] and bytes.fromhex(v["hex"])[5] in FROM_CLIENTS]


# ---- what a peer does wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", BAD_REQUESTS, ids=lambda v: v["name"])
def test_a_bad_request_fails_alone(vector: dict[str, Any]) -> None:
    client, server = greeted()
    say(client, server, GENERATE, 1)
    refused = refusal(server, bytes.fromhex(vector["hex"]))
    assert (refused.code.name, refused.field, refused.index) == (vector["code"], vector["field"], vector["index"])
    ((told, request_id),) = client.receive(server.send(error_message(refused), 9))
    assert (told.code, told.field, request_id) == (refused.code, refused.field, 9)
    assert server.live == {1}
    say(client, server, GENERATE, 2)


@pytest.mark.parametrize("vector", [v for v in VECTORS["refused"] if v["fault"] and v["name"] != "unknown type"],
                         ids=lambda v: v["name"])
def test_a_broken_frame_ends_the_connection(vector: dict[str, Any]) -> None:
    client, server = greeted()
    found = fault(server, encode(GENERATE, 1) + bytes.fromhex(vector["hex"]) + encode(GENERATE, 2))
    assert found.code.name == vector["code"]
    assert found.events == [Event(GENERATE, 1)]
    assert server.receive(encode(GENERATE, 3)) == []
    assert client.receive(server.send(error_message(found)))[0].message.code == found.code


def test_an_unknown_type_fails_alone() -> None:
    _, server = greeted()
    assert refusal(server, frame(msgpack.packb([77, 5, {}]))).code is Code.PROTOCOL
    assert server.receive(frame(msgpack.packb([200, 5, "anything"]))) == []
    assert fault(server, frame(msgpack.packb([77, 0, {}]))).code is Code.PROTOCOL


@pytest.mark.parametrize("data", [encode(GENERATE, 1), encode(Score(tokens=b""), 1), encode(TokenCheck(tokens=b""), 1),
                                  frame(msgpack.packb([3, 1, {"tokens": None}])), frame(msgpack.packb([77, 1, {}]))])
def test_a_second_message_with_a_live_id_leaves_the_first_alone(data: bytes) -> None:
    client, server = greeted()
    say(client, server, GENERATE, 1)
    refused = refusal(server, data)
    assert refused.code is Code.DUPLICATE_ID
    say(server, client, error_message(refused), 1)
    assert client.live == server.live == {1}
    say(server, client, DONE, 1)


@pytest.mark.parametrize("message", [
    [9, 1, {"tokens": 0}], [8, 1, {"reason": 5}], [10, 1, {"data": bytes(65)}], [10, 0, {"data": bytes(65)}],
    [12, 0, []],
])
def test_a_bad_body_that_no_request_can_answer_for_ends_the_connection(message: list[Any]) -> None:
    client, server = greeted()
    say(client, server, GENERATE, 1)
    assert fault(server, frame(msgpack.packb(message))).code is Code.PROTOCOL


def test_what_a_client_hears_of_a_bad_body() -> None:
    client, server = greeted()
    say(client, server, GENERATE, 1)
    assert refusal(client, frame(msgpack.packb([5, 1, {}]))).field == "ids"
    assert client.live == {1}
    assert refusal(client, frame(msgpack.packb([6, 1, {}]))).field == "finish_reason"
    assert client.live == set()


@pytest.mark.parametrize("made", ABOUT_LIVE, ids=lambda made: made.NAME)
def test_nothing_comes_after_the_end_of_a_request(made: Any) -> None:
    client, server = greeted()
    say(client, server, GENERATE, 1)
    say(server, client, DONE, 1)
    with pytest.raises(LocalError, match="not live"):
        server.send(minimal(made), 1)
    assert "not live" in fault(client, encode(minimal(made), 1)).message


def test_a_server_reports_a_fault_after_what_came_before() -> None:
    server = Connection(Role.SERVER)
    found = fault(server, encode(HELLO) + b"\0\0\0\0")
    assert found.events == [Event(HELLO, 0)]
    client = Connection(Role.CLIENT)
    client.send(HELLO)
    told = client.receive(server.send(WELCOME) + server.send(error_message(found)))
    assert [type(event.message) for event in told] == [Welcome, Error]


# ---- any bytes -----------------------------------------------------------------------------------------------------

requests = st.tuples(st.sampled_from([
    GENERATE, Score(tokens=bytes(8)), TokenCheck(tokens=ONE), Cancel(reason="x"), Ping(data=b"abc"), Health(),
    Generate(tokens=ONE * 50, temperature=0.5), Generate(tokens=ONE, seed=2**64 - 1),
]), st.integers(1, 3)).map(lambda pair: encode(*pair))
refused_ = st.sampled_from([frame(msgpack.packb([3, 9, {"tokens": None}])), frame(msgpack.packb([200, 0, {}]))])
endings = st.sampled_from([b"", encode(Bye()), encode(GENERATE, 4)[:9], bytes(4), b"\xff" * 8, frame(b"\xc1"),
                           encode(HELLO)])


@given(messages=st.lists(requests | refused_, max_size=8), end=endings,
       cuts=st.lists(st.integers(0, 2000), max_size=12))
def test_any_split_gives_the_same_events(messages: list[bytes], end: bytes, cuts: list[int]) -> None:
    stream = encode(HELLO) + b"".join(messages) + end
    places = sorted({0, len(stream), *(cut % len(stream) for cut in cuts)})
    split = [stream[a:b] for a, b in zip(places, places[1:], strict=False)]
    whole = heard([stream])
    assert heard(split) == whole
    assert heard([stream[i : i + 1] for i in range(len(stream))]) == whole


@given(data=st.binary(max_size=200) | st.binary(min_size=1, max_size=60).map(frame), role=st.sampled_from(Role))
def test_random_bytes_end_the_connection_or_are_understood(data: bytes, role: Role) -> None:
    conn = dict(zip(Role, greeted(), strict=True))[role]
    try:
        conn.receive(data)
    except ConnectionFault as found:
        assert conn.closed
        assert conn.receive(data) == []
        if role is Role.SERVER:
            conn.send(error_message(found))


def test_bombs_cost_no_memory() -> None:
    bombs = [b"\xdc\xff\xff" * 23333, b"\x93\x03\x09" + b"\xdc\x00\x01" * 23333, b"\x93\x03\x09\xdd\xff\xff\xff\xff",
             b"\x93\x03\x09\x81\xa1x\xdf\xff\xff\xff\xff", b"\x93\x03\x09\xdc\x10\x00" + b"\xdc\x10\x00" * 4096]
    stream = [encode(HELLO) + frame(bomb) for bomb in bombs] + [encode(HELLO) + b"\0\x0f\xff\xff" + bytes(1000)]
    tracemalloc.start()
    try:
        for data in stream:
            heard([data[i : i + 4096] for i in range(0, len(data), 4096)])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
