"""colibri-client replay."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from colibri_protocol.messages import ModelInfo

from ..results import Completion
from ..sync import Client
from .output import RECORDED
from .target import Exit, Target, connecting

# What the receipt and the daemon must agree on before tokens are compared; receipt's name -> ModelInfo's.
IDENTITY = {"model_id": "id", "fingerprint": "fingerprint", "pinned": "pinned", "window": "window",
            "positions": "positions", "kv_format": "kv_format"}


@dataclass(frozen=True)
class Record:
    """What generate --json wrote. fields: of GENERATE, besides tokens. complete: the output ended by itself, so that
    the way it ends must come out the same."""

    prompt: list[int]
    fields: dict[str, Any]
    tokens: list[int]
    finish_reason: str
    receipt: dict[str, Any]
    complete: bool

    @classmethod
    def parse(cls, text: str, source: str) -> Record:
        """UsageError if this is not such a record."""
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            body = json.loads(lines[-1]) if lines else None
            request = dict(body["request"])
            reason = body["finish_reason"]
            complete = reason in ("stop", "length") and (body["stop_match"] or {}).get("kind") != "text"
            tokens = [int(token) for token in body["tokens"]]
            fields = {name: request[name] for name in RECORDED if name != "tokens"}
            fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
            if not complete:  # the client or the clock ended it: go exactly as far
                fields |= {"max_tokens": len(tokens), "min_tokens": min(fields["min_tokens"], len(tokens))}
            return cls(request["tokens"], fields, tokens, reason, dict(body["receipt"]), complete)
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise click.UsageError(f"{source}: not what generate --json writes ({type(e).__name__}: {e})") from None

    def foreign(self, model: ModelInfo) -> list[str]:
        """What of the receipt is not of the model that is served."""
        return [f"{name}: recorded {self.receipt.get(name)}, served {getattr(model, attribute)}"
                for name, attribute in IDENTITY.items() if self.receipt.get(name) != getattr(model, attribute)]

    def difference(self, again: Completion) -> str | None:
        """Where the second output differs from the first."""
        new = [int(token) for token in again.tokens]
        for index, (then, now) in enumerate(zip(self.tokens, new, strict=False)):
            if then != now:
                return f"token {index} was {then} and is {now}"
        if len(new) != len(self.tokens):
            return f"there were {len(self.tokens)} tokens and are {len(new)}"
        if self.complete and again.finish_reason != self.finish_reason:
            return f"finish_reason was {self.finish_reason} and is {again.finish_reason}"
        return None


@click.command()
@click.argument("file", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@connecting
def replay(target: Target, file: str, as_json: bool) -> int:
    """Check that the daemon gives a recorded output again, token for token.

    FILE is what colibri-client generate --json wrote (with --stream: its last line counts); - is stdin. The receipt in
    it says what the output is a function of: model, numerics fingerprint, seed, parameters. A daemon with the same
    model must give the same tokens, on any CPU, with any load and any number of threads.

    \b
    Example:
      colibri-client generate --chat 'Name a colour.' --temperature 1 --json > out.json
      colibri-client replay out.json

    \b
    Exit codes:
      0  the same tokens
      1  other tokens, or the daemon refused the request
      2  the record is of another model or configuration (or cannot be read): not comparable
      3  no connection to the daemon
    """
    record = Record.parse(_read(file), file)
    with Client(target.socket) as client:
        if foreign := record.foreign(client.model):
            return _tell("incomparable", "; ".join(foreign), Exit.USAGE, as_json)
        again = client.complete(record.prompt, **record.fields)
    if difference := record.difference(again):
        return _tell("different", difference, Exit.FAILED, as_json)
    return _tell("same", f"{len(again.tokens)} tokens", Exit.OK, as_json)


def _read(file: str) -> str:
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return data.decode("utf-8")
    except OSError as e:
        raise click.UsageError(f"{file}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise click.UsageError(f"{file}: not what generate --json writes (not UTF-8)") from None


def _tell(result: str, detail: str, code: Exit, as_json: bool) -> Exit:
    click.echo(json.dumps({"result": result, "detail": detail}) if as_json else f"{result}: {detail}")
    return code
