"""Options of a request. Types, ranges, defaults and help come from the protocol's declaration of GENERATE."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from colibri_protocol.errors import InvalidMessage
from colibri_protocol.kinds import Flag, Float, Int, Kind
from colibri_protocol.message import Spec
from colibri_protocol.messages import Cache, Generate

from .inputs import parse_ids

SPECS: dict[str, Spec] = {spec.name: spec for spec in Generate.SPECS}
UNBOUNDED = 1 << 31  # ranges from here on are not worth showing

# Fields that are one option each, in the order of --help.
FIELDS = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
          "presence_penalty", "frequency_penalty", "seed", "ignore_eos", "logprobs", "prompt_logprobs", "priority",
          "tenant", "trace", "request_id")
# Where the protocol's words are not a user's.
HELP = {
    "seed": "Of the sampling noise; without it one is drawn, and --json says which.",
    "prompt_logprobs": "With --json: the same for the prompt.",
}
# What /set in a chat changes.
SETTABLE = FIELDS[: FIELDS.index("ignore_eos")]


def field_type(kind: Kind) -> click.ParamType:
    """The click type that accepts what the field accepts."""
    if isinstance(kind, Int):
        return click.IntRange(kind.least, kind.most if kind.most < UNBOUNDED - 1 else None)
    if isinstance(kind, Float):
        return click.FloatRange(kind.least, kind.most, min_open=kind.above)
    return click.STRING


def _field_option(name: str) -> Callable[[Any], Any]:
    spec, flag = SPECS[name], f"--{name.replace('_', '-')}"
    if isinstance(spec.kind, Flag):
        return click.option(flag, name, is_flag=True, default=None, help=spec.doc)
    known = "" if spec.default is None else f"  [default: {spec.default:g}]"
    return click.option(flag, name, type=field_type(spec.kind), help=HELP.get(name, spec.doc) + known)


_OTHERS = (
    click.option("--stop", "stop", multiple=True, metavar="TEXT",
                 help="End the output before this text; repeatable. A special token's name stops at the token."),
    click.option("--stop-id", "stop_ids", multiple=True, type=click.IntRange(0), help="A token that ends the output; "
                 "repeatable."),
    click.option("--stop-tokens", "stop_seqs", multiple=True, metavar="IDS", help="A token sequence that ends the "
                 "output: 1,2,3; repeatable."),
    click.option("--logit-bias", "logit_bias", multiple=True, metavar="ID=VALUE", help="Added to the logit of a "
                 "token; repeatable."),
    click.option("--deadline", type=click.FloatRange(0, 3600, min_open=True), metavar="SECONDS",
                 help="From receipt by the daemon, waiting included.  [default: 300]"),
    click.option("--no-cache", is_flag=True, help="Neither use nor leave a cached prefix."),
    click.option("--model-defaults", is_flag=True, help="Sampling parameters that are not given come from the model's "
                 "generation_config.json instead of the daemon's defaults (greedy)."),
)


def request_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Every field of GENERATE that a person may want."""
    for option in reversed([*map(_field_option, FIELDS), *_OTHERS]):
        function = option(function)
    return function


def take_fields(options: dict[str, Any]) -> dict[str, Any]:
    """Removes the options of request_options except stop and model_defaults; the fields that are given."""
    fields = {name: value for name in FIELDS if (value := options.pop(name)) is not None}
    if deadline := options.pop("deadline"):
        fields["deadline_ms"] = max(1, round(deadline * 1000))
    if ids := options.pop("stop_ids"):
        fields["stop_ids"] = list(ids)
    if sequences := options.pop("stop_seqs"):
        fields["stop_seqs"] = [parse_ids(sequence, "--stop-tokens") for sequence in sequences]
    if biases := options.pop("logit_bias"):
        fields["logit_bias"] = dict(map(_bias, biases))
    if options.pop("no_cache"):
        fields["cache"] = Cache(use=False)
    return fields


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise click.UsageError(f"--logit-bias {text}: it must be ID=VALUE, such as 42=-1.5") from None


def parse_setting(name: str, text: str) -> tuple[str, Any]:
    """A field of SETTABLE from text. ValueError says what is wrong with it."""
    name = name.replace("-", "_")
    if name not in SETTABLE:
        raise ValueError(f"{name} cannot be set; there are {', '.join(SETTABLE)}")
    kind = SPECS[name].kind
    try:
        value: float = int(text) if isinstance(kind, Int) else float(text)
    except ValueError:
        wanted = "an integer" if isinstance(kind, Int) else "a number"
        raise ValueError(f"{name} is {text!r}; it must be {wanted}") from None
    try:
        return name, kind.check(value, name)
    except InvalidMessage as e:
        raise ValueError(e.message) from None


def model_defaults(folder: Path) -> dict[str, Any]:
    """Sampling fields of generation_config.json, of which only those that GENERATE has; {} if there is no file."""
    try:
        config = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise click.UsageError(f"{folder / 'generation_config.json'}: {e}") from None
    names = ("top_k", "top_p", "min_p", "repetition_penalty")
    fields = {name: config[name] for name in names if config.get(name) is not None}
    return {**fields, "temperature": config.get("temperature", 1.0) if config.get("do_sample") else 0.0}
