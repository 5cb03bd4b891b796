"""How a message is declared: one class with a permanent tag, one line per field.

    @message(9, "CREDIT", CLIENT)
    class Credit:
        '''What it means.'''
        tokens: int = required(Int(1, U32), "How many more tokens ...")

Nobody changes an object once it is made, and the type checker sees to that; to do it at run time, as a frozen dataclass
does, would make every field five times as expensive to set.

Evolution: tags and names are permanent; a new field is optional; a field's kind may only widen; unknown keys are
ignored; an unknown tag from 128 on is ignored, below it is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from typing import Any, ClassVar, dataclass_transform

from .errors import LocalError
from .kinds import Kind, Nested, bad, shown

CLIENT, SERVER, BOTH = "C→S", "S→C", "both"
IGNORABLE = 128  # tags from here on may be skipped by a peer that does not know them

MESSAGES: dict[int, type[Message]] = {}
STRUCTS: list[type[Struct]] = []  # nested ones, in order of declaration


@dataclass(frozen=True)
class FieldSpec:
    """What field metadata holds."""

    kind: Kind
    doc: str
    wire: str | None = None  # the key on the wire, where Python's name cannot be it


def required(kind: Kind, doc: str) -> Any:
    """A field that must be there."""
    return dataclasses.field(metadata={"spec": FieldSpec(kind, doc)})


def optional(kind: Kind, doc: str, default: Any = None, wire: str | None = None) -> Any:
    """A field that may be left out; None means absent, and travels as absence."""
    spec = FieldSpec(kind, doc, wire)
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata={"spec": spec})
    return dataclasses.field(default=default, metadata={"spec": spec})


@dataclass(frozen=True)
class Spec:
    """One field of a struct. default: MISSING if the field is required."""

    name: str
    wire: str
    kind: Kind
    doc: str
    default: Any


class Struct:
    """A map on the wire."""

    __slots__ = ()
    SPECS: ClassVar[tuple[Spec, ...]]
    BY_WIRE: ClassVar[dict[str, Spec]]
    REQUIRED: ClassVar[tuple[Spec, ...]]

    @classmethod
    def from_body(cls, body: Any, prefix: str = "") -> Any:
        """Checks a decoded map and makes the object. InvalidMessage names the field at fault."""
        whole = prefix.rstrip(".") or "body"
        if not isinstance(body, dict):
            raise bad(whole, f"is {shown(body)}; it must be a map")
        values = {}
        for key, value in body.items():
            if (spec := cls.BY_WIRE.get(key)) is not None:
                values[spec.name] = spec.kind.check(value, prefix + key)
            elif not isinstance(key, str):
                raise bad(whole, f"has the key {shown(key)}; keys are text")
        for spec in cls.REQUIRED:
            if spec.name not in values:
                raise bad(prefix + spec.wire, "is missing")
        return cls(**values)

    def to_body(self) -> dict[str, Any]:
        """The map to be sent: defaults are left out."""
        body = {}
        for spec in self.SPECS:
            value = getattr(self, spec.name)
            if value is not None and value != spec.default:
                body[spec.wire] = value if type(value) in _AS_THEY_ARE else _plain(value)
        return body


_AS_THEY_ARE = {bytes, int, str, float, bool}


def _plain(value: Any) -> Any:
    if isinstance(value, Struct):
        return value.to_body()
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return dict(sorted(value.items()))  # bytes must not depend on who made the map
    return value


class Message(Struct):
    """A struct with a tag of its own."""

    __slots__ = ()
    TAG: ClassVar[int]
    NAME: ClassVar[str]
    SENDER: ClassVar[str]


def _finish(cls: type, base: type) -> Any:
    space = {k: v for k, v in cls.__dict__.items() if k not in ("__dict__", "__weakref__")}
    made = dataclass(unsafe_hash=True, slots=True, kw_only=True)(type(cls.__name__, (base,), space))
    made.SPECS = tuple(_spec(f) for f in dataclasses.fields(made))
    made.BY_WIRE = {spec.wire: spec for spec in made.SPECS}
    made.REQUIRED = tuple(spec for spec in made.SPECS if spec.default is MISSING)
    return made


def _spec(f: Any) -> Spec:
    declared: FieldSpec = f.metadata["spec"]
    default = {} if f.default_factory is dict else f.default
    return Spec(f.name, declared.wire or f.name, declared.kind, declared.doc, default)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(required, optional))
def message(tag: int, name: str, sender: str) -> Callable[[type], Any]:
    """Registers a message. sender: CLIENT, SERVER or BOTH."""

    def register(cls: type) -> Any:
        made = _finish(cls, Message)
        made.TAG, made.NAME, made.SENDER = tag, name, sender
        if tag in MESSAGES or any(name == other.NAME for other in MESSAGES.values()):
            raise LocalError(f"message tag {tag} or name {name} is taken")
        MESSAGES[tag] = made
        return made

    return register


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(required, optional))
def struct(cls: type) -> Any:
    """Registers a nested map."""
    made = _finish(cls, Struct)
    STRUCTS.append(made)
    return made


def nested(made: type) -> Nested:
    return Nested(made)


def messages_by_tag() -> list[type[Message]]:
    """All there are."""
    return [MESSAGES[tag] for tag in sorted(MESSAGES)]
