"""colibrid perplexity: how a text is cut, what is averaged, and what int8 routing costs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from colibri_engine import Engine, commands
from colibri_engine.container import Manifest
from colibri_engine.geometry import default_attention
from colibri_engine.perplexity import Plan, TextError, load_tokens, score, tokenise
from fixtures.models import TEXT, TINY, Models, golden_arrays

SENTENCE = "The cat sat on the mat, and the dog looked at it for a while. " * 12


def run(*args: object) -> Result:
    result = CliRunner().invoke(commands.perplexity, [str(a) for a in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def measured(*args: object) -> dict[str, float]:
    result = run(*args, "--json", "--quiet")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


def exp_mean(logprobs: np.ndarray) -> float:
    return float(np.exp(-logprobs.astype(np.float64).mean()))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(SENTENCE)
    return path


def test_golden_windows(models: Models, tmp_path: Path) -> None:
    golden = golden_arrays(TEXT / "tiny")
    np.save(tmp_path / "ids.npy", golden["short_ids"][:3].reshape(-1))
    found = measured(models.tiny("f32"), tmp_path / "ids.npy", "--tokens")
    expected = golden["short_logprobs"][:3]
    assert found["perplexity"] == pytest.approx(exp_mean(expected), rel=1e-4)
    assert found["perplexity_second_half"] == pytest.approx(exp_mean(expected[:, 255:]), rel=1e-4)
    assert (found["windows"], found["tokens"], found["scored"]) == (3, 1536, 3 * 511)
    half = measured(models.tiny("f32"), tmp_path / "ids.npy", "--tokens", "--second-half", "--limit", "2")
    assert half["perplexity"] == pytest.approx(exp_mean(expected[:2, 255:]), rel=1e-4)
    assert half["scored"] == 2 * 256


def test_one_long_text_under_a_mask(models: Models, tmp_path: Path) -> None:
    golden = golden_arrays(TEXT / "tiny")
    np.savez(tmp_path / "ids.npz", tokens=golden["long_ids"], other=np.zeros(1))
    found = measured(models.tiny("f32"), tmp_path / "ids.npz", "--tokens", "--long", "--limit", "700", "--pinned", "16",
                     "--window", "128", "--positions", "absolute")
    expected = golden["long_P16_W128_absolute_logprobs"][:699]
    assert found["perplexity"] == pytest.approx(exp_mean(expected), rel=1e-4)
    assert (found["windows"], found["tokens"]) == (1, 700)


def test_auto_is_what_the_daemon_uses(models: Models, text: Path) -> None:
    folder = models.golden("mixtral_tied_swa")
    pinned, window = default_attention(Manifest.load(folder).geometry)
    ids = text.with_name("ids.txt")
    ids.write_text("\n".join(str(i * 7 % 384) for i in range(60)))
    args = (folder, ids, "--tokens", "--window-tokens", "0")
    auto = measured(*args, "--pinned", "auto", "--window", "auto")["perplexity"]
    assert (pinned, window) == (0, 24)
    assert auto == measured(*args)["perplexity"]  # the model's own
    assert auto != measured(*args, "--window", "0")["perplexity"]


def test_text_is_tokenised_without_special_tokens(models: Models, text: Path) -> None:
    from tokenizers import Tokenizer

    ids = tokenise(models.tiny("f32"), text)
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    assert ids.tolist() == tokenizer.encode(SENTENCE, add_special_tokens=False).ids
    found = measured(models.tiny("f32"), text, "--window-tokens", "32")
    assert (found["windows"], found["window_tokens"]) == (len(ids) // 32, 32)
    with Engine(models.tiny("f32")) as engine:
        rows = [engine.logprobs(ids[at : at + 32]) for at in range(0, len(ids) // 32 * 32, 32)]
    assert found["perplexity"] == pytest.approx(exp_mean(np.concatenate(rows)), rel=1e-6)


def test_report_and_progress_for_people(models: Models, text: Path) -> None:
    result = run(models.tiny("f32"), text, "--window-tokens", "32", "--limit", "2")
    assert result.exit_code == 0
    assert [line.split("  ")[0] for line in result.stdout.splitlines()[:2]] == ["perplexity", "perplexity, second half"]
    assert "2 windows of 32 tokens, 62 scored" in result.stdout
    assert "scoring: 100 %, 64 tokens" in result.stderr


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_second_half_and_chunks_do_not_change_a_score(models: Models, chunk: int) -> None:
    ids = np.arange(96, dtype=np.uint32) % 40
    windows = [ids[:48], ids[48:]]
    with Engine(models.random({})) as engine:
        whole = score(engine, windows, Plan(48))
        half = score(engine, windows, Plan(48, second_half=True), chunk=chunk)
    for all_of_it, part in zip(whole.rows, half.rows, strict=True):
        assert part.tobytes() == all_of_it[-24:].tobytes()


def test_int8_routing_of_the_trained_model(models: Models, tmp_path: Path) -> None:
    """The bar under which int8 routing may be offered: 97 % equal expert sets, 1 % perplexity."""
    np.save(tmp_path / "ids.npy", golden_arrays(TEXT / "tiny")["short_ids"][0])
    args = (models.tiny("f32"), tmp_path / "ids.npy", "--tokens", "--window-tokens", "128")
    found = measured(*args, "--compare-routing")
    assert 0.97 <= found["agreement"] <= 1
    assert len(found["agreement_by_layer"]) == 4
    assert found["perplexity_change"] <= 0.01
    assert found["perplexity_float"] == pytest.approx(measured(*args)["perplexity"], rel=1e-9)
    assert found["perplexity_int8"] == pytest.approx(measured(*args, "--routing", "int8")["perplexity"], rel=1e-9)
    people = run(*args, "--compare-routing", "--quiet", "--limit", "1")
    assert people.stdout.startswith("same experts as float")


@pytest.mark.parametrize(("name", "content", "reason"), [
    ("a.txt", b"1 2 three", "holds no token ids"),
    ("a.txt", b"1 -2", "holds no token ids"),
    ("a.npy", b"not an array", "holds no token ids"),
    ("a.npz", b"PK not an archive", "holds no token ids"),
    ("missing.txt", None, "No such file"),
])  # fmt: skip
def test_files_without_tokens(tmp_path: Path, name: str, content: bytes | None, reason: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TextError, match=reason) as error:
        load_tokens(tmp_path / name)
    assert name in str(error.value)


def test_token_files_of_every_kind(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[1, 2], [3, 4]], np.int64))
    np.savez(tmp_path / "b.npz", anything=np.array([1, 2, 3, 4], np.uint16))
    (tmp_path / "c.txt").write_text("1, 2\n3 4\n")
    for name in ("a.npy", "b.npz", "c.txt"):
        assert load_tokens(tmp_path / name).tolist() == [1, 2, 3, 4]
    np.savez(tmp_path / "d.npz", one=np.zeros(2, int), two=np.zeros(2, int))
    with pytest.raises(TextError, match="one, two"):
        load_tokens(tmp_path / "d.npz")
    np.save(tmp_path / "e.npy", np.array([0.5]))
    with pytest.raises(TextError, match="integers"):
        load_tokens(tmp_path / "e.npy")


def test_what_cannot_be_measured_exits_with_2(models: Models, text: Path) -> None:
    tiny = models.tiny("f32")
    latin = text.with_name("latin.txt")
    latin.write_bytes(b"caf\xe9")
    for args, reason in (
        ((tiny, text, "--pinned", "4"), "--window"),
        ((tiny, text, "--pinned", "four"), "auto"),
        ((tiny, text, "--window-tokens", "100000"), "does not fit"),
        ((tiny, text, "--long", "--limit", "1"), "does not fit"),
        ((tiny, latin), "UTF-8"),
        ((models.golden("llama"), text), "tokenizer.json"),
        ((text.parent / "missing", text), "missing"),
        ((tiny, text.with_name("none.txt")), "none.txt"),
    ):
        result = run(*args)
        assert result.exit_code == 2, args
        assert reason in result.stderr
