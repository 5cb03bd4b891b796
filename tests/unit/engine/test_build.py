"""What the built library may contain, need and export; what the sources may contain; the ABI record; size budgets."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ENGINE = ROOT / "engine_c"
HEADER = ENGINE / "include" / "colibri.h"
ALLOWED_UNDEFINED = {"memcpy", "memmove", "memset", "memcmp"}
FORBIDDEN_CALLS = (
    r"(?<![.>\w])(malloc|calloc|realloc|free|alloca|aligned_alloc|"
    r"printf|fprintf|snprintf|vsnprintf|puts|fopen|exit|abort|"
    r"getenv|pthread_\w+|thrd_\w+|errno|signal|setjmp|longjmp|expf?|logf?|sinf?|cosf?|powf?|fmaf?|sqrtf?)\s*\("
)
BAD_FLAGS = r"-m(arch|tune|cpu)=native|-Ofast|-f(ast-math|unsafe-math-optimizations|associative-math|reciprocal-math)"


def run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def library_dir() -> Path:
    """The release build, brought up to date."""
    environment = {k: v for k, v in os.environ.items() if k not in {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}}
    done = subprocess.run(["make", "--no-print-directory", "build"], cwd=ROOT, env=environment, text=True,
                          capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return ROOT / "build" / "release"


def symbols(*arguments: str) -> set[str]:
    """Names nm prints, versions cut off."""
    lines = run("nm", "-P", *arguments).splitlines()
    return {line.split()[0].split("@")[0] for line in lines if " " in line}


def api_names() -> set[str]:
    text = HEADER.read_text(encoding="utf-8")
    return set(re.findall(r"^COLIBRI_API [^(]*?\b(colibri_\w+)\(", text, flags=re.MULTILINE))


def c_code(path: Path) -> str:
    """The file without comments and string literals, line numbers kept."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), path.read_text(encoding="utf-8"), flags=re.S)
    return re.sub(r"//[^\n]*|\"(?:\\.|[^\"\\\n])*\"", '""', text)


def matches(paths: Iterator[Path], pattern: str) -> list[str]:
    found = []
    for path in paths:
        for number, line in enumerate(c_code(path).splitlines(), 1):
            if re.search(pattern, line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    return found


def engine_files() -> Iterator[Path]:
    yield from (path for path in sorted((ENGINE / "src").rglob("*")) if path.suffix in {".c", ".h", ".def"})


# ---- the binaries ----------------------------------------------------------------------------------------------------


def test_library_needs_only_mem_functions(library_dir: Path) -> None:
    assert symbols("-D", "-u", str(library_dir / "libcolibri.so.1")) <= ALLOWED_UNDEFINED
    assert symbols("-u", str(library_dir / "libcolibri.so.1")) <= ALLOWED_UNDEFINED


def test_library_exports_exactly_the_header(library_dir: Path) -> None:
    assert symbols("-D", "--defined-only", str(library_dir / "libcolibri.so.1")) == api_names()


def test_archive_defines_and_needs_the_same(library_dir: Path) -> None:
    archive = str(library_dir / "libcolibri.a")
    assert symbols("-g", "--defined-only", archive) == api_names()
    assert symbols("-u", archive) <= ALLOWED_UNDEFINED


def test_library_has_no_changeable_data(library_dir: Path) -> None:
    """Constant tables with pointers live in .data.rel.ro; .data, .bss and thread-local sections must be absent."""
    sections = run("readelf", "-SW", str(library_dir / "libcolibri.so.1"))
    names = set(re.findall(r"\] (\.\S+)", sections))
    assert not names & {".data", ".bss", ".tdata", ".tbss", ".init_array", ".fini_array"}


def test_library_says_its_name(library_dir: Path) -> None:
    dynamic = run("readelf", "-dW", str(library_dir / "libcolibri.so.1"))
    assert "Library soname: [libcolibri.so.1]" in dynamic
    assert (library_dir / "libcolibri.so").resolve() == (library_dir / "libcolibri.so.1").resolve()
    stack = re.search(r"GNU_STACK.*", run("readelf", "-lW", str(library_dir / "libcolibri.so.1")))
    assert stack is not None
    assert "RWE" not in stack.group()


@pytest.mark.parametrize("link", [["libcolibri.a"], ["libcolibri.so.1"]])
def test_program_links_with_nothing_else(library_dir: Path, tmp_path: Path, link: list[str]) -> None:
    """A C program that uses the public header alone runs with either form of the library."""
    source = tmp_path / "program.c"
    source.write_text(
        '#include "colibri.h"\n#include <stdio.h>\n'
        'int main(void) { printf("%s %x\\n", colibri_version(), colibri_abi_version()); return 0; }\n'
    )
    program = tmp_path / "program"
    run("cc", "-std=c11", f"-I{HEADER.parent}", str(source), *(str(library_dir / name) for name in link),
        f"-Wl,-rpath,{library_dir}", "-o", str(program))  # fmt: skip
    assert run(str(program)).split() == [header_version(), "10001"]


# ---- headers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", ["include/colibri.h", "host/pool.h", "host/map.h", "host/machine.h",
                                    "host/fault.h", "host/probe.h"])  # fmt: skip
@pytest.mark.parametrize(("language", "standard"), [("c", "c11"), ("c++", "c++11"), ("c++", "c++20")])
def test_header_stands_alone(tmp_path: Path, header: str, language: str, standard: str) -> None:
    if language == "c++" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler")
    compiler = "cc" if language == "c" else (shutil.which("g++") or "clang++")
    source = tmp_path / "include.c"
    source.write_text(f'#include "{header}"\n#include "{header}"\n')
    run(compiler, "-x", language, f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only",
        f"-I{ENGINE}", f"-I{HEADER.parent}", str(source))  # fmt: skip


# ---- sources ---------------------------------------------------------------------------------------------------------


def test_engine_calls_no_c_library() -> None:
    assert matches(engine_files(), FORBIDDEN_CALLS) == []


def test_engine_includes_no_c_library() -> None:
    allowed = {"stddef.h", "stdint.h", "string.h", "stdarg.h", "stdatomic.h", "float.h", "limits.h", "stdbool.h",
               "immintrin.h", "xmmintrin.h", "cpuid.h"}  # fmt: skip
    included = {
        name
        for path in engine_files()
        for name in re.findall(r"^\s*#\s*include\s*<([^>]+)>", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    }
    assert {name for name in included - allowed if not name.startswith("simde/")} == set()


def test_no_switch_on_format_outside_its_places() -> None:
    outside = (path for path in engine_files() if path.relative_to(ENGINE / "src").parts[0] not in {"quant", "kernels"})
    assert matches(outside, r"switch\s*\([^)]*(format|dtype|CLB_FMT|->fmt)|case\s+CLB_FMT_") == []


def test_no_dead_alternatives() -> None:
    assert matches(engine_files(), r"#\s*if\s+0\b") == []


def test_no_flag_that_changes_bits_or_ties_to_this_machine() -> None:
    files = [ROOT / "Makefile", ENGINE / "engine.mk", ENGINE / "CMakeLists.txt", ROOT / "setup.py",
             ENGINE / "python/colibri_engine/_build_ffi.py", *(ENGINE / "src").rglob("isa.flags")]  # fmt: skip
    assert [path.name for path in files if re.search(BAD_FLAGS, path.read_text(encoding="utf-8"))] == []


def test_sizes_are_within_budget() -> None:
    limits = {".c": 700, ".h": 700, ".py": 400}
    roots = [ENGINE, ROOT / "daemon", ROOT / "client", ROOT / "tests"]
    over = []
    for path in (path for root in roots for path in root.rglob("*") if path.suffix in limits):
        lines = path.read_text(encoding="utf-8").splitlines()
        if path.name == "_colibri.c":  # generated by cffi
            continue
        if len(lines) > limits[path.suffix]:
            over.append(f"{path.relative_to(ROOT)}: {len(lines)} lines, {limits[path.suffix]} allowed")
        over += [f"{path.relative_to(ROOT)}:{i}: {len(s)} characters" for i, s in enumerate(lines, 1) if len(s) > 120]
    assert over == []
    assert len(HEADER.read_text(encoding="utf-8").splitlines()) <= 400
    assert len((ENGINE / "host" / "pool.h").read_text(encoding="utf-8").splitlines()) <= 60


# ---- versions and ABI ------------------------------------------------------------------------------------------------


def header_version() -> str:
    found = re.search(r'#define COLIBRI_VERSION "([^"]+)"', HEADER.read_text(encoding="utf-8"))
    assert found is not None
    return found.group(1)


def test_changelog_knows_this_version() -> None:
    newest = re.search(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == header_version()


def test_abi_equals_its_record() -> None:
    path = ROOT / "tests" / "golden" / "abi" / "record.py"
    spec = importlib.util.spec_from_file_location("abi_record", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.record() == module.RECORD.read_text(encoding="utf-8"), "see tests/golden/abi/README.md"


# ---- one source rule for Make and CMake ------------------------------------------------------------------------------


def compile_lines(database: Path) -> dict[str, set[str]]:
    """Engine source -> the flags that decide its code."""
    deciding = re.compile(r"-(std=|O|f(?!PIC)|m|W(?!l,)|U|D)")
    return {
        str((Path(entry["directory"]) / entry["file"]).resolve().relative_to(ROOT)): {
            word for word in shlex.split(entry["command"]) if deciding.match(word)
        }
        for entry in json.loads(database.read_text(encoding="utf-8"))
        if "engine_c/src/" in entry["file"]
    }


def test_make_and_cmake_compile_the_same(tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    run("make", "compile_commands.json", "CC=gcc", "VARIANT=release", f"COMPILE_COMMANDS={tmp_path}/make.json",
        f"BUILD={tmp_path}/build")  # fmt: skip
    run("cmake", "-S", str(ENGINE), "-B", str(tmp_path / "cmake"), "-DCMAKE_C_COMPILER=gcc")
    ours, theirs = compile_lines(tmp_path / "make.json"), compile_lines(tmp_path / "cmake" / "compile_commands.json")
    assert sorted(ours) == sorted(theirs)
    assert sorted(ours) == sorted(str(path.relative_to(ROOT)) for path in (ENGINE / "src").rglob("*.c"))
    assert {name for name in ours if ours[name] != theirs[name]} == set()


def test_help_lists_the_targets() -> None:
    text = run("make", "--no-print-directory", f"BUILD={ROOT}/build")
    assert {"build", "ctest", "pytest", "sanitize", "portability", "fuzz", "test"} <= {
        line.split()[0] for line in text.splitlines() if line.startswith("  ")
    }
