"""Saving and restoring take the providers first, then the path; the error for swapped arguments says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import datastates as ds
from datastates.providers import HostTensorProvider


@pytest.mark.parametrize("call", [ds.snapshot, ds.restore], ids=["snapshot", "restore"])
@pytest.mark.parametrize("as_given", [str, Path], ids=["str", "Path"])
def test_a_path_in_the_place_of_providers_is_refused(call: Callable[..., Any], as_given: type, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"providers: got the path .*; providers come first, then the path"):
        call(as_given(tmp_path / "c"), [HostTensorProvider("s", {"t": np.ones(1)})])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "call", [ds.load, ds.open, ds.Checkpointer, lambda path: ds.restore([], path), lambda path: ds.snapshot([], path)]
)
def test_what_is_no_path_is_refused_by_name(call: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"path: must be a string or os.PathLike, got \[\] \(list\)"):
        call([])
