"""Trust: only named classes are loaded, and a refusal changes nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import numpy as np
import pytest

import datastates as ds
from datastates.errors import DatastatesError, FormatError, TrustError
from datastates.providers import PickledObjectProvider, from_state_dict

pytestmark = pytest.mark.usefixtures("nothing_declared")

SMALL = {"host_cache": "2MiB", "block": "1MiB", "io_backend": "pwrite", "io_threads": 1}
OBJECTS = {"space": SimpleNamespace(a=1), "uuid": UUID(int=5), "plain": [1, "a"]}
BOTH = ["types.SimpleNamespace", "uuid.UUID"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    providers = [
        from_state_dict("state", {"w": np.ones(3), "n": 5}),
        PickledObjectProvider("objects", get=lambda: OBJECTS, set=lambda value: None),
    ]
    ds.snapshot(providers, tmp_path / "checkpoint", **SMALL).wait_committed()
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("trust", [BOTH, tuple(BOTH), set(BOTH), {*BOTH, "collections.deque"}, "all"])
def test_trusted_classes_are_loaded(checkpoint: Path, trust: Collection[str] | str) -> None:
    assert ds.load(checkpoint, trust=trust, **SMALL)["objects"] == OBJECTS


@pytest.mark.parametrize(
    ("trust", "missing"),
    [
        ((), BOTH),
        (["types.SimpleNamespace"], ["uuid.UUID"]),
        (["uuid.UUID"], ["types.SimpleNamespace"]),
        (["types", "SimpleNamespace", "types.*", "*", "types.SimpleNamespace2", "Types.SimpleNamespace"], BOTH),
        (["all"], BOTH),
    ],
)
def test_classes_that_are_not_named_are_refused_by_their_names(
    checkpoint: Path, trust: list[str], missing: list[str]
) -> None:
    with pytest.raises(TrustError) as caught:
        ds.load(checkpoint, trust=trust, **SMALL)
    assert list(caught.value.names) == missing
    assert f"trust={missing}" in str(caught.value)


@pytest.mark.parametrize("trust", [(), ["types.SimpleNamespace"]])
@pytest.mark.parametrize("strict", [True, False])
def test_refusal_leaves_the_state_unchanged(checkpoint: Path, trust: list[str], strict: bool) -> None:
    live = {"w": np.zeros(3), "n": 1}
    taken: list[Any] = []
    providers = [from_state_dict("state", live), PickledObjectProvider("objects", get=dict, set=taken.append)]
    with pytest.raises(TrustError):
        ds.restore(providers, checkpoint, trust=trust, strict=strict, **SMALL)
    assert live["n"] == 1
    assert np.array_equal(live["w"], np.zeros(3))
    assert taken == []


def test_trusted_objects_are_restored(checkpoint: Path) -> None:
    live = {"w": np.zeros(3), "n": 1}
    taken: list[Any] = []
    providers = [from_state_dict("state", live), PickledObjectProvider("objects", get=dict, set=taken.append)]
    ds.restore(providers, checkpoint, trust=BOTH, **SMALL)
    assert live["n"] == 5
    assert np.array_equal(live["w"], np.ones(3))
    assert taken == [OBJECTS]


def test_providers_that_are_not_restored_need_no_trust(checkpoint: Path) -> None:
    live = {"w": np.zeros(3), "n": 1}
    ds.restore([from_state_dict("state", live)], checkpoint, **SMALL)
    assert live["n"] == 5


def test_trusted_class_that_cannot_be_imported_is_a_format_error(refused: Any) -> None:
    data = b"\x80\x02cno_such_module\nThing\n)R."
    assert "no_such_module" in refused("loads", data=data, trust=["no_such_module.Thing"]).message


def test_trusted_name_that_is_missing_in_its_module_is_a_format_error(refused: Any) -> None:
    data = b"\x80\x02ccollections\nThing\n)R."
    assert "Thing" in refused("loads", data=data, trust=["collections.Thing"]).message


def test_error_of_a_trusted_class_is_a_format_error(refused: Any) -> None:
    data = b"\x80\x02cfractions\nFraction\n(K\x01K\x00tR."
    assert "ZeroDivisionError" in refused("loads", data=data, trust=["fractions.Fraction"]).message


def test_trust_error_is_caught_as_format_error(checkpoint: Path) -> None:
    with pytest.raises(FormatError):
        ds.load(checkpoint, **SMALL)


@pytest.mark.parametrize("trust", ["collections.deque", "xcollections.dequex", "a collections.deque"])
def test_text_is_not_taken_for_a_list_of_names(tmp_path: Path, trust: str) -> None:
    provider = PickledObjectProvider("m", get=lambda: deque([1]), set=lambda value: None)
    ds.snapshot([provider], tmp_path / "c", **SMALL).wait_committed()
    with pytest.raises((DatastatesError, TypeError, ValueError)):
        ds.load(tmp_path / "c", trust=trust, **SMALL)
