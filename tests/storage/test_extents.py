"""Files share what lies at the same offset and in the same place on the disk."""

from __future__ import annotations

import os
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastates.errors import StorageError
from datastates.storage import Location, folders_of
from datastates.storage.extents import Extent, shared_nbytes

DISKS = st.tuples(st.integers(0, 1), st.sampled_from([0, 7]))


@st.composite
def files(draw: st.DrawFn) -> list[Extent]:
    cuts = sorted(draw(st.sets(st.integers(0, 40), max_size=12)))
    return [Extent(draw(DISKS), begin, end, True) for begin, end in pairwise(cuts) if draw(st.booleans())]


def bytes_of(file: list[Extent]) -> set[tuple[tuple[int, int], int]]:
    return {(disk, at) for disk, begin, end, _ in file for at in range(begin, end)}


@given(files(), st.lists(files(), max_size=4))
def test_what_any_other_file_has_counts_once(file: list[Extent], others: list[list[Extent]]) -> None:
    elsewhere = set().union(*map(bytes_of, others))
    assert shared_nbytes(file, others) == len(bytes_of(file) & elsewhere)


def test_the_extents_of_a_real_file(tmp_path: Path) -> None:
    file, linked, copied = (Location(tmp_path / name) for name in ("file", "linked", "copied"))
    Path(file).write_bytes(os.urandom(1_000_001))
    os.link(file, linked)
    shutil.copy(file, copied)
    os.truncate(tmp_path / "copied", 3_000_000)
    store = folders_of(file)
    extents = store.extents(file)
    if extents is None:
        pytest.skip("this file system does not tell where files lie")
    assert sum(end - begin for _, begin, end, _ in extents) == 1_000_001
    assert shared_nbytes(extents, [store.extents(linked) or []]) == 1_000_001
    assert shared_nbytes(extents, [store.extents(copied) or []]) == 0
    with pytest.raises(StorageError, match="none"):
        store.extents(Location(tmp_path / "none"))
