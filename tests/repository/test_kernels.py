"""What CUDA's compiler makes of the GPU kernels is checked in: it must be made of what the sources say now."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

KERNELS = next(p for p in Path(__file__).parents if (p / "pyproject.toml").exists()) / "native" / "kernels"


@pytest.mark.parametrize("source", sorted(KERNELS.glob("*.cu")), ids=lambda path: path.stem)
def test_compiled_kernels_are_of_their_sources(source: Path) -> None:
    made = f"// of {source.name}: sha256 {hashlib.sha256(source.read_bytes()).hexdigest()}"
    assert made in source.with_suffix(".ptx.inc").read_text().splitlines(), "run `make ptx`"
