"""colibri-client score."""

from __future__ import annotations

import math
from typing import Any

import click
from colibri_protocol.limits import MAX_LOGPROBS

from ..results import Scores
from ..sync import Client
from ..text import Tokenizer
from .inputs import prompt_options, take_prompt
from .output import dump, number, perplexity, plain, row, scores_body
from .target import Target, connecting


@click.command()
@prompt_options(chat=False)
@click.option("--start", type=click.IntRange(1), default=1, show_default=True,
              help="First position to score; what is before it is given.")
@click.option("--top", type=click.IntRange(0, MAX_LOGPROBS), default=0, show_default=True,
              help="Best alternatives per position.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@click.option("--quiet", is_flag=True, help="Only the totals.")
@connecting
def score(target: Target, start: int, top: int, as_json: bool, quiet: bool, **options: Any) -> None:
    """Log probability of each token of a text, given those before it.

    \b
    Examples:
      colibri-client score 'The cat sat on the mat.'
      colibri-client score --tokens 1,2,3,4 --top 5
      colibri-client score --text - --quiet < chapter.txt

    Prints a line a token (position, id, log probability, text, alternatives; between tabs), then the total log
    probability (base e) and the perplexity. At least two tokens; the first has nothing before it and no score.

    Exit codes: see colibri-client --help.
    """
    prompt = take_prompt(options)
    with Client(target.socket) as client:
        tokenizer = (target.tokenizer if prompt.needs_tokenizer else target.tokenizer_if_any)(client.model)
        tokens = prompt.encode(tokenizer)
        scores = client.score(tokens, top=top, start=start)
    if as_json:
        dump(_body(tokens, scores))
    else:
        _print(tokens, scores, tokenizer, quiet)


def _body(tokens: list[int], scores: Scores) -> dict[str, Any]:
    measured = perplexity(scores.logprobs)
    return {"tokens": tokens, **scores_body(scores), "total_logprob": number(sum(scores)),
            "perplexity": measured if math.isfinite(measured) else None,
            "usage": plain(scores.usage), "times_ms": plain(scores.times)}


def _print(tokens: list[int], scores: Scores, tokenizer: Tokenizer | None, quiet: bool) -> None:
    if not quiet:
        for position, (logprob, top) in enumerate(zip(scores, scores.top, strict=True), scores.start):
            click.echo(row(position, tokens[position], logprob, top, tokenizer))
    click.echo(f"{len(scores)} tokens, total log probability {sum(scores):.4f}, "
               f"perplexity {perplexity(scores.logprobs):.4f}")
