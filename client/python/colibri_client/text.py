"""Text for a model that speaks token ids: encoding, chat templates, streaming decoding, stop strings.

    tokenizer = Tokenizer(folder)                       # tokenizer.json, tokenizer_config.json, chat_template.jinja
    prompt = tokenizer.encode("Once upon a time")       # or .encode_chat([{"role": "user", "content": "Hello"}])
    stream, stops = Detokenizer(tokenizer), StopStrings(["\n\n"])
    print(stops.push(stream.push(token)), end="")       # for each token; at the end stops.push(stream.finish()),
                                                        # then stops.finish()

Special tokens come from the model's files only. What a user types is text, even if it looks like one: "<|im_end|>" in a
question cannot end the user's turn. `special` here is the flag in tokenizer.json; tokens that are added without it
(some models' <tool_call>, runs of spaces) are ordinary vocabulary and can be typed.
"""

from __future__ import annotations

import datetime
import json
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .errors import ColibriError

EXTRA = "text"  # of this distribution: brings tokenizers and jinja2
REPLACEMENT = "\ufffd"  # what a decoder puts in the place of bytes that are not UTF-8 (yet)


class TextError(ColibriError):
    """The tokenizer or the chat template is missing, unusable or refuses its input. The message has the remedy."""


def missing_package(package: str) -> TextError:
    return TextError(f"this needs the package {package}: pip install 'colibri-daemon[{EXTRA}]', or pass --tokens")


class Tokenizer:
    """A model folder's tokenizer. special: text of each special token -> id. eos_id: the tokenizer's own, or None.

    Inside, special tokens carry names that nobody can guess, with the ids they always had; the template's special
    tokens are translated to these names. So nothing that is encoded, by whatever model or normalizer tokenizer.json
    asks for, can become a special token by itself, and all of a prompt is still encoded in one piece, which gives the
    ids that the model was trained with.
    """

    def __init__(self, folder: Path) -> None:
        try:
            import tokenizers
        except ImportError:
            raise missing_package("tokenizers") from None
        self.folder = folder
        data = _read_json(folder / "tokenizer.json", "the model folder has no tokenizer; pass --tokens, or --model DIR")
        config = folder / "tokenizer_config.json"
        self.config: dict[str, Any] = _read_json(config, "") if config.exists() else {}
        nonce = secrets.token_hex(8)
        specials = [t["content"] for t in data.get("added_tokens", ()) if t.get("special") and t["content"]]
        self._hidden = {content: f"<{nonce}:{i}>" for i, content in enumerate(specials)}
        try:
            self._inner = tokenizers.Tokenizer.from_str(json.dumps(_renamed(data, self._hidden)))
        except Exception as e:  # the package raises no narrower type
            raise TextError(f"{folder / 'tokenizer.json'} cannot be used: {e}") from None
        self.special: dict[str, int] = {c: self._inner.token_to_id(h) for c, h in self._hidden.items()}
        self._names = {id: content for content, id in self.special.items()}
        self.eos_id = self.special.get(_token_text(self.config.get("eos_token")) or "")
        self._escapes = _Escapes(specials, nonce)
        self._template: ChatTemplate | None = None

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, with the begin-of-text token if the tokenizer adds one. Nothing in text is special."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of a conversation ({"role", "content"} each) in the model's chat template, up to where the answer
        goes."""
        self._template = self._template or ChatTemplate.load(self.folder, self.config)
        shielded = [{**m, **{name: self._escapes.escape(m[name]) for name in ("role", "content") if name in m}}
                    for m in messages]  # fmt: skip
        rendered = self._template.render(shielded)
        return self._encode(self._escapes.resolve(rendered, self._hidden), add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError):  # surrogates, from bytes that the terminal could not decode
            raise TextError("the text is not valid Unicode; it must be UTF-8") from None
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids without special tokens."""
        text: str = self._inner.decode(ids, skip_special_tokens=True)
        return text

    def name(self, id: int) -> str:
        """One token for a table: its text, or its name if it is special."""
        return self._names.get(id) or self.decode([id])


def _read_json(path: Path, absent: str) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TextError(f"{path}: {absent}") from None
    except (OSError, ValueError) as e:
        raise TextError(f"{path} cannot be read: {e}") from None
    if not isinstance(data, dict):
        raise TextError(f"{path} cannot be used: it is not a JSON object")
    return data


def _renamed(data: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """tokenizer.json with special tokens under other names, and without limits on length."""
    model = dict(data.get("model") or {})
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): id for piece, id in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _touches(merge, names)]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    added = [{**t, "content": names.get(t["content"], t["content"])} for t in data.get("added_tokens", ())]
    return {**data, "model": model, "added_tokens": added, "truncation": None, "padding": None}


def _touches(merge: str | list[str], names: dict[str, str]) -> bool:
    """A merge rule that makes or uses a special token: such a rule could only serve typed ones."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left + right in names or left in names or right in names


def _token_text(entry: Any) -> str | None:
    """tokenizer_config.json has a token as text or as {"content": text}."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


class _Escapes:
    """Tells typed special tokens from the template's: the first character of a typed one travels through the template
    as [nonce:hex]. So does that of half a one at the end of a text, which the template might complete with the next."""

    def __init__(self, specials: Sequence[str], nonce: str) -> None:
        any_of = "|".join(re.escape(s) for s in sorted(specials, key=len, reverse=True)) or r"(?!)"
        self._nonce, self._specials = nonce, specials
        self._longest = max(map(len, specials), default=0)
        self._special = re.compile(any_of)
        self._start = re.compile(f"(?s)(?={any_of}).")
        self._escaped = re.compile(rf"\[{nonce}:([0-9a-f]+)\]")

    def escape(self, text: str) -> str:
        end = max(0, len(text) - self._longest + 1)
        tail = "".join(self._hidden(c) if self._begun(text[end + i :]) else c for i, c in enumerate(text[end:]))
        whole = self._start.sub(lambda found: self._hidden(found[0]) if found.start() < end else found[0], text)
        return whole.removesuffix(text[end:]) + tail

    def _hidden(self, character: str) -> str:
        return f"[{self._nonce}:{ord(character):x}]"

    def _begun(self, rest: str) -> bool:
        """Whether a special token begins with this text, or this text with one."""
        return any(rest.startswith(special) or special.startswith(rest) for special in self._specials)

    def resolve(self, rendered: str, names: dict[str, str]) -> str:
        """What the template made of escaped texts: its own special tokens under these names, the typed ones as typed.
        None begins or ends within an escape, whatever the nonce looks like."""
        pieces = self._escaped.split(rendered)  # the odd ones are escaped characters
        pieces[::2] = [self._special.sub(lambda found: names[found[0]], piece) for piece in pieces[::2]]
        pieces[1::2] = [chr(int(digits, 16)) for digits in pieces[1::2]]
        return "".join(pieces)


class ChatTemplate:
    """A Jinja template as Hugging Face models carry it, run in a sandbox: it sees its variables and nothing else."""

    def __init__(self, source: str, variables: dict[str, Any]) -> None:
        """variables: what every rendering gets, such as bos_token. TextError if source is not a template."""
        try:
            import jinja2
        except ImportError:
            raise missing_package("jinja2") from None
        self._variables = variables
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as e:
            raise TextError(f"the chat template cannot be used: {e}") from None

    @classmethod
    def load(cls, folder: Path, config: dict[str, Any]) -> ChatTemplate:
        """chat_template.jinja, else chat_template of tokenizer_config.json: text, or a list with one named default."""
        file, found = folder / "chat_template.jinja", config.get("chat_template")
        if file.exists():
            found = file.read_text(encoding="utf-8")
        elif isinstance(found, list):
            found = {entry.get("name"): entry.get("template") for entry in found}.get("default")
        if not isinstance(found, str):
            raise TextError(f"{folder}: the model has no chat template (chat_template.jinja, or chat_template in "
                            f"tokenizer_config.json); use --text instead of chat")
        tokens = {key: _token_text(value) for key, value in config.items() if key.endswith("_token")}
        return cls(found, {key: text for key, text in tokens.items() if text is not None})

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The conversation as text that ends where the answer begins."""
        try:
            return self._template.render(**self._variables, messages=messages, tools=None, documents=None,
                                         add_generation_prompt=True)
        except Exception as e:  # a template is a program: it can fail in any way
            raise TextError(f"the chat template refuses these messages: {e}") from None


def _environment() -> Any:
    """What Hugging Face's own renderer offers templates."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what to train on; here it has no meaning."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[loopcontrols, Generation])
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own escapes for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise ValueError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


class Detokenizer:
    """Text of a stream of tokens, piece by piece, never half a character.

    The pieces join to decode(all tokens): with byte-level vocabularies always; where bytes are tokens of their own
    (<0x0A>) if they are valid UTF-8 and not U+FFFD itself, because there one bad byte changes how its neighbours are
    decoded, and what was given out is not taken back. The cost of a token does not grow with the stream: only a window
    of the last tokens is decoded. It always holds some text given out before, because what a token looks like can
    depend on whether it is the first.
    """

    WINDOW = 16  # tokens; the window is halved when it is longer
    UNDECIDED = 3  # tokens, of a byte each, that can wait for the last one of their character

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode, self._skipped = tokenizer.decode, frozenset(tokenizer.special.values())
        self._window: list[int] = []
        self._given = 0  # characters of the window's text
        self._open = 0  # tokens since the text last ended in a whole character

    def push(self, token: int) -> str:
        """The text that this token completes, possibly none."""
        if token in self._skipped:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        self._open = self._open + 1 if text.endswith(REPLACEMENT) else 0
        settled = self._settled(text)
        piece = text[self._given : settled]
        self._given = max(self._given, settled)
        if len(self._window) > self.WINDOW and not 0 < self._open <= self.UNDECIDED:
            self._shorten(text)
        return piece

    def finish(self) -> str:
        """What is left: bytes that stayed incomplete come as replacement characters."""
        text = self._decode(self._window)
        piece = text[self._given :]
        self._given = len(text)
        return piece

    def _settled(self, text: str) -> int:
        """Characters that later tokens cannot change. Replacements that stay longer than a character can are final."""
        whole = len(text.rstrip(REPLACEMENT)) if self._open else len(text)
        return whole if self._open <= self.UNDECIDED else max(whole, len(text) - self.UNDECIDED)

    def _shorten(self, text: str) -> None:
        """Drops old tokens, at a place where the rest decodes by itself to what it is in the window."""
        for cut in range(len(self._window) // 2, len(self._window) - self.UNDECIDED):
            tail = self._decode(self._window[cut:])
            given = self._given - (len(text) - len(tail))
            if given > 0 and text.endswith(tail):
                self._window, self._given = self._window[cut:], given
                return


class StopStrings:
    """Cuts streamed text at the first stop string: the one that is complete first, of several the longest.

    Text that could be the beginning of one is held back until it is decided. match: index of the stop string found,
    or None. The result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """ValueError for an empty stop string."""
        self._stops = list(stops)
        if not all(self._stops):
            raise ValueError("a stop string is empty")
        self._held = ""
        self.match: int | None = None

    def push(self, piece: str) -> str:
        """Text to give out now; nothing after a match."""
        if self.match is not None:
            return ""
        text = self._held + piece
        found = [(at + len(stop), at, index) for index, stop in enumerate(self._stops) if (at := text.find(stop)) >= 0]
        if found:
            _, end, self.match = min(found)
            self._held = ""
        else:
            end = len(text) - self._undecided(text)
            self._held = text[end:]
        return text[:end]

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest end of text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        return next((n for n in range(min(longest, len(text)), 0, -1)
                     if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)
