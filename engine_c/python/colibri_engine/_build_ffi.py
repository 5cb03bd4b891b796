"""Builds colibri_engine._colibri, the cffi binding (API mode: checked by the C compiler, GIL released in every call).

The declarations are derived from the C headers themselves, so header and binding cannot differ. host/ (thread pool,
file mapping) is compiled into the extension; the engine is libcolibri.so.1 beside it, found through $ORIGIN.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from cffi import FFI

ENGINE = Path(__file__).resolve().parents[2]
HOST_HEADERS = ("pool.h", "machine.h", "map.h", "fault.h", "probe.h")
HOST_SOURCES = ("pool.c", "machine.c", "map.c", "load.c", "fault.c", "probe.c")
SONAME = "libcolibri.so.1"

# Python functions that may stand where config wants a callback; `user` is a handle of ffi.new_handle. They cost a GIL
# acquisition per call and are meant for policies and tests; parallel_for is colibri_pool_run, without Python.
PYTHON_CALLBACKS = """
extern "Python" {
    void colibri_py_log(void *user, int32_t level, const char *message);
    int32_t colibri_py_kv_evict(void *user, uint64_t id, int32_t layer, int32_t expert, uint32_t *start,
                                uint32_t *length);
    int32_t colibri_py_kv_keep(void *user, uint64_t id, int32_t layer, uint32_t n, uint64_t *keep);
    void colibri_py_kv_mass(void *user, uint64_t id, int32_t layer, uint32_t n, const float *mass);
    int32_t colibri_py_expert_fetch(void *user, int32_t layer, colibri_expert_lease_t *leases, uint32_t n);
    void colibri_py_expert_release(void *user, int32_t layer, const colibri_expert_lease_t *leases, uint32_t n);
}
"""


def strip_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)


def expand_status_list(text: str) -> str:
    """Replaces the X-macro of colibri_status by its enumerators."""
    items = re.findall(r"X\((\w+), (\d+), \"[^\"]*\"\)", text)
    if not items:
        raise ValueError("colibri.h: COLIBRI_STATUS_LIST not found")
    enumerators = ",\n".join(f"    COLIBRI_{name} = {value}" for name, value in items)
    return re.sub(r"(typedef enum colibri_status \{).*?(\} colibri_status_t;)", rf"\1\n{enumerators}\n\2", text,
                  flags=re.DOTALL)


def integer_macros(text: str) -> list[str]:
    """#define lines of integer constants, in the form cffi understands."""
    found = re.findall(r"#define (COLIBRI_\w+) (0x[0-9a-f]+|\d+)u?\b", text)
    return [f"#define {name} {value}" for name, value in found]


def declarations(header: Path) -> str:
    """The header as cffi's cdef wants it: no preprocessor, no C++ guard, no visibility attribute."""
    text = strip_comments(header.read_text(encoding="utf-8"))
    text = expand_status_list(text) if "COLIBRI_STATUS_LIST" in text else text
    constants = integer_macros(text)
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", text, flags=re.DOTALL)
    text = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*$", "", text, flags=re.MULTILINE)
    return "\n".join([*constants, text.replace("COLIBRI_API ", "")])


def make_builder(library_dir: Path, root: Path) -> FFI:
    """The builder for the library in library_dir; source paths are given relative to root, as setuptools asks."""
    builder = FFI()
    builder.cdef(declarations(ENGINE / "include" / "colibri.h"))
    for name in HOST_HEADERS:
        builder.cdef(declarations(ENGINE / "host" / name))
    builder.cdef(PYTHON_CALLBACKS)
    builder.set_source(
        "colibri_engine._colibri",
        "".join(f'#include "{name}"\n' for name in ("colibri.h", *HOST_HEADERS)),
        sources=[os.path.relpath(ENGINE / "host" / name, root) for name in HOST_SOURCES],
        include_dirs=[str(ENGINE / "include"), str(ENGINE / "host")],
        define_macros=[("_GNU_SOURCE", "1")],
        extra_compile_args=["-std=c11", "-O3", "-pthread", "-fvisibility=hidden"],
        extra_link_args=[str(library_dir / SONAME), "-pthread", "-Wl,-rpath,$ORIGIN"],
    )
    return builder


def ffibuilder() -> FFI:
    """What setup.py's cffi_modules calls; COLIBRI_LIBRARY_DIR overrides where the library was built."""
    root = ENGINE.parent
    return make_builder(Path(os.environ.get("COLIBRI_LIBRARY_DIR", root / "build" / "release")).resolve(), root)
