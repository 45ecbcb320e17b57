"""Locations are made as ``pathlib`` makes paths, and addresses likewise."""

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


@pytest.mark.parametrize("given", ["mem://a/b/c", "mem:/a/b/c", "mem:///a//b/./c/"])
def test_an_address_keeps_its_root(given: str) -> None:
    one = Location(given)
    assert str(one) == "mem://a/b/c"
    assert (one.name, one.stem, one.suffix, one.face) == ("c", "c", "", "mem://a/b/c")
    assert [str(above) for above in one.parents] == ["mem://a/b", "mem://a"]
    assert one.parent.parent.parent == one.parent.parent == Location("mem://a"), "a root is its own parent"
    assert one == Location("mem://a") / "b/c" == one.parent / "c" == one.with_name("x").with_name("c")
    assert Location.decode(one.encode()) == Location.of(one) == Location.of(given) == one
    assert one.is_relative_to(Location("mem://a/b"))
    assert not any(one.is_relative_to(Location(other)) for other in ("mem://b", "other://a/b", "/a/b", "mem://a/b/c/d"))


def test_an_address_is_no_path_of_the_system() -> None:
    with pytest.raises(ValueError, match=r"mem://a/b is an address \(mem:\)"):
        open(Location("mem://a/b"))  # noqa: SIM115
