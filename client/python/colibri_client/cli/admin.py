"""colibri-client admin: the daemon's admin socket from a shell."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import click

from ..admin import SUFFIX, Admin, admin_path
from . import output
from .target import Exit, Target, connecting

LEVELS = ("debug", "info", "warning", "error")
ROLES = ("supervisor", "dispatcher", "kvpool", "worker")
SECONDS = 30.0  # for everything but a reload
EXIT_CODES = """
    \b
    Exit codes:
      0  done
      1  the daemon could not do it; nothing has changed, and the reason is printed
      2  the command line cannot be used
      3  no connection to the admin socket, or no answer
"""


@click.group()
def admin() -> None:
    """Administer a running daemon over its admin socket.

    Only the daemon's own user and root can connect to it. Its path is the client socket's with .admin behind it, unless
    the daemon's admin_socket says otherwise: then give --admin-socket, or set COLIBRI_ADMIN_SOCKET.

    \b
    Examples:
      colibri-client admin reload                     after editing colibrid.toml or replacing the model
      colibri-client admin drain && colibri-client admin dump | jq '.requests | length'
      colibri-client admin resume
      colibri-client admin evict --uid 1000           drop what is cached of a user
      colibri-client admin log-level debug --role worker
    """


def _command(function: Callable[..., tuple[dict[str, Any], str]]) -> click.Command:
    """A subcommand. function gets the Admin first, and returns what the daemon told and the same in words."""

    @functools.wraps(function)
    def run(target: Target, admin_socket: str | None, as_json: bool, **options: Any) -> int:
        with Admin(admin_path(admin_socket, target.socket)) as connection:
            told, words = function(connection, **options)
        if as_json:
            output.dump(told)
        else:
            click.echo(words)
        return Exit.OK

    run.__doc__ = (function.__doc__ or "").rstrip() + "\n" + EXIT_CODES
    for option in (
        click.option("--json", "as_json", is_flag=True, help="What the daemon tells, for machines."),
        click.option("--admin-socket", type=click.Path(), metavar="PATH", help="Admin socket of the daemon. Default: "
                     f"COLIBRI_ADMIN_SOCKET, else the client socket's path and {SUFFIX}."),
    ):
        run = option(run)
    return admin.command(name=function.__name__.replace("_", "-"))(connecting(run))


@_command
@click.option("--everything", is_flag=True, help="Replace dispatcher and KV pool too, even if they are not new.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
              help="Wait no longer; the reload goes on.  [default: for ever]")
def reload(connection: Admin, everything: bool, timeout: float | None) -> tuple[dict[str, Any], str]:
    """Go over to a new configuration or model, dropping nothing.

    Both are read again. Waits until the new workers serve. If anything is wrong with the configuration or the model,
    everything stays as it was. The same as SIGHUP, but with an answer.

    \b
    Example:
      colibri-client admin reload || journalctl -u colibrid -n 20
    """
    told = connection.reload(everything, timeout=timeout)
    return told, f"generation {told.get('generation')} serves after {told.get('seconds', 0):.1f} s"


@_command
def drain(connection: Admin) -> tuple[dict[str, Any], str]:
    """Take no new requests, but stay up.

    The daemon is not ready then, and clients are told to go elsewhere. What is live goes on for the daemon's
    drain_seconds, then ends with DRAINING. `resume` takes it back.

    \b
    Example:
      colibri-client admin drain      before maintenance; then watch: colibri-client stats --json | jq .running
    """
    told = connection.drain(timeout=SECONDS)
    return told, f"draining, {told.get('live')} requests are live"


@_command
def resume(connection: Admin) -> tuple[dict[str, Any], str]:
    """Take requests again after `drain`.

    \b
    Example:
      colibri-client admin resume && colibri-client health
    """
    return connection.resume(timeout=SECONDS), "requests are taken again"


@_command
@click.option("--uid", type=click.IntRange(0), help="Only what is cached of this user.  [default: everybody's]")
@click.option("--tenant", help="With --uid: only this tenant's. Without it: only what belongs to no tenant.")
def evict(connection: Admin, uid: int | None, tenant: str | None) -> tuple[dict[str, Any], str]:
    """Drop cached prefixes from the KV cache.

    What running requests use stays until they end, but no other request finds it.

    \b
    Examples:
      colibri-client admin evict
      colibri-client admin evict --uid 997 --tenant acme
    """
    told = connection.evict(uid, tenant, timeout=SECONDS)
    return told, f"{told.get('slabs')} slabs became free"


@_command
@click.argument("level", type=click.Choice(LEVELS))
@click.option("--role", metavar="ROLE", help=f"Only these processes: {', '.join(ROLES)}, or one, such as 'worker 0'.",
              shell_complete=lambda ctx, param, typed: [role for role in ROLES if role.startswith(typed)])
def log_level(connection: Admin, level: str, role: str | None) -> tuple[dict[str, Any], str]:
    """Change what is logged: from LEVEL on, until the daemon ends.

    Processes that start later, and after a reload, log as much.

    \b
    Examples:
      colibri-client admin log-level debug --role dispatcher
      colibri-client admin log-level info
    """
    told = connection.log_level(level, role, timeout=SECONDS)
    return told, f"{level}: {', '.join(told.get('processes', ()))}"


@_command
def dump(connection: Admin) -> tuple[dict[str, Any], str]:
    """Print what the dispatcher knows, as JSON.

    Connections, requests, queue, workers and pools, with states and ages; never tokens.

    \b
    Examples:
      colibri-client admin dump | jq '.requests[] | select(.age_s > 60)'
      colibri-client admin dump | jq '.queue'
    """
    told = connection.dump(timeout=SECONDS)
    return told, json.dumps(told, indent=1)
