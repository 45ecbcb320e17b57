"""What could be written but not read back is refused inside ``snapshot()``, by its key; all else can be restored."""

from __future__ import annotations

import collections
import copyreg
import datetime
import threading
import zoneinfo
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import datastates as ds
from datastates.errors import ProviderError, TrustError
from datastates.providers import PickledObjectProvider, from_state_dict


class Numbered:
    """A class that copyreg knows by a number."""


class Record(collections.namedtuple("Record", "a")):
    """A named tuple that copyreg knows by a number."""


def numbered() -> None:
    """A function that copyreg knows by a number."""


class Lock:
    """A class whose objects do not pickle."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def _local() -> Any:
    return collections.namedtuple("Local", "a")(1)


LARGE = Fraction((1 << 70_000) + 1, 3)
REFUSED: dict[str, Callable[[], Any]] = {
    "an object with a number": Numbered,
    "a class with a number": lambda: Numbered,
    "a function with a number": lambda: [{1, numbered}],
    "a named tuple with a number": lambda: Record(1),
    "a key with a number": lambda: {(Record(1), 2): 1},
    "a local class": _local,
    "a key that does not pickle": lambda: {Lock(): 1},
    "a large fraction": lambda: LARGE,
    "a large fraction inside": lambda: [{"x": {LARGE}}],
    "a large fraction as a key": lambda: {(1, LARGE): 1},
    "a large fraction in a slice": lambda: slice(LARGE),
    "an integer without a name": lambda: {1 << 70_000: 1},
    "a large key": lambda: {tuple(range(20_000)): 1},
    "a large key in a set": lambda: {tuple(range(20_000))},
}


@pytest.fixture(autouse=True)
def _numbers() -> Iterator[None]:
    numbers = {Numbered: 201, Record: 202, numbered: 203}
    for known, number in numbers.items():
        copyreg.add_extension(__name__, known.__name__, number)
    yield
    for known, number in numbers.items():
        copyreg.remove_extension(__name__, known.__name__, number)


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_by_its_key(what: str, tmp_path: Path) -> None:
    value = {"before": 1, "it": REFUSED[what](), "after": np.ones(2)}
    for provider in (PickledObjectProvider("s", lambda: value, print), from_state_dict("s", value)):
        with pytest.raises(ProviderError, match=r"it[/']"):
            ds.snapshot([provider], tmp_path / "c")
    assert not (tmp_path / "c").exists()


class Zone(datetime.tzinfo):
    """A time zone of the user's own; its pickle calls a method of the class."""

    @classmethod
    def make(cls) -> Zone:
        return cls()

    def __reduce__(self) -> Any:
        return type(self).make, ()

    def utcoffset(self, dt: Any) -> datetime.timedelta:
        return datetime.timedelta(hours=1)

    def __eq__(self, other: object) -> bool:
        return type(other) is Zone

    __hash__ = None  # type: ignore[assignment]


def _row() -> dict[str, int]:
    return {"seen": 0}


TRUSTED: dict[str, Any] = {
    "a zone": datetime.datetime(2020, 1, 2, 3, tzinfo=zoneinfo.ZoneInfo("UTC")),
    "a time in a zone": [datetime.time(1, 2, tzinfo=Zone())],
    "made by a class": Zone(),
    "made by a function": collections.defaultdict(_row, a={"seen": 1}),
    "made by a class when it is missed": {"x": collections.defaultdict(Lock)},
}
SAFE: dict[str, Any] = {
    "queues": collections.defaultdict(collections.deque, a=collections.deque([1])),
    "fractions": collections.defaultdict(Fraction, a=Fraction(1 << 60_000, 3)),
    "keys": {(1, 2.5): 1, frozenset({1}): 2, Fraction(1, 3): 3, None: 4, True: 5},
}


def _both(path: Path, value: Any, trust: Any) -> list[Any]:
    taken: list[Any] = []
    ds.restore([PickledObjectProvider("s", lambda: value, taken.append)], path, trust=trust)
    return [ds.load(path, trust=trust)["s"], *taken]


@pytest.mark.parametrize("what", TRUSTED)
def test_what_is_made_by_classes_of_others_is_restored_with_trust(what: str, tmp_path: Path) -> None:
    value = TRUSTED[what]
    ds.snapshot([PickledObjectProvider("s", lambda: value, print)], tmp_path / "c").wait_committed()
    for found in _both(tmp_path / "c", value, "all"):
        assert found == value
        assert type(found) is type(value)
        if isinstance(value, collections.defaultdict):
            assert found.default_factory is value.default_factory
    with pytest.raises(TrustError):
        ds.load(tmp_path / "c")


@pytest.mark.parametrize("what", SAFE)
def test_what_is_safe_is_restored(what: str, tmp_path: Path) -> None:
    value = SAFE[what]
    ds.snapshot([PickledObjectProvider("s", lambda: value, print)], tmp_path / "c").wait_committed()
    for found in _both(tmp_path / "c", value, ()):
        assert found == value
        assert list(map(type, found)) == list(map(type, value))
