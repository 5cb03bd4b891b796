"""The daemon's own subcommand of colibrid. Its exit codes are those of common/exit_codes.py."""

from __future__ import annotations

import sys

import click

from .common.exit_codes import Exit
from .common.settings import Settings, click_options


@click.command()
@click_options
def serve(settings: Settings) -> None:
    """Serve a model on a Unix socket, in the foreground.

    SIGTERM or Ctrl-C lets live requests finish for drain_seconds and stops; again: stops now. SIGHUP reads the
    configuration and the model again and goes over to them, with nothing dropped. Exit codes: 0 stopped, 2
    configuration refused, 3 a process failed to start five times in a row, 4 the model cannot be loaded, 5 a socket
    cannot be used, 70 a fault of ours.
    """
    if settings.model is None:
        click.echo("error: model: is not set; give --model DIR, or model = \"DIR\" in the configuration file", err=True)
        sys.exit(Exit.USAGE)
    from .supervisor.main import serve as run

    sys.exit(run(settings))
