"""Manual pages, made from what the programs' --help prints: nothing is said twice, so nothing can differ.

    python deploy/man.py FOLDER PROGRAM...      writes PROGRAM.1, PROGRAM-SUBCOMMAND.1 … into FOLDER

The version on every page is that of the first program. What is understood is the form that click and our gateway give
their help: "Usage:", a description, then sections of entries in two columns. In the description, lines indented further
than the rest are kept as they are (examples, tables).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# What groff would take for a command or print as a typographer's character.
_SPECIAL = str.maketrans({"\\": "\\e", "-": "\\-", "'": "\\(aq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti"})


@dataclass
class Help:
    """usage: its lines, without "Usage:". sections: title → (what, text) in order."""

    usage: list[str]
    description: list[str]
    sections: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """The description's first sentence."""
        paragraph = " ".join(line.strip() for line in _until_blank(self.description))
        return re.split(r"(?<=[^.])[.:](?:\s|$)", paragraph, maxsplit=1)[0]


def _until_blank(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if not line.strip():
            return
        yield line


def parse(text: str) -> Help:
    """The help text of one command. ValueError if it is none."""
    lines = text.splitlines()
    if not lines or not lines[0].startswith("Usage: "):
        raise ValueError("the help text does not begin with Usage:")
    usage = list(_until_blank(lines))
    found = Help([line.removeprefix("Usage: ").strip() for line in usage], [])
    entries: list[tuple[str, str]] | None = None
    for line in lines[len(usage) + 1 :]:
        if re.fullmatch(r"\S.*:", line):
            entries = found.sections[line[:-1]] = []
        elif entries is None:
            found.description.append(line)
        elif line.strip():
            _add(entries, line)
    return found


def _add(entries: list[tuple[str, str]], line: str) -> None:
    """A line of a section: "  WHAT  text", "  WHAT" or, further to the right, more of the text before."""
    if line.startswith("   "):
        what, text = entries.pop()
        entries.append((what, f"{text} {line.strip()}".strip()))
    else:
        what, _, text = line.strip().partition("  ")
        entries.append((what, text.strip()))


def page(name: str, version: str, found: Help, see: list[str]) -> str:
    """A manual page. see: other pages by name."""
    out = [f'.TH "{_text(name.upper())}" 1 "" "Colibri {version}" "Colibri"', ".nh", ".ad l"]
    out += [".SH NAME", f"{_text(name)} \\- {_text(found.summary)}"]
    out += [".SH SYNOPSIS", ".nf", *map(_line, found.usage), ".fi"]
    out += [".SH DESCRIPTION", *_description(found.description)]
    for title, entries in found.sections.items():
        out.append(f".SH {_text(title.upper())}")
        for what, text in entries:
            out += [".TP", f"\\fB{_text(what)}\\fR", _line(text) or "\\&"]
    if see:
        out += [".SH SEE ALSO", ", ".join(f"\\fB{_text(other)}\\fR(1)" for other in see)]
    return "\n".join(out) + "\n"


def _description(lines: list[str]) -> Iterator[str]:
    base = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    kept = False
    for line in [*lines, ""]:
        further = line[base:].startswith(" ")
        if further != kept and (further or kept):
            yield ".nf" if further else ".fi"
            kept = further
        if line.strip():
            yield _line(line[base:])
        else:
            yield ".PP"


def _text(text: str) -> str:
    return text.translate(_SPECIAL)


def _line(text: str) -> str:
    """A line of its own: one that begins with a dot is no request, one of blanks keeps them."""
    text = _text(text)
    return "\\&" + text if text[:1] in (".", " ") else text


def pages(program: str, version: str, folder: Path) -> Iterator[Path]:
    """Writes the pages of a program and of its subcommands; gives their paths."""
    todo: list[tuple[str, ...]] = [()]
    while todo:
        command = todo.pop(0)
        found = parse(_run(program, *command, "--help"))
        inner = [(*command, what) for what, _ in found.sections.get("Commands", [])]
        todo += inner
        above = [command[:-1]] if command else []
        name, *see = ["-".join((Path(program).name, *words)) for words in (command, *above, *inner)]
        path = folder / f"{name}.1"
        path.write_text(page(name, version, found, see), encoding="utf-8")
        yield path


def _run(program: str, *arguments: str) -> str:
    # Settings of whoever builds must not show as defaults; a program may print its help on either stream.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COLIBRI_")}
    done = subprocess.run([program, *arguments], env=environment | {"LC_ALL": "C.UTF-8"}, text=True, check=True,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    return done.stdout


def main(arguments: list[str]) -> None:
    folder, programs = Path(arguments[0]), arguments[1:]
    version = _run(programs[0], "--version").split()[-1]
    written = [path for program in programs for path in pages(program, version, folder)]
    print(f"{folder}: {len(written)} manual pages")


if __name__ == "__main__":
    main(sys.argv[1:])
