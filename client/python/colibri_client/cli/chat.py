"""colibri-client chat: a small conversation at the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from colibri_protocol.limits import DEFAULT_MAX_TOKENS

from ..errors import ColibriError
from ..sync import Client
from ..text import TextError, Tokenizer
from .answer import Answer, ask, with_turn_end
from .options import SETTABLE, parse_setting
from .output import TextStream, summary
from .target import Exit, Target, connecting, report

PROMPT = "> "
Message = dict[str, str]


@dataclass
class Conversation:
    """messages: what was said, the system prompt first if there is one. fields: of GENERATE."""

    tokenizer: Tokenizer
    system: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def fit(self, max_len: int) -> tuple[list[int], int]:
        """Token ids of the conversation with room for an answer in max_len tokens, and how many of the oldest
        exchanges had to be dropped for that. TextError if the last message alone is too long."""
        wanted = self.fields.get("max_tokens", DEFAULT_MAX_TOKENS)
        room = max(1, max_len - min(wanted, max_len // 4))
        dropped = 0
        while len(tokens := self.tokenizer.encode_chat(self.messages)) > room:
            if not self._drop_oldest():
                raise TextError(f"this message is too long: {len(tokens)} tokens with the template, and with room "
                                f"for an answer {room} of {max_len} are allowed")
            dropped += 1
        return tokens, dropped

    def _drop_oldest(self) -> bool:
        """A user's message and its answer, never the system prompt or the last message."""
        first = 0 if self.system is None else 1
        if len(self.messages) < first + 3:
            return False
        del self.messages[first : first + 2]
        return True


@click.command()
@click.option("--system", metavar="TEXT", help="System prompt.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE",
              help=f"Request parameter, repeatable: {', '.join(SETTABLE)}.")
@click.option("--quiet", is_flag=True, help="No summary after answers.")
@connecting
def chat(target: Target, system: str | None, settings: tuple[str, ...], quiet: bool) -> int:
    """Talk with the model, in its own chat template. /help lists the commands inside.

    \b
    Examples:
      colibri-client chat --system 'You are a terse assistant.' --set temperature=0.7
      echo 'What is 2 + 2?' | colibri-client chat

    Ctrl-C cancels the answer that is being given and stays in the chat; Ctrl-D ends it. A line that ends in \\ goes on
    in the next one. When the conversation no longer fits into what the model can attend to, its oldest exchanges are
    left out, and that is said. What you type is kept in memory only.

    Exit codes: see colibri-client --help; when input is not a terminal, 1 if any message got no answer.
    """
    fields = dict(_setting(entry) for entry in settings)
    with Client(target.socket) as client:
        conversation = Conversation(target.tokenizer(client.model), system, fields)
        return Repl(target, client, conversation, quiet).run()


def _setting(entry: str) -> tuple[str, Any]:
    name, _, value = entry.partition("=")
    try:
        return parse_setting(name, value)
    except ValueError as e:
        raise click.UsageError(f"--set {entry}: {e}") from None


class Repl:
    """Reads lines and acts on them until the end of input or /exit."""

    def __init__(self, target: Target, client: Client, conversation: Conversation, quiet: bool) -> None:
        self._target, self._client, self._conversation, self._quiet = target, client, conversation, quiet
        self._model_id = client.model.id
        self._interactive = sys.stdin.isatty()
        self._ended = False
        self._code: int = Exit.OK

    def run(self) -> int:
        """The exit code."""
        if self._interactive:
            import readline  # noqa: F401  (input() then edits lines and remembers them)

            click.echo(f"{self._client.model.name}; /help for help, Ctrl-D to end", err=True)
        while not self._ended:
            try:
                line = self._line()
            except EOFError:
                if self._interactive:
                    click.echo()
                break
            except KeyboardInterrupt:  # at the prompt: forget what was typed
                click.echo()
                continue
            if line.strip():
                self._act(line)
        return Exit.OK if self._interactive else self._code

    def _line(self) -> str:
        line = input(PROMPT if self._interactive else "")
        while line.endswith("\\"):
            line = f"{line[:-1]}\n{input('. ' if self._interactive else '')}"
        return line

    def _act(self, line: str) -> None:
        if not line.startswith("/"):
            self._say(line)
            return
        name, _, rest = line[1:].strip().partition(" ")
        command = COMMANDS.get(name)
        if command is None:
            self._note(f"/{name} is not a command; /help lists them")
        else:
            command.run(self, rest.strip())

    def _note(self, text: str) -> None:
        click.echo(text, err=True)

    # ---- talking ----

    def _say(self, text: str) -> None:
        """Sends a user's message. One that gets no answer is taken back."""
        conversation = self._conversation
        conversation.messages.append({"role": "user", "content": text})
        try:
            answer = self._ask()
        except ColibriError as e:
            conversation.messages.pop()
            self._code = report(e)
            return
        except KeyboardInterrupt:  # the second one
            conversation.messages.pop()
            self._note("\ngave up waiting; the request was cancelled")
            return
        conversation.messages.append({"role": "assistant", "content": answer.text or ""})
        if answer.interrupted:
            self._note("cancelled; what came so far stays in the conversation")
        if not self._quiet:
            self._note(summary(answer))

    def _ask(self) -> Answer:
        self._follow_model()
        conversation, model = self._conversation, self._client.model
        tokens, dropped = conversation.fit(model.max_len)
        if dropped:
            gone = "oldest exchange was" if dropped == 1 else f"{dropped} oldest exchanges were"
            self._note(f"the conversation is longer than the {model.max_len} tokens the model takes: its {gone} left "
                       "out; /reset starts afresh")
        fields = with_turn_end(conversation.fields, conversation.tokenizer, model)
        return ask(self._client, tokens, fields, conversation.tokenizer, (), TextStream())

    def _follow_model(self) -> None:
        """After a reload of the daemon the conversation goes on with the new model and its tokenizer."""
        model = self._client.model
        if model.id != self._model_id:
            self._conversation.tokenizer, self._model_id = self._target.tokenizer(model), model.id
            self._note(f"another model is served now: {model.name}")

    # ---- commands ----

    def help(self, rest: str) -> None:
        """this list"""
        width = max(len(command.usage) for command in COMMANDS.values())
        for command in COMMANDS.values():
            self._note(f"{command.usage:<{width}}  {command.run.__doc__}")

    def reset(self, rest: str) -> None:
        """forget the conversation, keep system prompt and settings"""
        self._conversation.reset()

    def system(self, rest: str) -> None:
        """start afresh with another system prompt; without TEXT with none"""
        self._conversation.system = rest or None
        self._conversation.reset()

    def set(self, rest: str) -> None:
        """change a request parameter; without VALUE back to its default; without NAME show them"""
        name, _, value = rest.replace("=", " ", 1).partition(" ")
        fields = self._conversation.fields
        if not name:
            for key, current in fields.items():
                self._note(f"{key} {current}")
            self._note(f"can be set: {', '.join(SETTABLE)}")
        elif not value.strip():
            fields.pop(name.replace("-", "_"), None)
        else:
            self._set(name, value.strip())

    def _set(self, name: str, value: str) -> None:
        try:
            key, parsed = parse_setting(name, value)
        except ValueError as e:
            self._note(f"error: {e}")
        else:
            self._conversation.fields[key] = parsed

    def tokens(self, rest: str) -> None:
        """how many tokens the conversation has; with TEXT the ids of the text"""
        tokenizer = self._conversation.tokenizer
        if rest:
            self._note(", ".join(f"{id} {json.dumps(tokenizer.name(id), ensure_ascii=False)}"
                                 for id in tokenizer.encode(rest)))
            return
        messages = self._conversation.messages
        count = len(tokenizer.encode_chat(messages)) if messages else 0
        self._note(f"{count} of {self._client.model.max_len} tokens")

    def save(self, rest: str) -> None:
        """write the conversation to FILE as JSON"""
        if not rest:
            self._note("error: /save needs a file name")
            return
        body = {"model": self._client.model.name, "settings": self._conversation.fields,
                "messages": self._conversation.messages}
        try:
            Path(rest).expanduser().write_text(json.dumps(body, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        except OSError as e:
            self._note(f"error: {rest}: {e.strerror}")
        else:
            self._note(f"written to {rest}")

    def exit(self, rest: str) -> None:
        """end the chat, as Ctrl-D does"""
        self._ended = True


@dataclass(frozen=True)
class Command:
    """run's doc string is what /help says."""

    usage: str
    run: Callable[[Repl, str], None]


COMMANDS: dict[str, Command] = {
    "help": Command("/help", Repl.help),
    "reset": Command("/reset", Repl.reset),
    "system": Command("/system [TEXT]", Repl.system),
    "set": Command("/set [NAME [VALUE]]", Repl.set),
    "tokens": Command("/tokens [TEXT]", Repl.tokens),
    "save": Command("/save FILE", Repl.save),
    "exit": Command("/exit", Repl.exit),
}
