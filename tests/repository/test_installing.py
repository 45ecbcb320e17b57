"""What the build says where something that it needs is not installed, and what it packs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
APT = "apt install g++ liburing-dev libdeflate-dev"


def build(compiler: Path | str, directory: Path) -> str:
    """Try to build the native module with a compiler; returns the last line of the error output."""
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-temp", directory, "--build-lib", directory],
        cwd=ROOT,
        env={**os.environ, "CXX": shlex.quote(str(compiler))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("header", ["liburing.h", "libdeflate.h"])
def test_a_missing_header_is_told_in_one_sentence(header: str, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n! grep -q {header}\n")  # it finds every header but this one
    compiler.chmod(0o755)
    said = build(compiler, tmp_path)
    assert said.startswith(f"{header} is not found: install ")
    assert APT in said


def test_a_missing_compiler_is_told_in_one_sentence(tmp_path: Path) -> None:
    said = build(tmp_path / "none", tmp_path)
    assert said.startswith(f"{tmp_path / 'none'} is not there: install ")
    assert APT in said


def test_the_sdist_has_all_that_a_build_needs(tmp_path: Path) -> None:
    egg, out = ["egg_info", "--egg-base", str(tmp_path)], ["sdist", "--dist-dir", str(tmp_path)]
    subprocess.run([sys.executable, "setup.py", "-q", *egg, *out], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    native = [f"native/{name}" for name in ("LICENSE", "exports.map", "include", "src", "bindings", "kernels")]
    names = ["pyproject.toml", "setup.py", "README.md", "LICENSE", "datastates", "providers", "adapters", *native]
    listed = subprocess.run(["git", "ls-files", *names], cwd=ROOT, capture_output=True, text=True, check=True)
    assert packed >= set(listed.stdout.splitlines())


@pytest.mark.by_hand
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_wheel_is_built_from_the_sdist_and_runs_here_if_it_is_for_this_machine(machine: str) -> None:
    built = subprocess.run([ROOT / ".ci" / "build-wheels", machine, sys.executable], check=False)
    assert built.returncode == 0
