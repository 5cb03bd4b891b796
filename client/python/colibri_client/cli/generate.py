"""colibri-client generate."""

from __future__ import annotations

from typing import Any

import click

from ..sync import Client
from ..text import Tokenizer
from .answer import Answer, Emit, ask, with_turn_end
from .inputs import Prompt, prompt_options, take_prompt
from .options import model_defaults as read_model_defaults
from .options import request_options, take_fields
from .output import IdStream, JsonStream, RowStream, TextStream, answer_body, dump, silent, summary
from .target import Exit, Target, connecting


@click.command()
@prompt_options(chat=True)
@request_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object at the end; see replay.")
@click.option("--stream", is_flag=True, help="With --json: a JSON object for each token too, one a line.")
@click.option("--ids", is_flag=True, help="Print token ids even if there is a tokenizer.")
@click.option("--quiet", is_flag=True, help="No summary on stderr.")
@connecting
def generate(target: Target, as_json: bool, stream: bool, ids: bool, quiet: bool, stop: tuple[str, ...],
             model_defaults: bool, **options: Any) -> int:
    """Continue a prompt: text, one chat turn, or token ids. The output streams to stdout.

    \b
    Examples:
      colibri-client generate 'Once upon a time' --max-tokens 50
      colibri-client generate --chat 'Why is the sky blue?' --temperature 0.7 --seed 1
      colibri-client generate --tokens 1,2,3 --logprobs 5
      git diff | colibri-client generate --chat - --system 'Write a commit message.'
      colibri-client generate --text 'One, two' --stop , --json

    Output is text if the request was made of text or a tokenizer is found, else token ids. With --logprobs it is one
    line a token: index, id, log probability, text, alternatives. Special tokens are not printed, and what you type
    cannot become one.

    Without sampling options the output is greedy: the same every time. With them, the seed makes it repeatable. The
    summary on stderr has the number of tokens, the time to the first, tokens a second, and how it ended; --json has
    that and the effective request with its seed, which replay takes.

    Ctrl-C cancels the request at the daemon; what has come is printed. A second Ctrl-C does not wait for the daemon.

    \b
    Exit codes:
      0    done, stopped by a stop string included
      1    the daemon refused or failed the request; the message has code, field and remedy
      2    the command line, the input or the tokenizer cannot be used
      3    no connection to the daemon
      130  cancelled by Ctrl-C
      141  the reader of stdout went away; the request was cancelled
    """
    _check(as_json, stream, stop, options)
    prompt, fields = take_prompt(options), take_fields(options)
    with Client(target.socket) as client:
        tokenizer = _tokenizer(target, client, prompt)
        if model_defaults:
            fields = {**_defaults(target, client), **fields}
        if prompt.chat is not None and tokenizer is not None:
            fields = with_turn_end(fields, tokenizer, client.model)
        emit = _emitter(as_json, stream, None if ids else tokenizer, "logprobs" in fields)
        answer = ask(client, prompt.encode(tokenizer), fields, tokenizer, stop, emit)
    return _end(answer, as_json, stream, quiet)


def _check(as_json: bool, stream: bool, stop: tuple[str, ...], options: dict[str, Any]) -> None:
    if "" in stop:
        raise click.UsageError("--stop is empty; it must be some text")
    if stream and not as_json:
        raise click.UsageError("--stream is about --json; text streams anyway")
    if options["prompt_logprobs"] is not None and not as_json:
        raise click.UsageError("--prompt-logprobs needs --json; colibri-client score prints a table")


def _tokenizer(target: Target, client: Client, prompt: Prompt) -> Tokenizer | None:
    return (target.tokenizer if prompt.needs_tokenizer else target.tokenizer_if_any)(client.model)


def _defaults(target: Target, client: Client) -> dict[str, Any]:
    folder = target.folder(client.model)
    if folder is None:
        raise click.UsageError("--model-defaults: the daemon does not say where its model is; pass --model DIR")
    return read_model_defaults(folder)


def _emitter(as_json: bool, stream: bool, tokenizer: Tokenizer | None, rows: bool) -> Emit:
    if as_json:
        return JsonStream() if stream else silent
    if rows:
        return RowStream(tokenizer)
    return TextStream() if tokenizer else IdStream()


def _end(answer: Answer, as_json: bool, stream: bool, quiet: bool) -> int:
    if as_json:
        dump({"type": "done", **answer_body(answer)} if stream else answer_body(answer))
    if not quiet or answer.interrupted:
        click.echo(summary(answer), err=True)
    return Exit.INTERRUPTED if answer.interrupted else Exit.OK
