"""Kinds of field values: what is accepted, what it becomes, and how SPEC.md and Go name it.

check(value, field) returns the normalised value or raises InvalidMessage naming the field. None (msgpack nil) is never
accepted: a field that is not wanted is left out.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

from .errors import Code, InvalidMessage
from .limits import MAX_ARRAY

U32, U53, U64 = 0xFFFFFFFF, (1 << 53) - 1, (1 << 64) - 1


def bad(field: str, reason: str, index: int | None = None, limit: int | None = None) -> InvalidMessage:
    place = field if index is None else f"{field}[{index}]"
    return InvalidMessage(Code.INVALID_ARGUMENT, f"{place} {reason}", field, index, limit)


def shown(value: Any) -> str:
    """A value in a message: short, whatever the peer sent."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Kind:
    """One kind of value. go: its type in Go; text(): type and range for SPEC.md."""

    go = "any"

    def check(self, value: Any, field: str) -> Any:
        raise NotImplementedError

    def text(self) -> str:
        raise NotImplementedError


@dataclass(frozen=True)
class Int(Kind):
    """An integer in [least, most]."""

    least: int = 0
    most: int = U53

    @property
    def go(self) -> str:  # type: ignore[override]
        return "uint64" if self.least >= 0 else "int64"

    def check(self, value: Any, field: str) -> int:
        if not is_integer(value):
            raise bad(field, f"is {shown(value)}; it must be an integer")
        if not self.least <= value <= self.most:
            raise bad(field, f"is {value}; it must be from {self.least} to {self.most}", limit=self.most)
        return value

    def text(self) -> str:
        names = {U32: "2^32−1", U53: "2^53−1", U64: "2^64−1", (1 << 31) - 1: "2^31−1"}
        return f"int, {self.least} to {names.get(self.most, self.most)}"


@dataclass(frozen=True)
class Float(Kind):
    """A finite number in [least, most], or (least, most] if above."""

    least: float
    most: float
    above: bool = False
    go = "float64"

    def check(self, value: Any, field: str) -> float:
        if not is_integer(value) and not isinstance(value, float):
            raise bad(field, f"is {shown(value)}; it must be a number")
        inside = self.least < value <= self.most if self.above else self.least <= value <= self.most
        if not inside:  # NaN is not
            raise bad(field, f"is {shown(value)}; it must be {self._range()}")
        return float(value)

    def _range(self) -> str:
        return f"{'above' if self.above else 'from'} {self.least:g} {'up ' if self.above else ''}to {self.most:g}"

    def text(self) -> str:
        return f"float, {self._range()}"


@dataclass(frozen=True)
class Flag(Kind):
    go = "bool"

    def check(self, value: Any, field: str) -> bool:
        if not isinstance(value, bool):
            raise bad(field, f"is {shown(value)}; it must be true or false")
        return value

    def text(self) -> str:
        return "bool"


@dataclass(frozen=True)
class Text(Kind):
    """UTF-8 text of at most `most` bytes."""

    most: int = 256
    go = "string"

    def check(self, value: Any, field: str) -> str:
        if not isinstance(value, str):
            raise bad(field, f"is {shown(value)}; it must be text")
        if len(value.encode("utf-8", "surrogatepass")) > self.most:
            raise bad(field, f"is longer than {self.most} bytes", limit=self.most)
        return value

    def text(self) -> str:
        return f"text, at most {self.most} bytes"


@dataclass(frozen=True)
class Blob(Kind):
    """Opaque bytes."""

    most: int
    go = "[]byte"

    def check(self, value: Any, field: str) -> bytes:
        if not isinstance(value, bytes):
            raise bad(field, f"is {shown(value)}; it must be binary")
        if len(value) > self.most:
            raise bad(field, f"has {len(value)} bytes; at most {self.most} are allowed", limit=self.most)
        return value

    def text(self) -> str:
        return f"bin, at most {self.most} bytes"


@dataclass(frozen=True)
class Tokens(Kind):
    """Token ids: bin of little-endian u32, or a list of at most MAX_ARRAY integers. Becomes bytes."""

    most: int = 1 << 30
    go = "TokenIDs"

    def check(self, value: Any, field: str) -> bytes:
        if isinstance(value, bytes):
            if len(value) % 4:
                raise bad(field, f"has {len(value)} bytes; token ids are 4 bytes each")
            count = len(value) // 4
        elif isinstance(value, list):
            count = len(value)
            for index, token in enumerate(value):
                if not is_integer(token):
                    raise bad(field, f"is {shown(token)}; token ids are integers", index)
                if not 0 <= token <= U32:
                    raise InvalidMessage(Code.TOKEN_OUT_OF_RANGE, f"{field}[{index}] is {token}, not a token id",
                                         field, index)
            value = struct.pack(f"<{count}I", *value)
        else:
            raise bad(field, f"is {shown(value)}; token ids are binary (little-endian u32) or a list of integers")
        if count > self.most:
            raise bad(field, f"has {count} token ids; at most {self.most} are allowed", limit=self.most)
        return value

    def text(self) -> str:
        most = "" if self.most == 1 << 30 else f", at most {self.most}"
        return f"token ids{most}: bin (little-endian u32) or list of at most {MAX_ARRAY} ints"


@dataclass(frozen=True)
class Floats(Kind):
    """bin of little-endian f32. Minus infinity travels as -9999."""

    go = "Floats"

    def check(self, value: Any, field: str) -> bytes:
        if not isinstance(value, bytes) or len(value) % 4:
            raise bad(field, "must be binary, 4 bytes a number")
        return value

    def text(self) -> str:
        return "bin (little-endian f32)"


@dataclass(frozen=True)
class ListOf(Kind):
    """A list of at most `most` values of one kind. Becomes a tuple."""

    kind: Kind
    most: int

    @property
    def go(self) -> str:  # type: ignore[override]
        return "[]" + self.kind.go

    def check(self, value: Any, field: str) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise bad(field, f"is {shown(value)}; it must be a list")
        if len(value) > self.most:
            raise bad(field, f"has {len(value)} entries; at most {self.most} are allowed", limit=self.most)
        return tuple(self._entry(entry, field, index) for index, entry in enumerate(value))

    def _entry(self, value: Any, field: str, index: int) -> Any:
        try:
            return self.kind.check(value, field)
        except InvalidMessage as e:
            raise InvalidMessage(e.code, e.message.replace(field, f"{field}[{index}]", 1), field, index,
                                 e.limit) from None

    def text(self) -> str:
        return f"list of at most {self.most}: {self.kind.text()}"


@dataclass(frozen=True)
class BiasMap(Kind):
    """logit_bias: map of token id to finite number. The one map with integer keys."""

    most: int
    go = "map[uint32]float64"

    def check(self, value: Any, field: str) -> dict[int, float]:
        if not isinstance(value, dict):
            raise bad(field, f"is {shown(value)}; it must be a map of token ids to numbers")
        if len(value) > self.most:
            raise bad(field, f"has {len(value)} entries; at most {self.most} are allowed", limit=self.most)
        for token, bias in value.items():
            if not is_integer(token):
                raise bad(field, f"has the key {shown(token)}; keys are token ids")
            if not 0 <= token <= U32:
                raise InvalidMessage(Code.TOKEN_OUT_OF_RANGE, f"{field} has the key {token}, not a token id", field,
                                     token if token >= 0 else None)
            if not (is_integer(bias) or isinstance(bias, float)) or not math.isfinite(bias) or abs(bias) > 3.4e38:
                raise bad(field, f"has {shown(bias)} for token {token}; it must be a finite number", token)
        return {token: float(bias) for token, bias in value.items()}

    def text(self) -> str:
        return f"map of token id to finite float, at most {self.most}"


@dataclass(frozen=True)
class CountMap(Kind):
    """Named numbers, for STATS."""

    most: int = 256
    go = "map[string]float64"

    def check(self, value: Any, field: str) -> dict[str, float]:
        if not isinstance(value, dict) or len(value) > self.most:
            raise bad(field, f"must be a map of at most {self.most} names to numbers")
        for name, number in value.items():
            if not isinstance(name, str) or not (is_integer(number) or isinstance(number, float)):
                raise bad(field, f"has the entry {shown(name)}: {shown(number)}; it maps names to numbers")
        return value

    def text(self) -> str:
        return "map of name to number"


@dataclass(frozen=True)
class Nested(Kind):
    """A map with the fields of another struct (message.py)."""

    struct: type

    @property
    def go(self) -> str:  # type: ignore[override]
        return self.struct.__name__

    def check(self, value: Any, field: str) -> Any:
        if isinstance(value, self.struct):
            return value
        return self.struct.from_body(value, f"{field}.")  # type: ignore[attr-defined]

    def text(self) -> str:
        return f"map: {self.struct.__name__}"
