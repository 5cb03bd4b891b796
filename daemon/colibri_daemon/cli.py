"""colibrid: one command line. A subcommand's module is imported when it is used, so that help and start stay fast."""

from __future__ import annotations

import importlib

import click

# command -> (module, attribute, one-line help shown in the list)
COMMANDS: dict[str, tuple[str, str, str]] = {
    "serve": ("colibri_daemon.commands", "serve", "Serve a model on a Unix socket."),
    "plan": ("colibri_daemon.plan.command", "plan", "Tell what a machine can serve: memory, requests, speed."),
    "check-config": ("colibri_daemon.config_commands", "check_config", "Check a configuration file."),
    "config-reference": ("colibri_daemon.config_commands", "config_reference", "Print every setting."),
    "convert": ("colibri_engine.commands", "convert", "Convert a Hugging Face folder or a GGUF file."),
    "synth-model": ("colibri_engine.commands", "synth_model", "Write a random-weight model of any geometry."),
    "inspect": ("colibri_engine.commands", "inspect", "Show what is in a model folder."),
    "verify": ("colibri_engine.commands", "verify", "Check every checksum of a model folder."),
    "selftest": ("colibri_engine.commands", "selftest", "Compute the numerics fingerprint and compare it."),
    "perplexity": ("colibri_engine.commands", "perplexity", "Measure a model's perplexity on a text."),
    "completion": ("colibri_daemon.completion", "completion", "Print a shell completion script."),
}


class LazyGroup(click.Group):
    """A click group whose commands are rows of COMMANDS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, row[2]) for name, row in COMMANDS.items()])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="colibri-daemon", prog_name="colibrid")
def main() -> None:
    """Colibri: Mixture-of-Experts inference on CPUs, the same bits everywhere."""
