"""Writes the ABI record of colibri.h: constants, enum values, struct layouts (asked of the C compiler) and prototypes.

Remake after a deliberate change: python tests/golden/abi/record.py --write   (or: make abi-record)
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from cffi import FFI

ROOT = Path(__file__).resolve().parents[3]
HEADER = ROOT / "engine_c" / "include" / "colibri.h"
RECORD = Path(__file__).with_name("colibri-abi-1.txt")


def build_ffi() -> ModuleType:
    """_build_ffi.py as a module, without importing the package it belongs to (which needs the built engine)."""
    path = ROOT / "engine_c" / "python" / "colibri_engine" / "_build_ffi.py"
    spec = importlib.util.spec_from_file_location("colibri_build_ffi", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def struct_fields(ffi: FFI) -> dict[str, list[str]]:
    """Field names of every public struct that is not opaque."""
    typedefs, _, _ = ffi.list_types()
    found = {}
    for name in sorted(typedefs):
        ctype = ffi.typeof(name)
        if ctype.kind == "struct" and ctype.fields is not None:
            found[name] = [field for field, _ in ctype.fields]
    return found


def layout_program(structs: dict[str, list[str]]) -> str:
    lines = ['#include "colibri.h"', "#include <stdio.h>", "int main(void) {"]
    for name, fields in structs.items():
        lines.append(f'printf("struct {name} size %zu align %zu\\n", sizeof({name}), _Alignof({name}));')
        for field in fields:
            place = f"offsetof({name}, {field}), sizeof((({name} *)0)->{field})"
            lines.append(f'printf("  {field} at %zu size %zu\\n", {place});')
    return "\n".join([*lines, "return 0; }", ""])


def layouts(structs: dict[str, list[str]], compiler: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "layout.c"), Path(folder, "layout")
        source.write_text(layout_program(structs), encoding="utf-8")
        subprocess.run([compiler, "-std=c11", f"-I{HEADER.parent}", str(source), "-o", str(program)], check=True)
        return subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout


def enum_values(ffi: FFI) -> list[str]:
    typedefs, _, _ = ffi.list_types()
    enums = [ffi.typeof(name) for name in sorted(typedefs)]
    return [
        f"enum {ctype.cname} {name} = {value}"
        for ctype in enums
        if ctype.kind == "enum"
        for value, name in sorted(ctype.elements.items())
    ]


def prototypes(text: str) -> list[str]:
    """Functions and callback types, blanks normalised."""
    found = re.findall(r"^(?:COLIBRI_API|typedef (?:void|int32_t) \(\*)[^;]*;", text, flags=re.MULTILINE)
    return sorted(re.sub(r"\s+", " ", item) for item in found)


def record(compiler: str = "cc") -> str:
    """The whole record as text, one fact per line."""
    builder = build_ffi()
    text = builder.strip_comments(HEADER.read_text(encoding="utf-8"))
    ffi = FFI()
    ffi.cdef(builder.declarations(HEADER))
    parts = [*builder.integer_macros(text), *enum_values(ffi), *prototypes(text)]
    return "\n".join(parts) + "\n" + layouts(struct_fields(ffi), compiler)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        RECORD.write_text(record(), encoding="utf-8")
    else:
        sys.stdout.write(record())
