"""Locations are made as ``pathlib`` makes paths."""

from __future__ import annotations

import copy
import pickle
from pathlib import PurePosixPath

import pytest

from datastates.storage import Location

PATHS = [
    "/",
    "//",
    "//a",
    "///a",
    ".",
    "..",
    "a",
    "./a",
    "a/",
    "a/../b",
    "/a/b",
    "~/x",
    "/\udcff",
    "a.b.c",
    "/.hid",
    "/a/.",
]
NAMES = ["a", "b.c", ".h", "", "..", ".", "a/b", "./a", "/x", "a.", "\udcff", "a//b"]


@pytest.mark.parametrize("text", PATHS)
def test_a_location_is_as_the_path(text: str) -> None:
    ours, theirs = Location(text), PurePosixPath(text)
    assert str(ours) == str(theirs)
    assert ours.encode() == bytes(theirs)
    assert (ours.name, ours.stem, ours.suffix) == (theirs.name, theirs.stem, theirs.suffix)
    assert [ours.parent, *ours.parents] == [Location(one) for one in (theirs.parent, *theirs.parents)]
    for name in NAMES:
        assert ours / name == Location(theirs / name)
        assert str(ours / name) == str(theirs / name)
    for same in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), Location.decode(ours.encode())):
        assert (same, hash(same)) == (ours, hash(ours))


def test_locations_are_sorted_name_by_name() -> None:
    paths = ["/a/b", "/a-b", "/", "/a", "/a/b/c", "/a.b", "/B"]
    assert [str(one) for one in sorted(map(Location, paths))] == [str(one) for one in sorted(map(PurePosixPath, paths))]
