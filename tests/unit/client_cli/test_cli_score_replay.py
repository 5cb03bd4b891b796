"""colibri-client score and replay."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from colibri_client.text import Tokenizer
from colibri_protocol.errors import Code
from colibri_protocol.messages import Error, Generate, Score
from fixtures.command import Cli
from fixtures.little_daemon import LittleDaemon
from fixtures.scripted_server import pack, unpack

# ---- score ---------------------------------------------------------------------------------------------------------


def test_a_table_and_the_totals(cli: Cli, daemon: LittleDaemon, model_folder: Path) -> None:
    ids = Tokenizer(model_folder).encode("the é")
    outcome = cli("score", "the é", "--top", 1)
    *rows, total = outcome.out.splitlines()
    assert rows[0] == f'1\t{ids[1]}\t-0.5000\t" "\t"!":-0.2500'
    assert len(rows) == len(ids) - 1
    assert total == f"3 tokens, total log probability -1.5000, perplexity {math.exp(0.5):.4f}"
    assert daemon.last(Score) == Score(tokens=pack(ids), top=1)
    assert cli("score", "the é", "--quiet").out == f"{total}\n"


def test_json_scores(cli: Cli, daemon: LittleDaemon) -> None:
    body = cli("score", "--tokens", "7,8,9", "--start", 2, "--json").json
    assert body["tokens"] == [7, 8, 9]
    assert (body["start"], body["logprobs"], body["total_logprob"]) == (2, [-0.5], -0.5)
    assert body["perplexity"] == pytest.approx(math.exp(0.5))
    assert daemon.last(Score).start == 2
    body = cli("score", "--tokens", "7", "--json").json
    assert (body["logprobs"], body["perplexity"]) == ([], None)


def test_scores_of_ids_without_a_tokenizer(cli: Cli, model_folder: Path) -> None:
    (model_folder / "tokenizer.json").unlink()
    assert cli("score", "--tokens", "7,8").out.startswith("1\t8\t-0.5000\t\n1 tokens, ")


def test_a_refused_score(cli: Cli, daemon: LittleDaemon) -> None:
    daemon.error = Error(code=Code.QUEUE_FULL, message="16 requests are waiting")
    assert cli("score", "--tokens", "7").code == 1


# ---- replay --------------------------------------------------------------------------------------------------------


@pytest.fixture
def record(cli: Cli, tmp_path: Path) -> Any:
    """Runs generate --json and keeps what it wrote."""

    def make(*arguments: object) -> Path:
        outcome = cli("generate", "--json", "--quiet", *arguments)
        assert outcome.code == 0
        file = tmp_path / "record.json"
        file.write_text(outcome.out)
        return file

    return make


ARGUMENTS = ("--tokens", "7,8,9", "--max-tokens", 2, "--temperature", 0.5, "--seed", 5, "--stop-tokens", "1,2",
             "--stop-id", 6, "--logit-bias", "11=-1.5", "--min-tokens", 1)


def test_the_same_again(cli: Cli, daemon: LittleDaemon, record: Any) -> None:
    file = record(*ARGUMENTS)
    first = daemon.last(Generate)
    outcome = cli("replay", file)
    assert (outcome.code, outcome.out) == (0, "same: 2 tokens\n")
    assert daemon.last(Generate) == first
    assert cli("replay", file, "--json").json == {"result": "same", "detail": "2 tokens"}
    assert cli("replay", "-", stdin=file.read_text()).code == 0


def test_the_drawn_seed_is_replayed(cli: Cli, daemon: LittleDaemon, record: Any) -> None:
    file = record("--tokens", "7", "--temperature", 1)
    first = daemon.last(Generate)
    assert first.seed is not None
    assert cli("replay", file).code == 0
    assert daemon.last(Generate).seed == first.seed


@pytest.mark.parametrize(("again", "message"), [
    ([7, 9], "different: token 1 was 8 and is 9\n"),
    ([7], "different: there were 2 tokens and are 1\n"),
])
def test_other_tokens(cli: Cli, daemon: LittleDaemon, record: Any, again: list[int], message: str) -> None:
    file = record(*ARGUMENTS)
    daemon.output = lambda generate: again
    outcome = cli("replay", file)
    assert (outcome.code, outcome.out) == (1, message)


def test_another_end(cli: Cli, daemon: LittleDaemon, record: Any) -> None:
    file = record(*ARGUMENTS)
    daemon.finish = "stop"
    outcome = cli("replay", file)
    assert (outcome.code, outcome.out) == (1, "different: finish_reason was length and is stop\n")


@pytest.mark.parametrize("change", [{"id": "c" * 64}, {"fingerprint": "c" * 64}, {"pinned": 4}, {"window": 9},
                                    {"positions": "absolute"}, {"kv_format": "f32"}])
def test_a_record_of_another_model(cli: Cli, daemon: LittleDaemon, record: Any, change: dict[str, Any]) -> None:
    file = record(*ARGUMENTS)
    asked = daemon.count(Generate)
    daemon.model = replace(daemon.model, **change)
    outcome = cli("replay", file)
    assert outcome.code == 2
    assert outcome.out.startswith("incomparable: ")
    assert f"served {next(iter(change.values()))}" in outcome.out
    assert daemon.count(Generate) == asked


def test_an_output_that_was_cut_is_replayed_as_far_as_it_went(cli: Cli, daemon: LittleDaemon, record: Any,
                                                              model_folder: Path) -> None:
    ids = Tokenizer(model_folder).encode("the cat, the dog")
    daemon.output = lambda message: ids[: message.max_tokens]
    file = record("--tokens", "7", "--stop", ",", "--min-tokens", 100)
    kept = json.loads(file.read_text())["tokens"]
    assert cli("replay", file).code == 0
    sent = daemon.last(Generate)
    assert (sent.max_tokens, sent.min_tokens) == (len(kept), len(kept))
    assert unpack(sent.tokens) == [7]


def test_ndjson_can_be_replayed(cli: Cli, record: Any) -> None:
    assert cli("replay", record(*ARGUMENTS, "--stream")).code == 0


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"error": {}}', '{"request": {"tokens": [1]}}', b"\xff"])
def test_not_a_record(cli: Cli, tmp_path: Path, content: str | bytes) -> None:
    file = tmp_path / "record"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    outcome = cli("replay", file)
    assert outcome.code == 2
    assert "not what generate --json writes" in outcome.err


def test_no_file(cli: Cli) -> None:
    assert "nowhere: No such file" in cli("replay", "nowhere").err
