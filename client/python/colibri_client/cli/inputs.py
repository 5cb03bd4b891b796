"""Prompts: where they come from and how they become token ids."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ..results import ids_of
from ..text import Tokenizer

STDIN = "-"


@dataclass(frozen=True)
class Prompt:
    """One of the three is given. system: with chat."""

    tokens: list[int] | None = None
    text: str | None = None
    chat: str | None = None
    system: str | None = None

    @property
    def needs_tokenizer(self) -> bool:
        return self.tokens is None

    def encode(self, tokenizer: Tokenizer | None) -> list[int]:
        """Token ids; the tokenizer must be there if it is needed."""
        if self.tokens is not None:
            return self.tokens
        assert tokenizer is not None
        if self.text is not None:
            return tokenizer.encode(self.text)
        messages = [{"role": "user", "content": self.chat or ""}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return tokenizer.encode_chat(messages)


def prompt_options(chat: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """--tokens, --tokens-file, --raw, --text and the argument; with chat also --chat and --system. One of them."""
    options = [
        click.argument("argument", metavar="[TEXT]", required=False),
        click.option("--tokens", metavar="IDS", help="Token ids: 1,2,3."),
        click.option("--tokens-file", type=click.Path(), metavar="FILE",
                     help="File of token ids: a JSON list, or numbers between spaces or commas; - is stdin."),
        click.option("--raw", is_flag=True, help="The --tokens-file is binary: little-endian u32."),
        click.option("--text", metavar="TEXT", help="Text for the model's tokenizer; - is stdin, less one final "
                     "newline. The same as the argument TEXT."),
        *([click.option("--chat", metavar="TEXT", help="One user turn in the model's chat template; - is stdin."),
           click.option("--system", metavar="TEXT", help="System prompt for --chat.")] if chat else []),
    ]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def take_prompt(options: dict[str, Any]) -> Prompt:
    """Removes the options of prompt_options and reads what they name. UsageError unless there is exactly one source."""
    argument, tokens, file, raw, text, chat, system = (
        options.pop(name, None) for name in ("argument", "tokens", "tokens_file", "raw", "text", "chat", "system"))
    sources = {"TEXT": argument, "--tokens": tokens, "--tokens-file": file, "--text": text, "--chat": chat}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        raise click.UsageError(f"{' and '.join(given) or 'no prompt'} given; pass one of "
                               "TEXT, --tokens, --tokens-file, --text, --chat")
    if raw and file is None:
        raise click.UsageError("--raw is about --tokens-file")
    if system is not None and chat is None:
        raise click.UsageError("--system needs --chat")
    if file is not None:
        return Prompt(tokens=_read_ids(file, raw))
    if tokens is not None:
        return Prompt(tokens=parse_ids(tokens, "--tokens"))
    return Prompt(text=_text(argument if text is None else text), chat=_text(chat), system=system)


def _text(given: str | None) -> str | None:
    return _decoded(_read(STDIN), "stdin").removesuffix("\n") if given == STDIN else given


def parse_ids(text: str, source: str) -> list[int]:
    """A JSON list, or integers between spaces or commas. UsageError names the entry at fault."""
    text = text.strip()
    if text.startswith("["):
        return _json_ids(text, source)
    entries = [entry for entry in re.split(r"[\s,]+", text) if entry]
    for index, entry in enumerate(entries):
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", entry):
            raise click.UsageError(f"{source}: entry {index} is {entry[:40]!r}, not a token id")
    return [int(entry) for entry in entries]


def _json_ids(text: str, source: str) -> list[int]:
    try:
        ids = json.loads(text)
    except ValueError as e:
        raise click.UsageError(f"{source}: not a JSON list: {e}") from None
    for index, entry in enumerate(ids):
        if not isinstance(entry, int) or isinstance(entry, bool):
            raise click.UsageError(f"{source}: entry {index} is {json.dumps(entry)[:40]}, not a token id")
    return list(ids)


def _read_ids(file: str, raw: bool) -> list[int]:
    data = _read(file)
    if not raw:
        return parse_ids(_decoded(data, file), file)
    if len(data) % 4:
        raise click.UsageError(f"{file}: {len(data)} bytes; --raw token ids are 4 bytes each")
    return list(ids_of(data))


def _read(file: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if file == STDIN else Path(file).read_bytes()
    except OSError as e:
        raise click.UsageError(f"{file}: {e.strerror}") from None


def _decoded(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise click.UsageError(f"{source}: not UTF-8 at byte {e.start}") from None
