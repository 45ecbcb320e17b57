"""Build of the native module, and the package layout; all else stands in pyproject.toml.

DATASTATES_DEBUG=1 builds without optimization and with assertions,
DATASTATES_SANITIZE=address,undefined (or thread) with the compiler's sanitizers; each variant has a
build folder of its own.
"""

import os
import shlex
import subprocess
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

PACKAGE_DIR = {
    "datastates": "datastates",
    "datastates.providers": "providers",
    "datastates.adapters": "adapters",
}
LIBRARIES = {"uring": "liburing.h", "deflate": "libdeflate.h"}
NEEDED = (
    "install a C++20 compiler, liburing and libdeflate with their headers first: "
    "on Debian and Ubuntu `apt install g++ liburing-dev libdeflate-dev`, "
    "on Fedora `dnf install gcc-c++ liburing-devel libdeflate-devel`"
)
COMPILER = shlex.split(os.environ.get("CXX", "c++"))
DEBUG = os.environ.get("DATASTATES_DEBUG", "0") == "1"
SANITIZE = os.environ.get("DATASTATES_SANITIZE", "")

LEVEL = ["-O0", "-g", "-UNDEBUG"] if DEBUG else ["-O1", "-g1"] if SANITIZE else ["-O3"]
COMPILE_ARGS = ["-pthread", *LEVEL]
EXPORTS = "native/exports.map"
LINK_ARGS = ["-pthread", f"-Wl,--version-script={EXPORTS}"]
if SANITIZE:
    COMPILE_ARGS += [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer"]
    LINK_ARGS += [f"-fsanitize={SANITIZE}"]
BUILD_BASE = "build/python" + "-debug" * DEBUG + "".join(f"-{s}" for s in SANITIZE.split(",") if s)


def files(folder, pattern):
    """The files in folder and below, in the same order on every machine."""
    return sorted(str(path) for path in Path(folder).rglob(pattern))


def packages():
    """Every package by its installed name."""
    for package, folder in PACKAGE_DIR.items():
        yield package
        yield from (f"{package}.{name}" for name in find_packages(folder))


def compiler(*args, **options):
    """Run the C++ compiler, and say nothing of what it says."""
    try:
        return subprocess.run([*COMPILER, *args], capture_output=True, text=True, **options)
    except FileNotFoundError:
        raise SystemExit(f"{COMPILER[0]} is not there: {NEEDED}") from None


NATIVE = Pybind11Extension(
    "datastates._native",
    files("native/src", "*.cpp") + files("native/bindings", "*.cpp"),
    depends=[
        *files("native/include", "*.hpp"),
        *files("native/bindings", "*.hpp"),
        *files("native/kernels", "*"),
        EXPORTS,
        "setup.py",
    ],
    include_dirs=["native/include"],
    cxx_std=20,  # and -fvisibility=hidden, which pybind11 adds
    extra_compile_args=COMPILE_ARGS,
    extra_link_args=LINK_ARGS,
)


def changed_since(obj, source):
    """Whether an object file is older than what it is made of."""
    newest = max(os.path.getmtime(path) for path in [source, *NATIVE.depends])
    return os.path.getmtime(obj) < newest


class BuildPy(build_py):
    """Fills an emptied folder: a module deleted from the sources must not come back from there."""

    def run(self):
        for path in Path(self.build_lib).rglob("*"):
            if path.is_file() and path.suffix != ".so":
                path.unlink()
        super().run()


class BuildExt(build_ext):
    """Links liburing and libdeflate statically where their archives are installed."""

    def build_extensions(self):
        for name, header in LIBRARIES.items():
            if compiler("-E", "-x", "c++", "-", input=f"#include <{header}>\n").returncode != 0:
                raise SystemExit(f"{header} is not found: {NEEDED}")
            archive = f"lib{name}.a"
            path = compiler(f"-print-file-name={archive}").stdout.strip()
            if os.path.isabs(path):
                NATIVE.extra_objects.append(path)
            else:  # not found
                NATIVE.libraries.append(name)
        with ParallelCompile("DATASTATES_BUILD_JOBS", needs_recompile=changed_since):
            super().build_extensions()


setup(
    packages=list(packages()),
    package_dir=PACKAGE_DIR,
    package_data={"datastates": ["py.typed", "_native.pyi"]},
    include_package_data=False,
    ext_modules=[NATIVE],
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
    options={"build": {"build_base": BUILD_BASE}},
    zip_safe=False,
)
