"""What the build says where something that it needs is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
APT = "apt install g++ liburing-dev libdeflate-dev"


def build(compiler: Path | str, directory: Path) -> str:
    """Try to build the native module with a compiler; returns the last line of the error output."""
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-temp", directory, "--build-lib", directory],
        cwd=ROOT,
        env={**os.environ, "CXX": str(compiler)},
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
