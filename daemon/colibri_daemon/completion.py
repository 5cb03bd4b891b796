"""colibrid completion: click's own scripts."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

PROGRAM = "colibrid"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script for SHELL.

    \b
    Examples:
      eval "$(colibrid completion bash)"                                  in ~/.bashrc
      eval "$(colibrid completion zsh)"                                   in ~/.zshrc
      colibrid completion fish > ~/.config/fish/completions/colibrid.fish
    """
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(context.find_root().command, {}, PROGRAM, f"_{PROGRAM.upper()}_COMPLETE").source())
