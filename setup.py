"""Builds the C engine with make, then the cffi binding, and puts both into the package. All else: pyproject.toml."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
LIBRARY = "libcolibri.so.1"
# Import packages live in three folders of the repository; a folder that a checkout lacks adds nothing.
PACKAGE_ROOTS = ("engine_c/python", "daemon", "client/python")


def library_dir() -> Path:
    return Path(os.environ.get("COLIBRI_LIBRARY_DIR", ROOT / "build" / "release"))


def version() -> str:
    """The one source of the version is the C header."""
    header = (ROOT / "engine_c" / "include" / "colibri.h").read_text(encoding="utf-8")
    found = re.search(r'#define COLIBRI_VERSION "([^"]+)"', header)
    if found is None:
        raise SystemExit("engine_c/include/colibri.h: COLIBRI_VERSION not found")
    return found.group(1)


class BuildEngine(build_ext):
    """build_ext that makes libcolibri first and copies it beside the extension."""

    def run(self) -> None:
        if "COLIBRI_LIBRARY_DIR" not in os.environ:
            # A newer compiler may know new warnings; they must not stop an installation.
            command = ["make", f"-j{os.cpu_count() or 1}", "build", "WERROR=", "VARIANT=release"]
            outer = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}  # of a make that runs pip: not meant for this one
            environment = {name: value for name, value in os.environ.items() if name not in outer}
            subprocess.run(command, cwd=ROOT, env=environment, check=True)
        super().run()
        shutil.copy2(library_dir() / LIBRARY, self._library_target())

    def _library_target(self) -> Path:
        return Path(self.get_ext_fullpath("colibri_engine._colibri")).resolve().parent / LIBRARY

    def get_outputs(self) -> list[str]:
        beside = Path(self.build_lib) / "colibri_engine" / LIBRARY
        return [*super().get_outputs(), str(beside)]


def packages() -> dict[str, str]:
    """Import name -> folder, for every package."""
    return {
        name: f"{root}/{name.replace('.', '/')}"
        for root in PACKAGE_ROOTS
        if (ROOT / root).is_dir()
        for name in find_packages(str(ROOT / root))
    }


setup(
    version=version(),
    packages=sorted(packages()),
    package_dir=packages(),
    cffi_modules=["engine_c/python/colibri_engine/_build_ffi.py:ffibuilder"],
    cmdclass={"build_ext": BuildEngine},
    options={"build": {"build_base": "build/python"}},
)
