"""CONFIG.md, the example file and METRICS.md, made from the declarations. ``--write`` remakes them, ``--check``
compares."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

from . import metrics_reference
from .declaration import SETTINGS, Setting
from .settings import CONFIG_VARIABLE

_ROOT = Path(__file__).resolve().parents[3]
_COMMAND = "python -m colibri_daemon.common.reference --write"
# What the example shows for settings that have no default.
_EXAMPLES = {"model": '"/var/lib/colibri/model"', "socket_group": '"colibri"', "metrics": '"127.0.0.1:9464"'}

_INTRODUCTION = f"""# Configuration

<!-- Made by {_COMMAND}. -->

Every setting can be given as a flag of `colibrid serve`, as an environment variable, or as a key of a TOML file named
by `--config FILE` or `{CONFIG_VARIABLE}`. A flag wins over the environment, the environment over the file, the file
over the default. The file is flat: `key = value` lines, no sections. `colibrid check-config FILE` tells whether it
would start.

* Sizes: a number of bytes, or K, M, G, T (also KiB …) for powers of 1024, kB, MB … for powers of 1000; in the file as
  text: `kv_bytes = "4G"`.
* Lists: `[1000, "www-data"]` in the file, `1000,www-data` elsewhere. Names of users and groups are looked up at the
  start and at each reload.
* Switches: `true` or `false`; as flags `--verify` and `--no-verify`.
* An empty environment variable counts as not set. A COLIBRI_* variable that is no setting is warned about; an unknown
  key of the file or an unknown flag is refused.
"""

_HEAD = f"""# Colibri's configuration: every setting at its default. Made by {_COMMAND}.
# To use it: colibrid serve --config FILE. To check it: colibrid check-config FILE."""


def sections() -> Iterator[tuple[str, list[Setting]]]:
    for section, settings in itertools.groupby(SETTINGS.values(), lambda setting: setting.section):
        yield section, list(settings)


def markdown() -> str:
    """CONFIG.md."""
    lines = [_INTRODUCTION]
    for section, settings in sections():
        lines += [f"## {section}", "", "| key, flag, variable | value | default | meaning |", "|---|---|---|---|"]
        lines += [_row(setting) for setting in settings]
        lines.append("")
    return "\n".join(lines)


def _row(setting: Setting) -> str:
    default = "–" if setting.default in (None, ()) and setting.kind != "auto" else f"`{setting.text(setting.default)}`"
    names = f"`{setting.name}`<br>`{setting.flag}`<br>`{setting.variable}`"
    return f"| {names} | {setting.allowed} | {default} | {setting.help} |"


def example() -> str:
    """A configuration file in which every key stands as a comment, at its default."""
    lines = [_HEAD]
    for section, settings in sections():
        lines += ["", f"# ---- {section} ".ljust(100, "-")]
        for setting in settings:
            value = _EXAMPLES.get(setting.name) or setting.toml(setting.default)
            lines += [f"# {setting.help}", f"# Value: {setting.allowed}.", f"#{setting.name} = {value}", ""]
        lines.pop()
    return "\n".join(lines) + "\n"


FILES = {
    _ROOT / "daemon" / "CONFIG.md": markdown,
    _ROOT / "deploy" / "colibrid.toml": example,
    _ROOT / "daemon" / "METRICS.md": lambda: metrics_reference.markdown(_COMMAND),
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m colibri_daemon.common.reference", description=__doc__)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--write", action="store_true", help="write them")
    chosen.add_argument("--check", action="store_true", help="exit with 1 if one is not up to date")
    if parser.parse_args(arguments).write:
        for path, make in FILES.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(make(), encoding="utf-8")
    old = [path for path, make in FILES.items() if not path.exists() or path.read_text(encoding="utf-8") != make()]
    for path in old:
        print(f"{path}: not up to date; run {_COMMAND}", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
