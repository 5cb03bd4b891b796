"""colibri_client.text.Detokenizer: pieces join to the whole, no half characters, bounded cost."""

from __future__ import annotations

from pathlib import Path

import pytest
from colibri_client.text import REPLACEMENT, Detokenizer, Tokenizer
from fixtures.models import TINY
from fixtures.tokenizers_made import FAMILIES, write_folder
from hypothesis import given
from hypothesis import strategies as st

_made: dict[str, Tokenizer] = {}
NAMES = [*FAMILIES, "tiny"]
ALWAYS = ["byte_level", "tiny"]  # byte-level vocabularies: exact for any tokens
# Every plane, and more often what is hard: several bytes each, joined emoji, spaces.
HARD = ["the", " ", "  ", "cat", "ü", "é", "中", "👩‍👩‍👧", "🇫🇷",
        "\u0301", "\n", REPLACEMENT, "s", "<", "\0", "\U0010fffd"]
PIECES = st.sampled_from(HARD)
TEXTS = st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.lists(PIECES, max_size=60).map("".join))


@pytest.fixture(scope="session", autouse=True)
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    if not _made:
        root = tmp_path_factory.mktemp("tokenizers")
        _made.update({family: Tokenizer(write_folder(root / family, family)) for family in FAMILIES})
        _made["tiny"] = Tokenizer(TINY)
    return _made


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """One for each token, and the rest."""
    stream = Detokenizer(tokenizer)
    return [*(stream.push(id) for id in ids), stream.finish()]


@pytest.mark.parametrize("name", NAMES)
@given(text=TEXTS)
def test_pieces_of_a_text_join_to_the_decoded_whole(name: str, text: str) -> None:
    ids = _made[name].encode(text if name in ALWAYS else text.replace(REPLACEMENT, "?"))
    assert "".join(pieces(_made[name], ids)) == _made[name].decode(ids)


@pytest.mark.parametrize("name", ALWAYS)
@given(data=st.data())
def test_byte_level_pieces_join_whatever_the_tokens_are(name: str, data: st.DataObject) -> None:
    """Random tokens: mostly bytes that are not UTF-8, cut anywhere, with special tokens among them."""
    size = 263 if name == "byte_level" else 2048
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=120))
    assert "".join(pieces(_made[name], ids)) == _made[name].decode(ids)


@pytest.mark.parametrize("name", ["byte_fallback", "unigram"])
@given(data=st.data())
def test_words_join_whatever_the_tokens_are(name: str, data: st.DataObject) -> None:
    """SentencePiece vocabularies: words and special tokens in any order; spaces at the start depend on the place."""
    ids = data.draw(st.lists(st.integers(261, 280) | st.integers(0, 4), max_size=120))
    assert "".join(pieces(_made[name], ids)) == _made[name].decode(ids)


@given(ids=st.lists(st.integers(5, 270), max_size=200))
def test_invalid_byte_fallback_loses_nothing_but_bytes(ids: list[int]) -> None:
    """Not the same text as decoded at once, which turns a whole run of bytes into replacements; but words are there."""
    tokenizer = _made["byte_fallback"]
    joined = "".join(pieces(tokenizer, ids))
    words = [tokenizer.name(id) for id in ids if id >= 261]
    rest = joined
    for word in words:
        assert word in rest
        rest = rest[rest.index(word) + len(word) :]


@pytest.mark.parametrize("name", NAMES)
def test_characters_come_whole_and_at_once(name: str) -> None:
    """Each piece is valid text; a character is not held back longer than until its last byte."""
    text = "the 👩 cat"
    ids = _made[name].encode(text)
    stream, out = Detokenizer(_made[name]), ""
    for n, id in enumerate(ids, 1):
        piece = stream.push(id)
        assert REPLACEMENT not in piece
        out += piece
        assert out == _made[name].decode(ids[:n]).rstrip(REPLACEMENT)
    assert stream.finish() == ""


def test_an_unfinished_character_ends_as_a_replacement() -> None:
    tokenizer = _made["byte_level"]
    ids = tokenizer.encode("é")[:1]
    assert pieces(tokenizer, ids) == ["", REPLACEMENT]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["words", "spaces", "specials", "broken"])
def test_the_cost_of_a_token_is_bounded(name: str, kind: str) -> None:
    """Tokens decoded per token pushed, on average over 2000, however broken the stream."""
    tokenizer = _made[name]
    broken = next(id for id in range(300) if REPLACEMENT in tokenizer.decode([id]))
    ids = {"words": tokenizer.encode("the cat " * 3), "spaces": tokenizer.encode("a   "), "specials": [1, 2],
           "broken": [broken]}[kind]
    decoded, ask = 0, tokenizer.decode

    class Counting(Tokenizer):
        def __init__(self) -> None:
            self.special = tokenizer.special

        def decode(self, ids: list[int]) -> str:  # type: ignore[override]
            nonlocal decoded
            decoded += len(ids)
            return ask(ids)

    stream = Detokenizer(Counting())
    for at in range(2000):
        stream.push(ids[at % len(ids)])
    assert decoded / 2000 < 8 * Detokenizer.WINDOW


def test_the_folder_is_not_needed_after_loading(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "unigram")
    tokenizer = Tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    assert "".join(pieces(tokenizer, tokenizer.encode("the cat"))) == "the cat"
