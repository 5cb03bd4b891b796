"""colibri-client generate: prompts, parameters, output, ends."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from colibri_client.text import Tokenizer
from colibri_protocol.errors import Code
from colibri_protocol.messages import Cache, Cancel, Error, Generate, StopMatch
from fixtures.command import Cli
from fixtures.little_daemon import LittleDaemon
from fixtures.models import TINY
from fixtures.scripted_server import pack, unpack


def says(daemon: LittleDaemon, folder: Path, text: str) -> list[int]:
    """Makes the daemon answer with a text."""
    ids = Tokenizer(folder).encode(text)
    daemon.output = lambda message: ids[: message.max_tokens]
    return ids


def prompt_sent(daemon: LittleDaemon) -> list[int]:
    return unpack(daemon.last(Generate).tokens)


# ---- prompts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["7,8,9", "7 8\n9 ", "[7, 8, 9]", "7, 8,9,"])
def test_token_ids_in_every_notation(text: str, daemon: LittleDaemon, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "ids").write_text(text)
    for arguments, stdin in ((["--tokens", text], None), (["--tokens-file", tmp_path / "ids"], None),
                             (["--tokens-file", "-"], text)):
        assert cli("generate", *arguments, stdin=stdin).code == 0
        assert prompt_sent(daemon) == [7, 8, 9]


def test_raw_token_ids(daemon: LittleDaemon, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "ids").write_bytes(pack([7, 8, 299]))
    assert cli("generate", "--raw", "--tokens-file", tmp_path / "ids").code == 0
    assert prompt_sent(daemon) == [7, 8, 299]


def test_text_from_argument_option_and_stdin(daemon: LittleDaemon, cli: Cli, model_folder: Path) -> None:
    expected = Tokenizer(model_folder).encode("the ü <|im_end|>")
    for arguments, stdin in ((["the ü <|im_end|>"], None), (["--text", "the ü <|im_end|>"], None),
                             (["-"], "the ü <|im_end|>\n"), (["--text", "-"], "the ü <|im_end|>")):
        assert cli("generate", *arguments, stdin=stdin).code == 0
        assert prompt_sent(daemon) == expected
    assert 4 not in expected


def test_chat(daemon: LittleDaemon, cli: Cli, model_folder: Path) -> None:
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "the </s>"}]
    assert cli("generate", "--chat", "the </s>", "--system", "be").code == 0
    assert prompt_sent(daemon) == Tokenizer(model_folder).encode_chat(messages)
    assert unpack(daemon.last(Generate).stop_ids) == [4], "the end of a turn, which the model's settings do not have"
    assert cli("generate", "--chat", "-", "--ignore-eos", stdin="the </s>\n").code == 0
    assert prompt_sent(daemon) == Tokenizer(model_folder).encode_chat(messages[1:])
    assert daemon.last(Generate).stop_ids == b""
    daemon.model = replace(daemon.model, eos_ids=(2, 4))
    assert cli("generate", "--chat", "the").code == 0
    assert daemon.last(Generate).stop_ids == b"", "the daemon stops there by itself"


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "no prompt given; pass one of TEXT, --tokens"),
    (["a", "--text", "b"], "TEXT and --text given"),
    (["--tokens", "1", "--chat", "b"], "--tokens and --chat given"),
    (["--tokens", "1,x"], "--tokens: entry 1 is 'x', not a token id"),
    (["--tokens", "1.5"], "entry 0 is '1.5'"),
    (["--tokens", "[1, true]"], "entry 1 is true, not a token id"),
    (["--tokens", "[1"], "not a JSON list"),
    (["--tokens", "1", "--raw"], "--raw is about --tokens-file"),
    (["--text", "a", "--system", "b"], "--system needs --chat"),
    (["--tokens-file", "/nowhere/ids"], "/nowhere/ids: No such file or directory"),
    (["--tokens", "1", "--stop", ""], "--stop is empty"),
    (["--tokens", "1", "--stream"], "--stream is about --json"),
    (["--tokens", "1", "--prompt-logprobs", "1"], "--prompt-logprobs needs --json"),
    (["--tokens", "1", "--logit-bias", "1"], "--logit-bias 1: it must be ID=VALUE"),
    (["--tokens", "1", "--stop-tokens", "x"], "--stop-tokens: entry 0 is 'x'"),
    (["--tokens", "1", "--temperature", "-1"], "-1.0 is not in the range 0<=x<=100"),
    (["--tokens", "1", "--max-tokens", "1.5"], "not a valid integer"),
    (["--tokens", "1", "--deadline", "0"], "is not in the range"),
    (["--tokens", "1", "--temprature", "1"], "No such option"),
])
def test_command_lines_that_cannot_be_used(arguments: list[str], message: str, cli: Cli, daemon: LittleDaemon) -> None:
    outcome = cli("generate", *arguments)
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.out == ""
    assert daemon.count(Generate) == 0


def test_input_that_cannot_be_used(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "ids").write_bytes(b"12345")
    outcome = cli("generate", "--raw", "--tokens-file", tmp_path / "ids")
    assert (outcome.code, "5 bytes; --raw token ids are 4 bytes each" in outcome.err) == (2, True)
    outcome = cli("generate", "-", stdin=b"a\xff")
    assert (outcome.code, "stdin: not UTF-8 at byte 1" in outcome.err) == (2, True)


# ---- parameters ----------------------------------------------------------------------------------------------------


def test_every_parameter_reaches_its_field(cli: Cli, daemon: LittleDaemon) -> None:
    outcome = cli("generate", "--tokens", "7", "--max-tokens", 9, "--min-tokens", 1, "--temperature", 0.5, "--top-k", 3,
                  "--top-p", 0.9, "--min-p", 0.1, "--repetition-penalty", 1.1, "--presence-penalty", 0.2,
                  "--frequency-penalty", 0.3, "--seed", 2**64 - 1, "--ignore-eos", "--logprobs", 2, "--priority", -5,
                  "--tenant", "t", "--stop-id", 6, "--stop-id", 7, "--stop-tokens", "8,9", "--stop-tokens", "[10]",
                  "--logit-bias", "11=-1.5", "--logit-bias", "12=2", "--deadline", 1.5, "--no-cache")
    assert outcome.code == 0
    assert daemon.last(Generate) == Generate(
        tokens=pack([7]), max_tokens=9, min_tokens=1, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1,
        repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3, seed=2**64 - 1, ignore_eos=True,
        logprobs=2, priority=-5, tenant="t", stop_ids=pack([6, 7]), stop_seqs=(pack([8, 9]), pack([10])),
        logit_bias={11: -1.5, 12: 2.0}, deadline_ms=1500, cache=Cache(use=False))


def test_what_is_not_given_is_not_sent(cli: Cli, daemon: LittleDaemon) -> None:
    assert cli("generate", "--tokens", "7").code == 0
    assert daemon.last(Generate) == Generate(tokens=pack([7]))


def test_model_defaults(cli: Cli, daemon: LittleDaemon, model_folder: Path) -> None:
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": None, "eos_token_id": 2}
    (model_folder / "generation_config.json").write_text(json.dumps(config))
    assert cli("generate", "--tokens", "7", "--model-defaults", "--top-p", 0.5, "--seed", 1).code == 0
    assert daemon.last(Generate) == Generate(tokens=pack([7]), temperature=0.6, top_p=0.5, seed=1)
    (model_folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    assert cli("generate", "--tokens", "7", "--model-defaults").code == 0
    assert daemon.last(Generate) == Generate(tokens=pack([7])), "a model that does not sample is greedy"
    (model_folder / "generation_config.json").unlink()
    assert cli("generate", "--tokens", "7", "--model-defaults").code == 0


# ---- output --------------------------------------------------------------------------------------------------------


def test_text_goes_to_stdout_and_the_summary_to_stderr(cli: Cli, daemon: LittleDaemon, model_folder: Path) -> None:
    ids = says(daemon, model_folder, "the ü 😀!")
    outcome = cli("generate", "--tokens", "7")
    assert outcome.out == "the ü 😀!\n"
    assert outcome.err.startswith(f"{len(ids)} tokens · first after 0.")
    assert outcome.err.endswith(" tokens/s · 1 of 1 prompt tokens from the cache · length\n")
    assert cli("generate", "--tokens", "7", "--quiet").err == ""


def test_ids_without_a_tokenizer_or_if_wanted(cli: Cli, daemon: LittleDaemon, model_folder: Path) -> None:
    ids = says(daemon, model_folder, "the")
    assert cli("generate", "--tokens", "7", "--ids").out == f"{ids[0]}\n"
    (model_folder / "tokenizer.json").unlink()
    assert cli("generate", "--tokens", "7").out == f"{ids[0]}\n"
    daemon.output = lambda message: [7, 8]
    assert cli("generate", "--tokens", "7").out == "7 8\n"
    outcome = cli("generate", "--tokens", "7", "--model", model_folder)
    assert (outcome.code, outcome.out) == (2, ""), "a folder that is named must be good"


def test_another_tokenizer_folder(cli: Cli, daemon: LittleDaemon, bare: Cli) -> None:
    expected = Tokenizer(TINY).encode("the")
    assert cli("generate", "the", "--model", TINY).code == 0
    assert prompt_sent(daemon) == expected
    assert bare("generate", "the", env={"COLIBRI_SOCKET": str(daemon.path), "COLIBRI_MODEL": str(TINY)}).code == 0
    assert prompt_sent(daemon) == expected


def test_rows_with_log_probabilities(cli: Cli, daemon: LittleDaemon, model_folder: Path) -> None:
    the = says(daemon, model_folder, "the")[0]
    outcome = cli("generate", "--tokens", "7", "--logprobs", 2)
    bang = Tokenizer(model_folder).name(5)
    assert outcome.out == f'0\t{the}\t-0.5000\t"the"\t"the":-0.5000\t{json.dumps(bang)}:-inf\n'


def test_json(cli: Cli, daemon: LittleDaemon, model_folder: Path) -> None:
    ids = says(daemon, model_folder, "the cat")
    daemon.finish, daemon.match = "stop", StopMatch(kind="eos", value=2)
    outcome = cli("generate", "--tokens", "7", "--json", "--logprobs", 1, "--temperature", 1, "--max-tokens", 5000,
                  "--stop-tokens", "1,2", "--logit-bias", "9=1")
    body = outcome.json
    sent = daemon.last(Generate)
    assert body["text"] == "the cat"
    assert body["tokens"] == ids
    assert body["logprobs"] == [-0.5] * len(ids)
    assert body["top"] == [[[id, -0.5]] for id in ids]
    assert (body["finish_reason"], body["stop_match"]) == ("stop", {"kind": "eos", "value": 2})
    assert body["usage"] == {"prompt": 1, "cached": 1, "generated": len(ids)}
    assert body["times_ms"] == {"queue": 1.0, "prefill": 0.0, "decode": 0.0}
    assert body["first_token_s"] > 0
    assert body["receipt"]["fingerprint"] == "b" * 64
    assert body["request"] == {
        "tokens": [7], "max_tokens": 999, "min_tokens": 0, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {"9": 1.0},
        "seed": sent.seed, "stop_ids": [], "stop_seqs": [[1, 2]], "ignore_eos": False, "stop": []}
    assert body["seed"] == sent.seed is not None


def test_minus_infinity_is_valid_json(cli: Cli, daemon: LittleDaemon) -> None:
    body = cli("generate", "--tokens", "7", "--json", "--logprobs", 2).json
    assert body["top"] == [[[7, -0.5], [5, -9999.0]]]


def test_ndjson(cli: Cli, daemon: LittleDaemon, model_folder: Path) -> None:
    ids = says(daemon, model_folder, "theé")
    *tokens, last = cli("generate", "--tokens", "7", "--json", "--stream").lines
    assert [line["type"] for line in tokens] == ["token"] * len(ids)
    assert [line["id"] for line in tokens] == ids
    assert [line["text"] for line in tokens] == ["the", "", "é"]
    assert (last["type"], last["tokens"], last["text"]) == ("done", ids, "theé")
    daemon.output = lambda message: ids[:2]
    assert cli("generate", "--tokens", "7", "--json", "--stream").lines[-2] == {"type": "text", "text": "\ufffd"}


def test_no_tokens_at_all(cli: Cli, daemon: LittleDaemon) -> None:
    outcome = cli("generate", "--tokens", "7", "--max-tokens", 0)
    assert (outcome.code, outcome.out, outcome.err) == (0, "\n", "0 tokens · 1 of 1 prompt tokens from the cache · "
                                                        "length\n")


# ---- stop strings --------------------------------------------------------------------------------------------------


def test_a_stop_string_cancels_the_request(cli: Cli, daemon: LittleDaemon, model_folder: Path) -> None:
    ids = says(daemon, model_folder, "the cat, the dog")
    daemon.finish = "hold"
    outcome = cli("generate", "--tokens", "7", "--stop", "dog!", "--stop", ", t")
    assert (outcome.code, outcome.out) == (0, "the cat\n")
    assert outcome.err.endswith('stop (", t")\n')
    assert daemon.count(Cancel) == 1
    body = cli("generate", "--tokens", "7", "--stop", ", ", "--json").json
    assert body["text"] == "the cat"
    assert (body["finish_reason"], body["stop_match"]) == ("stop", {"kind": "text", "value": 0})
    assert body["tokens"] == ids[: len(body["tokens"])], "up to the token that completed it, whatever came after"
    assert Tokenizer(model_folder).decode(body["tokens"]) == "the cat, the"


def test_half_a_stop_string_comes_at_the_end(cli: Cli, daemon: LittleDaemon, model_folder: Path) -> None:
    says(daemon, model_folder, "the cat,")
    assert cli("generate", "--tokens", "7", "--stop", ",,").out == "the cat,\n"


def test_a_special_token_as_stop_string_is_a_stop_id(cli: Cli, daemon: LittleDaemon) -> None:
    assert cli("generate", "--tokens", "7", "--stop", "<|im_end|>", "--stop-id", 9).code == 0
    assert unpack(daemon.last(Generate).stop_ids) == [9, 4]


def test_stop_strings_need_a_tokenizer(cli: Cli, daemon: LittleDaemon, model_folder: Path) -> None:
    (model_folder / "tokenizer.json").unlink()
    outcome = cli("generate", "--tokens", "7", "--stop", "x")
    assert (outcome.code, "use --stop-tokens" in outcome.err) == (2, True)


# ---- errors and interruption ---------------------------------------------------------------------------------------

TOO_LONG = Error(code=Code.PROMPT_TOO_LONG, message="tokens has 1001 tokens; at most 999 are allowed", field="tokens",
                 limit=999)


def test_a_refused_request(cli: Cli, daemon: LittleDaemon) -> None:
    daemon.output, daemon.error = lambda message: [], TOO_LONG
    outcome = cli("generate", "--tokens", "7")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == ("error: PROMPT_TOO_LONG (202): tokens has 1001 tokens; at most 999 are allowed; shorten the "
                           "prompt; the daemon's --max-tokens-total bounds prompt and output together\n")
    error = cli("generate", "--tokens", "7", "--json").json["error"]
    assert (error["code"], error["name"], error["field"], error["limit"]) == (202, "PROMPT_TOO_LONG", "tokens", 999)


def test_the_field_is_named_even_if_the_message_does_not(cli: Cli, daemon: LittleDaemon) -> None:
    daemon.error = Error(code=Code.UNSUPPORTED, message="no such thing here", field="tenant")
    assert cli("generate", "--tokens", "7").err == "error: UNSUPPORTED (206): no such thing here (field tenant)\n"


def test_what_came_before_a_failure_is_printed(cli: Cli, daemon: LittleDaemon, model_folder: Path) -> None:
    says(daemon, model_folder, "the cat")
    daemon.error = Error(code=Code.NON_FINITE, message="logits were NaN")
    outcome = cli("generate", "--tokens", "7", "--stop", "catch")
    assert (outcome.code, outcome.out) == (1, "the cat\n")
    assert cli("generate", "--tokens", "7", "--json").json["error"]["tokens"]


def test_a_request_found_wrong_before_it_is_sent(cli: Cli, daemon: LittleDaemon) -> None:
    outcome = cli("generate", "--tokens", "7,-1")
    assert (outcome.code, daemon.count(Generate)) == (1, 0)
    assert outcome.err.startswith("error: TOKEN_OUT_OF_RANGE (203): tokens[1] is -1")
    assert cli("generate", "--tokens", "").err.startswith("error: PROMPT_EMPTY (201)")


def test_no_daemon(bare: Cli, tmp_path: Path) -> None:
    outcome = bare("generate", "--tokens", "7", "--socket", tmp_path / "none")
    assert (outcome.code, outcome.out) == (3, "")
    assert f"{tmp_path / 'none'}: there is no socket here" in outcome.err
    outcome = bare("generate", "--tokens", "7", "--json", "--socket", tmp_path / "none")
    assert outcome.json["error"]["type"] == "ConnectionFailed"


def test_one_ctrl_c_cancels_at_the_daemon(cli: Cli, daemon: LittleDaemon, model_folder: Path) -> None:
    says(daemon, model_folder, "the cat")
    daemon.finish = "hold"
    interrupting(daemon)
    outcome = cli("generate", "--tokens", "7", "--quiet")
    assert (outcome.code, outcome.out) == (130, "the cat\n")
    assert outcome.err.endswith("cancelled by Ctrl-C\n")
    assert daemon.count(Cancel) == 1
    daemon.sent.clear()
    interrupting(daemon)
    assert cli("generate", "--tokens", "7", "--json").json["finish_reason"] == "abort"


def interrupting(daemon: LittleDaemon) -> None:
    """Ctrl-C when the daemon has sent all it has."""

    def interrupt() -> None:
        daemon.sent.wait()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()


def test_a_reader_that_goes_away(daemon: LittleDaemon) -> None:
    """A real process in a real pipe: quiet, exit code 141, as with SIGPIPE."""
    daemon.output = lambda message: [200] * 100_000  # more than a pipe holds
    program = Path(sys.executable).with_name("colibri-client")
    command = [program, "--socket", daemon.path, "generate", "--tokens", "7", "--ids"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(8) == b"200 200 "
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_raw_files_are_little_endian(cli: Cli, daemon: LittleDaemon, tmp_path: Path) -> None:
    (tmp_path / "ids").write_bytes(struct.pack("<2I", 1, 256))
    assert cli("generate", "--raw", "--tokens-file", tmp_path / "ids").code == 0
    assert prompt_sent(daemon) == [1, 256]
