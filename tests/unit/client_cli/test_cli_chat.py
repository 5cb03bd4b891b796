"""colibri-client chat: a conversation from stdin, commands, the limit of the context, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from colibri_client.cli.chat import COMMANDS, Conversation
from colibri_client.text import TextError, Tokenizer
from colibri_protocol.errors import Code
from colibri_protocol.messages import Cancel, Error, Generate
from fixtures.command import Cli
from fixtures.little_daemon import LittleDaemon
from fixtures.models import TINY
from fixtures.scripted_server import unpack
from fixtures.tokenizers_made import write_folder


@pytest.fixture
def tokenizer(model_folder: Path, daemon: LittleDaemon) -> Tokenizer:
    """The daemon answers "the cat"."""
    made = Tokenizer(model_folder)
    ids = made.encode("the cat")
    daemon.output = lambda message: ids[: message.max_tokens]
    return made


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_a_conversation_grows(cli: Cli, daemon: LittleDaemon, tokenizer: Tokenizer) -> None:
    outcome = cli("chat", "--system", "be", "--set", "temperature=0.5", "--set", "max-tokens=50", "--quiet",
                  stdin="one\n\ntwo \\\nmore\n")
    assert (outcome.code, outcome.out, outcome.err) == (0, "the cat\nthe cat\n", "")
    sent = daemon.last(Generate)
    assert unpack(sent.tokens) == tokenizer.encode_chat([
        turn("system", "be"), turn("user", "one"), turn("assistant", "the cat"), turn("user", "two \nmore")])
    assert (sent.temperature, sent.max_tokens, unpack(sent.stop_ids)) == (0.5, 50, [4])


def test_the_summary_follows_each_answer(cli: Cli, tokenizer: Tokenizer) -> None:
    assert " · length\n" in cli("chat", stdin="one\n").err


def test_commands(cli: Cli, daemon: LittleDaemon, tokenizer: Tokenizer, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    lines = ["/set temperature 0.7", "/set top-k=5", "/set", "one", "/tokens", "/tokens the</s>", f"/save {saved}",
             "/set top_k", "/reset", "/tokens", "two", "/system be brief", "three", "/system", "four", "/exit", "five"]
    outcome = cli("chat", "--quiet", stdin="\n".join(lines))
    assert outcome.code == 0
    generated = [message for message in daemon.heard if isinstance(message, Generate)]
    assert [unpack(message.tokens) for message in generated] == [
        tokenizer.encode_chat(messages) for messages in (
            [turn("user", "one")], [turn("user", "two")], [turn("system", "be brief"), turn("user", "three")],
            [turn("user", "four")])]
    assert [(message.temperature, message.top_k) for message in generated] == [(0.7, 5)] + [(0.7, 0)] * 3
    assert "temperature 0.7\ntop_k 5\ncan be set: max_tokens, " in outcome.err
    count = len(tokenizer.encode_chat([turn("user", "one"), turn("assistant", "the cat")]))
    assert f"{count} of 1000 tokens\n" in outcome.err
    assert f'{tokenizer.encode("the")[0]} "the", ' in outcome.err
    assert "0 of 1000 tokens\n" in outcome.err
    assert json.loads(saved.read_text()) == {
        "model": "tiny", "settings": {"temperature": 0.7, "top_k": 5},
        "messages": [turn("user", "one"), turn("assistant", "the cat")]}


def test_help_has_every_command(cli: Cli) -> None:
    text = cli("chat", stdin="/help\n").err
    assert all(f"{command.usage} " in text for command in COMMANDS.values())


@pytest.mark.parametrize(("line", "message"), [
    ("/nonsense", "/nonsense is not a command; /help lists them"),
    ("/set nonsense 1", "error: nonsense cannot be set; there are max_tokens, "),
    ("/set temperature x", "error: temperature is 'x'; it must be a number"),
    ("/set temperature -1", "error: temperature is -1.0; it must be from 0 to 100"),
    ("/set temperature nan", "error: temperature is nan; it must be from 0 to 100"),
    ("/set top_k 1.5", "error: top_k is '1.5'; it must be an integer"),
    ("/save", "error: /save needs a file name"),
    ("/save /nowhere/x", "error: /nowhere/x: No such file or directory"),
])
def test_commands_that_do_nothing(cli: Cli, line: str, message: str) -> None:
    outcome = cli("chat", stdin=f"{line}\n")
    assert (outcome.code, outcome.out) == (0, "")
    assert message in outcome.err


def test_a_message_without_an_answer_is_taken_back(cli: Cli, daemon: LittleDaemon, tokenizer: Tokenizer) -> None:
    daemon.error = Error(code=Code.NON_FINITE, message="logits were NaN")
    outcome = cli("chat", "--quiet", stdin="one\n/tokens\n")
    assert outcome.code == 1
    assert "error: NON_FINITE (503): logits were NaN" in outcome.err
    assert "0 of 1000 tokens" in outcome.err


def test_command_lines_that_cannot_be_used(cli: Cli, model_folder: Path) -> None:
    outcome = cli("chat", "--set", "temperature=x", stdin="")
    assert (outcome.code, "--set temperature=x: temperature is 'x'" in outcome.err) == (2, True)
    outcome = cli("chat", "--model", TINY, stdin="one\n")
    assert (outcome.code, "has no chat template" in outcome.err) == (2, True)


def test_another_model_after_a_reload(cli: Cli, daemon: LittleDaemon, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """An output cannot go on with it, but the conversation does, with the tokenizer of the new one."""
    folder = write_folder(tmp_path / "other", "unigram")
    other = replace(daemon.model, id="d" * 64, name="other", folder=str(folder))

    def and_reload(message: Generate) -> list[int]:
        daemon.dies, daemon.model = daemon.model != other, other
        return [263]

    daemon.output = and_reload
    outcome = cli("chat", "--quiet", stdin="one\nthe cat\n")
    assert "MODEL_MISMATCH" in outcome.err
    assert "another model is served now: other\n" in outcome.err
    assert unpack(daemon.last(Generate).tokens) == Tokenizer(folder).encode_chat([turn("user", "the cat")])
    assert outcome.out.endswith("the\n")


# ---- Ctrl-C --------------------------------------------------------------------------------------------------------


def test_ctrl_c_cancels_the_answer_and_stays(cli: Cli, daemon: LittleDaemon, tokenizer: Tokenizer) -> None:
    daemon.finish = "hold"

    def interrupt() -> None:
        daemon.sent.wait()
        daemon.finish = "length"
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    outcome = cli("chat", "--quiet", stdin="one\ntwo\n")
    thread.join()
    assert (outcome.code, outcome.out) == (0, "the cat\nthe cat\n")
    assert outcome.err == "cancelled; what came so far stays in the conversation\n"
    assert daemon.count(Cancel) == 1
    assert unpack(daemon.last(Generate).tokens) == tokenizer.encode_chat(
        [turn("user", "one"), turn("assistant", "the cat"), turn("user", "two")])


# ---- the limit -----------------------------------------------------------------------------------------------------


def conversation(tokenizer: Tokenizer, exchanges: int, system: str | None = None) -> Conversation:
    made = Conversation(tokenizer, system)
    for number in range(exchanges):
        made.messages += [turn("user", f"question {number}"), turn("assistant", f"answer {number}")]
    made.messages.append(turn("user", "last"))
    return made


@pytest.mark.parametrize("system", [None, "be"])
def test_oldest_exchanges_go_first_and_the_system_prompt_stays(tokenizer: Tokenizer, system: str | None) -> None:
    whole, _ = conversation(tokenizer, 4, system).fit(10_000)
    short = conversation(tokenizer, 4, system)
    limit = len(whole)  # a quarter of it is kept for the answer
    tokens, dropped = short.fit(limit)
    assert len(tokens) <= limit - limit // 4
    assert dropped in (1, 2)
    first = 0 if system is None else 1
    assert short.messages[first] == turn("user", f"question {dropped}")
    assert short.messages[:first] == ([] if system is None else [turn("system", "be")])
    assert short.messages[-1] == turn("user", "last")
    assert tokens == tokenizer.encode_chat(short.messages)


def test_room_for_the_answer_is_no_more_than_is_asked_for(tokenizer: Tokenizer) -> None:
    made = conversation(tokenizer, 0)
    made.fields["max_tokens"] = 1
    length = len(tokenizer.encode_chat(made.messages))
    assert made.fit(length + 1) == (tokenizer.encode_chat(made.messages), 0)
    with pytest.raises(TextError, match=f"this message is too long: {length} tokens .* {length - 1} of {length} are"):
        made.fit(length)


def test_what_is_left_out_is_said(cli: Cli, daemon: LittleDaemon, tokenizer: Tokenizer) -> None:
    daemon.model = replace(daemon.model, max_len=120)
    outcome = cli("chat", "--quiet", stdin="one\n" * 4 + "x" * 200 + "\n")
    assert "the conversation is longer than the 120 tokens the model takes: its oldest exchange was left out" in (
        outcome.err)
    assert "error: this message is too long" in outcome.err
    assert outcome.code == 2
