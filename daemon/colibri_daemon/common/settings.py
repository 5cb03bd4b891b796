"""Reading the configuration: TOML file, environment and flags become one :class:`Settings`, or a list of all problems.

Precedence: flag, environment, file, default. A value that is refused is refused even where a stronger source overrides
it, so that a file cannot rot unseen. An empty COLIBRI_* variable counts as not set. An unknown key of the file is
refused; an unknown COLIBRI_* variable only warns, because others set such names too (a Kubernetes service called
"colibri" puts COLIBRI_PORT and more into every container).
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from .declaration import ONE_SOURCE, SETTINGS, Setting, Settings
from .exit_codes import Exit
from .values import UnknownNameError

__all__ = ["SETTINGS", "Setting", "Settings", "SettingsError", "click_options", "load_settings"]

CONFIG_VARIABLE = "COLIBRI_CONFIG"
# COLIBRI_* names that are no setting: the file, the engine's instruction set, the build's library.
OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, "COLIBRI_ISA", "COLIBRI_LIBRARY_DIR"})
_FILE_BYTES = 1 << 20


class SettingsError(Exception):
    """The configuration was refused. problems: one readable sentence each, all there are."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


@dataclass
class _Source:
    """What one source says. places: name → where, as in Settings.origin."""

    strict: bool  # values have types of their own (TOML) and are not read from text
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def put(self, name: str, value: Any, place: str) -> None:
        self.values[name] = value
        self.places[name] = place

    def validated(self) -> dict[str, Any]:
        """The values with their final types; what is refused is added to problems."""
        try:
            if self.strict:  # JSON's types are TOML's; unlike Python's strict mode it takes a path from text
                document = json.dumps(self.values, default=str)
                checked = Settings.model_validate_json(document, strict=True, context=ONE_SOURCE)
            else:
                checked = Settings.model_validate(self.values, context=ONE_SOURCE)
        except ValidationError as e:
            refused: dict[str, Any] = {}
            for error in e.errors(include_url=False):
                refused.setdefault(str(error["loc"][0]), error.get("ctx", {}).get("error"))
            self.problems += [self._refusal(SETTINGS[name], cause) for name, cause in refused.items()]
            return {}
        return {name: getattr(checked, name) for name in checked.model_fields_set}

    def _refusal(self, setting: Setting, cause: Exception | None) -> str:
        value = self.values[setting.name]
        shown = json.dumps(value, default=str, ensure_ascii=False) if self.strict else repr(value)
        why = f"{cause}; " if isinstance(cause, UnknownNameError) else ""
        return f"{self.places[setting.name]}: {setting.name} = {shown[:200]}: {why}must be {setting.allowed}"


def load_settings(flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None) -> Settings:
    """flags: by setting's name, None for those not given; values as text or as Python has them. file None: the one that
    COLIBRI_CONFIG names, if any. SettingsError tells everything that is wrong, not only the first."""
    if file is None and environ.get(CONFIG_VARIABLE):
        file = Path(environ[CONFIG_VARIABLE])
    sources = [_from_file(file), _from_environment(environ), _from_flags(flags)]  # weakest first
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for source in sources:
        values |= source.validated()
        origins |= source.places
    problems = [problem for source in sources for problem in source.problems]
    settings = Settings.model_validate(values, context=ONE_SOURCE)
    for names, message in settings.conflicts():
        places = dict.fromkeys(origins[name] for name in names if name in origins)
        problems.append(f"{', '.join(places)}: {message}")
    if problems:
        raise SettingsError(problems)
    settings._again = functools.partial(load_settings, flags, environ, file)
    settings._origins.update(origins)
    settings._warnings.extend(warning for source in sources for warning in source.warnings)
    return settings


def _from_file(path: Path | None) -> _Source:
    source = _Source(strict=True)
    if path is None:
        return source
    try:
        with open(path, "rb") as f:
            content = f.read(_FILE_BYTES + 1)
        if len(content) > _FILE_BYTES:
            raise ValueError(f"over {_FILE_BYTES} bytes; that is no configuration")
        document = content.decode()
        keys = tomllib.loads(document)
    except OSError as e:
        source.problems.append(f"{path}: cannot be read: {e.strerror}")
    except (ValueError, RecursionError) as e:  # no TOML, no UTF-8, brackets without end
        source.problems.append(f"{path}: {e}")
    else:
        for key, value in keys.items():
            _take_key(source, key, value, f"{path}{_line(document, key)}")
    return source


def _take_key(source: _Source, key: str, value: Any, place: str) -> None:
    if key in SETTINGS:
        source.put(key, value, place)
    elif isinstance(value, dict):
        source.problems.append(f"{place}: [{key}]: settings have no sections; write key = value lines only")
    else:
        source.problems.append(f'{place}: unknown key "{key}"; {_nearest(key, list(SETTINGS))}')


def _line(document: str, key: str) -> str:
    """":12", or nothing for a key written in a form we do not search for."""
    found = re.search(rf"""^[ \t]*["'[]*{re.escape(key)}["'\]]*[ \t]*(=|$)""", document, re.MULTILINE)
    return f":{document.count(chr(10), 0, found.start()) + 1}" if found else ""


def _from_environment(environ: Mapping[str, str]) -> _Source:
    source = _Source(strict=False)
    variables = {setting.variable: name for name, setting in SETTINGS.items()}
    for variable, value in environ.items():
        if variable in variables and value:
            source.put(variables[variable], value, variable)
        elif variable.startswith("COLIBRI_") and variable not in variables and variable not in OTHER_VARIABLES:
            source.warnings.append(f"{variable} is set but is no setting; {_nearest(variable, list(variables))}")
    return source


def _from_flags(flags: Mapping[str, Any]) -> _Source:
    source = _Source(strict=False)
    for name, value in flags.items():
        if name not in SETTINGS:
            source.problems.append(f'unknown setting "{name}"; {_nearest(name, list(SETTINGS))}')
        elif value is not None:
            source.put(name, value, SETTINGS[name].flag)
    return source


def _nearest(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f'did you mean "{close[0]}"?' if close else "colibrid config-reference lists all"


def click_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command --config and every setting as a flag. The command is called with one argument for all of them,
    the Settings; if they are refused, the problems go to stderr and the exit code is USAGE."""

    @functools.wraps(command)
    def run(config: Path | None, **arguments: Any) -> Any:
        flags = {name: arguments.pop(name) for name in SETTINGS}
        try:
            settings = load_settings(flags, os.environ, config)
        except SettingsError as e:
            for problem in e.problems:
                click.echo(f"error: {problem}", err=True)
            sys.exit(Exit.USAGE)
        return command(settings, **arguments)

    for setting in reversed(SETTINGS.values()):
        run = _option(setting)(run)
    return click.option("--config", type=click.Path(path_type=Path), metavar="FILE",
                        help=f"Configuration file (TOML). [env: {CONFIG_VARIABLE}]")(run)  # fmt: skip


def _option(setting: Setting) -> Callable[..., Any]:
    """Click only splits the command line; reading the value is left to Settings, so that every source is read alike."""
    default = setting.text(setting.default)
    help = f"{setting.help} [env: {setting.variable}{f'; default: {default}' if default else ''}]"
    if setting.kind == "bool":
        return click.option(f"{setting.flag}/--no-{setting.flag[2:]}", setting.name, default=None, help=help)
    if setting.choices:
        return click.option(setting.flag, setting.name, type=click.Choice(setting.choices), help=help)
    kind = click.Path() if setting.kind == "path" else str  # a path completes in the shell
    return click.option(setting.flag, setting.name, type=kind, metavar=setting.metavar, help=help)
