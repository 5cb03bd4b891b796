"""The state of a connection, both roles: what is allowed when."""

from __future__ import annotations

from typing import Any

import pytest
from colibri_protocol.codec import encode, error_message, tokens_frame
from colibri_protocol.connection import (
    ABOUT_CONNECTION,
    ABOUT_LIVE,
    ABOUT_REQUEST,
    ALLOWED,
    REQUESTS,
    Connection,
    Event,
    Role,
    State,
    negotiate,
)
from colibri_protocol.errors import Code, ConnectionFault, InvalidMessage, LocalError
from colibri_protocol.message import BOTH, MESSAGES
from colibri_protocol.messages import (
    Bye,
    Cancel,
    Credit,
    Error,
    Generate,
    GoAway,
    Health,
    HealthReply,
    Hello,
    LimitInfo,
    Ping,
    Pong,
    Score,
    Scores,
    TokenCheck,
    TokenCheckReply,
    TokensOut,
    Welcome,
)
from fixtures.connections import DONE, GENERATE, GONE, HELLO, MODEL, ONE, WELCOME, fault, greeted, refusal, say
from fixtures.wire import minimal

# ---- in order ------------------------------------------------------------------------------------------------------


def test_a_request_lives_from_generate_to_done() -> None:
    client, server = greeted()
    say(client, server, GENERATE, 7)
    assert client.live == server.live == {7}
    assert client.receive(tokens_frame(7, ONE, 0, 1)) == [Event(TokensOut(ids=ONE, step=1), 7)]
    say(server, client, Scores(index=1, logprobs=b""), 7)
    say(server, client, DONE, 7)
    assert client.live == server.live == set()
    say(client, server, GENERATE, 7)  # the id is free again


@pytest.mark.parametrize(("request_", "end"), [
    (GENERATE, GONE), (Score(tokens=bytes(8)), DONE), (Score(tokens=bytes(8)), GONE),
    (TokenCheck(tokens=ONE), TokenCheckReply(prompt_tokens=1, max_tokens=1, slabs=1)), (TokenCheck(tokens=ONE), GONE),
])
def test_what_begins_and_ends_a_request(request_: Any, end: Any) -> None:
    client, server = greeted()
    say(client, server, request_, 2**64 - 1)
    assert client.live == server.live == {2**64 - 1}
    say(server, client, end, 2**64 - 1)
    assert client.live == server.live == set()


def test_what_goes_with_any_id() -> None:
    client, server = greeted()
    for request_id in (0, 5):
        say(client, server, Ping(data=b"x"), request_id)
        say(server, client, Pong(data=b"x"), request_id)
        say(server, client, Ping(), request_id)
        say(client, server, Health(), request_id)
        say(server, client, HealthReply(live=True, ready=True, state="ready"), request_id)


def test_cancel_and_credit_of_any_id_are_events() -> None:
    client, server = greeted()
    for message in (Cancel(), Credit(tokens=5)):
        say(client, server, message, 99)


def test_requests_may_follow_hello_at_once() -> None:
    client, server = Connection(Role.CLIENT), Connection(Role.SERVER)
    data = client.send(HELLO) + client.send(GENERATE, 1) + client.send(Bye())
    assert server.receive(data) == [Event(HELLO, 0), Event(GENERATE, 1), Event(Bye(), 0)]
    with pytest.raises(LocalError, match="before WELCOME"):
        server.send(DONE, 1)
    answer = server.send(WELCOME) + server.send(DONE, 1)
    assert [event.message for event in client.receive(answer)] == [WELCOME, DONE]
    assert client.finished
    assert server.finished


def test_negotiation_takes_the_common_version_and_features() -> None:
    assert negotiate(Hello(proto_min=0, proto_max=9, features=("new", "credit"))) == (1, ("credit",))
    assert negotiate(Hello(proto_min=1, proto_max=1)) == (1, ())


@pytest.mark.parametrize(("least", "most"), [(2, 9), (0, 0), (2, 0)])
def test_no_common_version(least: int, most: int) -> None:
    with pytest.raises(ConnectionFault) as raised:
        negotiate(Hello(proto_min=least, proto_max=most))
    assert raised.value.code is Code.VERSION


def test_the_client_keeps_to_the_servers_frame_limit() -> None:
    small = Welcome(proto=1, server="s", generation=1, model=MODEL, limits=LimitInfo(frame=100, requests=1))
    client, _ = greeted(welcome=small)
    with pytest.raises(LocalError, match="GENERATE has .* the frame limit is 100"):
        client.send(Generate(tokens=bytes(400)), 1)
    assert client.live == set()
    assert len(client.send(Generate(tokens=bytes(80)), 1)) <= 104


def test_credit_needs_its_feature() -> None:
    client, server = greeted(hello=Hello(proto_min=1, proto_max=1),
                             welcome=Welcome(proto=1, server="s", generation=1, model=MODEL, limits=WELCOME.limits))
    say(client, server, GENERATE, 1)
    with pytest.raises(LocalError, match="credit"):
        client.send(Credit(tokens=1), 1)


# ---- endings -------------------------------------------------------------------------------------------------------


def test_after_bye_live_requests_go_on_and_no_new_ones() -> None:
    client, server = greeted()
    say(client, server, GENERATE, 1)
    say(client, server, Bye())
    assert [client.finished, server.finished] == [False, False]
    with pytest.raises(LocalError, match="after BYE"):
        client.send(GENERATE, 2)
    assert refusal(server, encode(GENERATE, 2)).code is Code.PROTOCOL
    say(client, server, Cancel(), 1)
    say(server, client, DONE, 1)
    assert client.finished
    assert server.finished
    assert not server.closed
    assert fault(server, encode(Bye())).message == "BYE again"


def test_after_goaway_live_requests_go_on_and_new_ones_are_told() -> None:
    client, server = greeted()
    say(client, server, GENERATE, 1)
    crossing = client.send(GENERATE, 2)
    say(server, client, GoAway(reason="drain", last_id=1))
    refused = refusal(server, crossing)
    assert refused.code is Code.DRAINING
    with pytest.raises(LocalError, match="stopping"):
        client.send(GENERATE, 3)
    say(server, client, error_message(refused), 2)
    say(server, client, DONE, 1)
    assert client.live == server.live == set()
    assert client.finished
    say(client, server, Bye())
    with pytest.raises(LocalError, match="GOAWAY again"):
        server.send(GoAway(reason="drain"))


def test_an_error_with_id_0_is_the_last_word() -> None:
    client, server = greeted()
    say(client, server, GENERATE, 1)
    data = server.send(GONE)
    assert client.receive(data + b"rubbish" * 9) == [Event(GONE, 0)]
    for conn in (client, server):
        assert conn.closed
        assert conn.finished
        assert conn.receive(b"\0\0\0\0") == []
    for conn, message in ((server, GONE), (server, Ping()), (client, Bye())):
        with pytest.raises(LocalError, match="closed connection"):
            conn.send(message)


def test_a_server_may_refuse_before_hello() -> None:
    client, server = Connection(Role.CLIENT), Connection(Role.SERVER)
    full = Error(code=int(Code.TOO_MANY_CONNECTIONS), message="full")
    assert client.receive(server.send(full)) == [Event(full, 0)]
    assert client.closed


def test_half_close_means_bye_if_hello_said_so() -> None:
    client, server = greeted(Hello(proto_min=1, proto_max=1, half_close_ok=True))
    say(client, server, GENERATE, 1)
    server.receive_eof()
    assert not server.closed
    assert not server.finished
    say(server, client, DONE, 1)
    assert server.finished


@pytest.mark.parametrize("role", Role)
def test_end_of_file_closes(role: Role) -> None:
    conn = dict(zip(Role, greeted(), strict=True))[role]
    conn.receive_eof()
    assert conn.closed


@pytest.mark.parametrize("half_close_ok", [False, True])
def test_end_of_file_in_a_frame_is_a_fault(half_close_ok: bool) -> None:
    _, server = greeted(Hello(proto_min=1, proto_max=1, half_close_ok=half_close_ok))
    assert not server.needs_more
    server.receive(b"\0\0")
    assert server.needs_more
    with pytest.raises(ConnectionFault, match="in the middle of a frame"):
        server.receive_eof()
    assert server.closed
    assert not server.needs_more


# ---- the table -----------------------------------------------------------------------------------------------------

STATES: dict[str, Any] = {
    "start": lambda: (Connection(Role.CLIENT), Connection(Role.SERVER)),
    "open": greeted,
    "ending": lambda: _ending(*greeted()),
}


def _ending(client: Connection, server: Connection) -> tuple[Connection, Connection]:
    crossing = client.send(Bye())
    client.receive(server.send(GoAway(reason="drain")))
    server.receive(crossing)
    return client, server


@pytest.mark.parametrize("made", MESSAGES.values(), ids=lambda made: made.NAME)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("role", Role)
def test_sending_and_receiving_agree(role: Role, state: str, made: Any) -> None:
    """What one side refuses to send is a fault or a refusal on the other, and the other way round."""
    pair = dict(zip(Role, STATES[state](), strict=True))
    speaker, hearer = pair[role], next(pair[r] for r in Role if r is not role)
    request_id = 5 if made in ABOUT_REQUEST else 0
    if made in ABOUT_LIVE:
        speaker.live.add(request_id)
        hearer.live.add(request_id)
    message = minimal(made)
    try:
        data = speaker.send(message, request_id)
    except LocalError:
        try:
            ((heard, _),) = hearer.receive(encode(message, request_id))
        except ConnectionFault as refused:
            heard = refused
        assert isinstance(heard, InvalidMessage | ConnectionFault)
    else:
        assert hearer.receive(data) == [Event(message, request_id)]
        assert made.SENDER in (role, BOTH)


def test_the_table_is_total() -> None:
    assert set(ALLOWED) == {(role, state) for role in Role for state in State}
    sayable = frozenset().union(*ALLOWED.values())
    assert sayable == set(MESSAGES.values())
    assert not ABOUT_REQUEST & ABOUT_CONNECTION
    assert REQUESTS | ABOUT_LIVE < ABOUT_REQUEST


@pytest.mark.parametrize("made", ABOUT_REQUEST | ABOUT_CONNECTION, ids=lambda made: made.NAME)
def test_ids_where_they_belong(made: Any) -> None:
    wrong = 0 if made in ABOUT_REQUEST else 5
    pair = dict(zip(Role, STATES["start" if made in (Hello, Welcome) else "open"](), strict=True))
    if made is Welcome:
        pair[Role.SERVER].receive(pair[Role.CLIENT].send(HELLO))
    speaker = pair[Role(made.SENDER)]
    hearer = next(conn for conn in pair.values() if conn is not speaker)
    with pytest.raises(LocalError, match=r"request id|its id is 0"):
        speaker.send(minimal(made), wrong)
    assert fault(hearer, encode(minimal(made), wrong)).code is Code.PROTOCOL
