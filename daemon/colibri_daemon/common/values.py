"""How values of settings are written: sizes, file modes, lists, "auto". Every form reads back to the value it was made
from, so messages, the generated reference and the example file show exactly what may be typed."""

from __future__ import annotations

import grp
import json
import pwd
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from .address import parse_address

LAST_UID = (1 << 32) - 2  # -1 means "no user"

# K, M, G, T and KiB … are powers of 1024, as in systemd's MemoryMax=; kB, MB … are powers of 1000.
_PREFIXES = "KMGT"
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,6})?) ?(?:([KMGT])(i?B)?|B)?", re.IGNORECASE | re.ASCII)
_INTEGER = re.compile(r"[+-]?[0-9]+", re.ASCII)
_MODE = re.compile(r"0?o?[0-7]{3}", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes, rounded down. ValueError if it is no size."""
    if (found := _SIZE.fullmatch(text.strip())) is None:
        raise ValueError(f"{text!r} is no size")
    number, prefix, unit = found.groups()
    base = 1000 if unit and len(unit) == 1 else 1024
    return int(Fraction(number) * base ** (_PREFIXES.index(prefix.upper()) + 1 if prefix else 0))


def format_size(size: int) -> str:
    """The shortest exact form: 1048576 is 1M, 1000000 is 1000000."""
    power = 0
    while size and size % 1024 == 0 and power < len(_PREFIXES):
        size, power = size // 1024, power + 1
    return f"{size}{_PREFIXES[power - 1] if power else ''}"


def _size(value: Any) -> Any:
    return parse_size(value) if isinstance(value, str) else value


def _mode(value: Any, info: ValidationInfo) -> Any:
    """Text is octal. A bare number in a file is refused: 660 and 0o660 are too easily taken for one another."""
    if isinstance(value, str):
        if not _MODE.fullmatch(value):
            raise ValueError(f"{value!r} is no file mode")
        return int(value.lower().removeprefix("0o"), 8)
    if info.mode == "json":
        raise ValueError("a file mode is text")
    return value


def _chunk(value: int) -> int:
    if value and not 8 <= value <= 512:
        raise ValueError(f"{value} is out of range")
    return value


def _auto(value: Any) -> Any:
    return None if value == "auto" else value


def _text(value: Any) -> Any:
    return None if value == "" else value


def _path(value: Path) -> Path:
    if value == Path() or "\0" in str(value):
        raise ValueError(f"{str(value)!r} is no path")
    return value


def _address(value: str | None) -> str | None:
    if value is not None:
        parse_address(value)
    return value


class UnknownNameError(ValueError):
    """A name the system does not know, as a sentence for people."""


def _user(name: str) -> int:
    return pwd.getpwnam(name).pw_uid


def _group(name: str) -> int:
    return grp.getgrnam(name).gr_gid


def _numbers(what: str, number: Callable[[str], int]) -> Callable[[Any], Any]:
    """Of a list in which names may stand for numbers; they are looked up here, at each start and reload."""

    def resolved(item: Any) -> Any:
        if not isinstance(item, str) or _INTEGER.fullmatch(item):
            return item
        try:
            return number(item)
        except (KeyError, ValueError):
            raise UnknownNameError(f"there is no {what} {item!r}") from None

    def read(value: Any) -> Any:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        return tuple(resolved(item) for item in value) if isinstance(value, list | tuple) else value

    return read


# The types of settings. The name of each is what the reference calls it; text() and toml() go by it.
Size = Annotated[int, BeforeValidator(_size), "size"]
Mode = Annotated[int, BeforeValidator(_mode), "mode"]
Chunk = Annotated[int, AfterValidator(_chunk), "chunk"]
Auto = Annotated[int | None, BeforeValidator(_auto), "auto"]
Text = Annotated[str | None, BeforeValidator(_text), "text"]
FilePath = Annotated[Path, AfterValidator(_path), "path"]
FilePathOrNone = Annotated[FilePath | None, BeforeValidator(_text), "path"]
Address = Annotated[str | None, BeforeValidator(_text), AfterValidator(_address), "address"]
_Ids = tuple[Annotated[int, Field(ge=0, le=LAST_UID)], ...]
Uids = Annotated[_Ids, BeforeValidator(_numbers("user", _user)), "uids"]
Gids = Annotated[_Ids, BeforeValidator(_numbers("group", _group)), "gids"]


def text(kind: str, value: Any) -> str:
    """As in an environment variable or after a flag."""
    match kind, value:
        case "size", int():
            return format_size(value)
        case "mode", int():
            return f"{value:04o}"
        case "auto", None:
            return "auto"
        case _, None:
            return ""
        case _, bool():
            return "true" if value else "false"
        case _, float():
            return repr(value).removesuffix(".0")
        case _, tuple():
            return ",".join(str(item) for item in value)
        case _:
            return str(value)


def toml(kind: str, value: Any) -> str:
    """As on the right of a "key =" line."""
    shown = text(kind, value)
    if kind in ("uids", "gids"):
        return f"[{shown.replace(',', ', ')}]"
    bare = isinstance(value, bool | int | float) and kind != "mode" and (kind != "size" or value == 0)
    return shown if bare else json.dumps(shown, ensure_ascii=False)
