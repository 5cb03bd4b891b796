"""The command group. A command's module is imported when it is used, so that help and completion stay fast."""

from __future__ import annotations

import importlib
from pathlib import Path

import click

from .target import Target, connection_options

PROGRAM = "colibri-client"

# command -> (module, one-line help shown in the list); the module's `command` is the click command
COMMANDS: dict[str, tuple[str, str]] = {
    "generate": ("generate", "Continue a prompt; the output streams to stdout."),
    "chat": ("chat", "Talk with the model."),
    "score": ("score", "Log probability of each token of a text, and its perplexity."),
    "health": ("state", "Is the daemon ready? For people, scripts and probes."),
    "stats": ("state", "The daemon's counters."),
    "top": ("top", "Live view of workers, queue, KV cache and rates."),
    "replay": ("replay", "Check that the daemon gives a recorded output again."),
    "admin": ("admin", "Reload, drain, evict, log level, dump: for who runs the daemon."),
    "completion": ("completion", "Print the completion script for a shell."),
}


class LazyGroup(click.Group):
    """A click group whose commands are rows of COMMANDS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f".{COMMANDS[cmd_name][0]}", __package__)
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, row[1]) for name, row in COMMANDS.items()])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="colibri-daemon", prog_name=PROGRAM)
@connection_options
@click.pass_context
def main(ctx: click.Context, socket: str | None, model: Path | None) -> None:
    """Use a Colibri daemon: generate, chat, score, and see how it is.

    \b
    Examples:
      colibri-client health --wait 60
      colibri-client generate --text 'In the beginning' --max-tokens 40
      colibri-client chat --system 'Answer in one sentence.' --set temperature=0.7
      colibri-client --socket /tmp/c.sock generate --tokens 1,2,3 --json > out.json
      colibri-client replay out.json

    \b
    Exit codes:
      0    done
      1    the daemon refused or failed the request (health: it is not ready; replay: other tokens)
      2    the command line or an input cannot be used (replay: recorded with another model)
      3    no connection to the daemon, or it was lost, or it does not answer
      130  interrupted by Ctrl-C; the request was cancelled
      141  the reader of stdout went away

    --socket and --model may stand before or after the command. Environment: COLIBRI_SOCKET, COLIBRI_MODEL.
    """
    ctx.obj = Target.of(socket, model)
