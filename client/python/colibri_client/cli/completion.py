"""colibri-client completion: click's own scripts."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from .app import PROGRAM, main


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for SHELL.

    \b
    Examples:
      eval "$(colibri-client completion bash)"                                        in ~/.bashrc
      eval "$(colibri-client completion zsh)"                                         in ~/.zshrc
      colibri-client completion fish > ~/.config/fish/completions/colibri-client.fish
    """
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(main, {}, PROGRAM, f"_{PROGRAM.replace('-', '_').upper()}_COMPLETE").source())
