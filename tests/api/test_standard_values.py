"""Values of the standard library and of torch load without trust; a warning names the classes that need it."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import logging
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import datastates as ds
from datastates.container import pickle_reader, pickle_writer
from datastates.errors import FormatError, TrustError
from datastates.providers import PickledObjectProvider, from_state_dict

ZONE = datetime.timezone(datetime.timedelta(hours=2), "home")
VALUES: list[Any] = [
    deque([1, "a", (2,)], maxlen=4),
    deque(range(2000)),
    deque(),
    defaultdict(list, {"a": [1], 2: []}),
    defaultdict(int, a=1),
    defaultdict(None),
    defaultdict(OrderedDict),
    OrderedDict(a=1),
    Counter("abca"),
    Path("/data/run 1"),
    PurePosixPath("a/b"),
    PureWindowsPath("c:/x"),
    Path(),
    datetime.date(2026, 1, 31),
    datetime.time(1, 2, 3, 4),
    datetime.time(1, 2, 3, tzinfo=ZONE),
    datetime.datetime(2026, 1, 31, 12, 30, 1, 999),
    datetime.datetime(2026, 1, 31, 12, 30, tzinfo=datetime.timezone.utc),
    datetime.datetime(2026, 1, 31, tzinfo=ZONE),
    datetime.timedelta(-1, 2, 3),
    ZONE,
    *map(Decimal, ["1.10", "-0", "NaN", "Infinity", "1e1000"]),
    Fraction(-2, 3),
    Fraction(1 << 3000, 3),
    torch.Size([2, 3]),
    slice(1, None, 2),
    range(2, 9, 3),
    1.5 - 2j,
    b"\x00\xff",
    bytearray(b"ab"),
    pytest.param({1, (2, "a")}, id="set"),  # its order, and so its repr, differs between workers
    frozenset([1]),
    torch.float16,
    torch.device("cuda", 1),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_without_trust(tmp_path: Path, value: Any) -> None:
    taken: list[Any] = []
    provider = PickledObjectProvider("o", lambda: {"value": value, "array": torch.ones(2)}, taken.append)
    ds.snapshot([provider], tmp_path / "c").wait_committed()
    live = {"o": {"value": None, "array": torch.zeros(2)}}
    ds.restore([provider], tmp_path / "c")
    ds.restore([from_state_dict("o", live["o"])], tmp_path / "c", strict=False)
    for found in (taken[0], ds.load(tmp_path / "c")["o"], live["o"]):
        assert type(found["value"]) is type(value)
        assert repr(found["value"]) == repr(value)


def test_arrays_in_them_come_back(tmp_path: Path) -> None:
    value = {"deque": deque([torch.ones(2), torch.zeros(1)], maxlen=5), "default": defaultdict(list, a=[torch.ones(3)])}
    ds.snapshot([from_state_dict("s", value)], tmp_path / "c").wait_committed()
    found = ds.load(tmp_path / "c")["s"]
    live = {"deque": deque(), "default": defaultdict(list, a=[torch.zeros(3)])}
    ds.restore([from_state_dict("s", live)], tmp_path / "c")
    for got in (found, live):
        assert got["deque"].maxlen == 5
        assert torch.equal(got["deque"][0], torch.ones(2))
        assert torch.equal(got["default"]["a"][0], torch.ones(3))
        assert got["default"].default_factory is list


def test_a_generator_of_torch_goes_on_where_it_was(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(7)
    torch.rand(3, generator=generator)
    state = {"generator": generator, "again": [generator], "other": {1}}
    ds.snapshot([from_state_dict("s", state)], tmp_path / "c").wait_committed()
    expected = torch.rand(5, generator=generator)
    live = {"generator": torch.Generator(), "again": [torch.Generator()], "other": {2}}
    first = live["generator"]
    ds.restore([from_state_dict("s", live)], tmp_path / "c")
    assert live["generator"] is first
    found = ds.load(tmp_path / "c")["s"]
    assert found["generator"] is found["again"][0]
    of_torch = torch.load(tmp_path / "c" / "rank-00000.pt", weights_only=False)["s"]
    for generator in (first, found["generator"], of_torch["generator"]):
        assert torch.equal(torch.rand(5, generator=generator), expected)


HOSTILE = {
    "a fraction that takes for ever": b"cfractions\nFraction\nX\x0b\x00\x00\x001e999999999\x85R",
    "a date of other bytes": b"cdatetime\ndate\n(K\x01K\x01K\x01tR",
    "a path of no text": b"cpathlib\nPosixPath\nK\x01\x85R",
    "a factory that is no class of values": b"ccollections\ndefaultdict\ncbuiltins\nrange\n\x85R",
    "a list that is called": b"c__builtin__\nlist\n)R",
    "an object of a class of values": b"c__builtin__\nlist\n)\x81",
    "a deque of an iterable": b"ccollections\ndeque\nX\x01\x00\x00\x00a\x85R",
    "a decimal of a tuple": b"cdecimal\nDecimal\n(K\x00)K\x00t\x85R",
    "a generator for no device": b"ctorch._C\nGenerator\nK\x01\x85R",
    "a generator with another state": b"ctorch._C\nGenerator\nctorch\ndevice\nX\x03\x00\x00\x00cpu\x85R\x85RK\x01b",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_the_standard_library_does_not_write_is_refused(name: str) -> None:
    with pytest.raises(FormatError):
        pickle_reader.loads(b"\x80\x02" + HOSTILE[name] + b".")


class Color(enum.Enum):
    """An enumeration of the user's own."""

    RED = 1
    GREEN = ("a", 2)


class Kind(str, enum.Enum):
    """An enumeration whose members are strings."""

    TRAIN = "train"


class Flags(enum.Flag):
    """An enumeration whose members can be combined."""

    A = 1
    B = 2


class Level(enum.IntEnum):
    """An enumeration with its own code for values that are no member."""

    LOW = 1

    @classmethod
    def _missing_(cls, value: object) -> Level:
        raise AssertionError("code of the class has run")


@dataclasses.dataclass
class Config:
    """A dataclass with fields of several kinds, and code that reading must not run."""

    lr: float
    color: Color = Color.RED
    weights: Any = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.derived = self.lr * 2

    def method(self) -> None:
        """A method that a hostile pickle tries to hide."""


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A frozen dataclass."""

    a: int
    b: tuple[int, ...] = ()


@dataclasses.dataclass
class Slots:
    """A dataclass that declares its slots itself."""

    __slots__ = ("a",)
    a: int


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    """A frozen dataclass with slots, to which ``dataclasses`` adds a ``__setstate__``."""

    a: int
    b: int = 2


class Outer:
    """A class with another class inside."""

    @dataclasses.dataclass
    class Inner:
        """A class that can only be found through ``Outer``."""

        a: int


@dataclasses.dataclass
class Closing:
    """A dataclass whose objects run code when they are deleted."""

    a: int

    def __del__(self) -> None:
        pass


OF_OWN_CLASSES = [
    *(Color.RED, Color.GREEN, Kind.TRAIN, Flags.A, Flags.A | Flags.B, Flags(0), Level.LOW),
    *(Config(0.5), Config(1.0, Color.GREEN, [1], {"a": Frozen(1)}), Frozen(1, (2, 3)), Slots(4), FrozenSlots(1, 5)),
    {Frozen(1, (2,)): Color.RED, Color.GREEN: 1},
    {Color.RED, Frozen(3)},
]


@pytest.mark.parametrize("value", OF_OWN_CLASSES, ids=map(str, range(len(OF_OWN_CLASSES))))  # a set has no order
def test_members_and_dataclasses_come_back_without_trust(
    tmp_path: Path, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[Any] = []
    provider = PickledObjectProvider("o", lambda: {"value": value}, taken.append)
    tree = {"value": value, "array": torch.ones(2)}
    ds.snapshot([provider, from_state_dict("t", tree)], tmp_path / "c").wait_committed()
    assert not [r for r in caplog.records if "trust=" in r.getMessage()]
    live = {"value": dict.fromkeys(value) if isinstance(value, dict) else None, "array": torch.zeros(2)}
    ds.restore([provider, from_state_dict("t", live)], tmp_path / "c")
    loaded = ds.load(tmp_path / "c")
    for found in (taken[0], live, loaded["o"], loaded["t"]):
        assert type(found["value"]) is type(value)
        assert found["value"] == value
        if isinstance(value, Config):
            assert vars(found["value"]) == vars(value)


def test_arrays_in_a_dataclass_come_back(tmp_path: Path) -> None:
    value = {"config": Config(0.5, weights=torch.arange(4.0)), "w": torch.ones(3)}
    ds.snapshot([from_state_dict("s", value)], tmp_path / "c").wait_committed()
    live = {"config": Config(0.0), "w": torch.zeros(3)}
    ds.restore([from_state_dict("s", live)], tmp_path / "c")
    for found in (live, ds.load(tmp_path / "c")["s"]):
        assert torch.equal(found["config"].weights, torch.arange(4.0))
        assert found["config"].derived == 1.0


def _pickled(kind: type, state: bytes) -> bytes:
    return b"\x80\x02c%b\n%b\n)\x81%bb." % (kind.__module__.encode(), kind.__qualname__.encode(), state)


def test_a_pickle_hides_no_method_and_takes_no_other_class() -> None:
    for name in (b"method", b"__class__", b"__dict__", b"__post_init__"):
        with pytest.raises(FormatError, match="hides"):
            pickle_reader.loads(_pickled(Config, b"}X%b%bK\x01s" % (len(name).to_bytes(4, "little"), name)))
    with pytest.raises(FormatError, match="does not write"):
        pickle_reader.loads(_pickled(FrozenSlots, b"]K\x01a"))
    with pytest.raises(FormatError, match="no slot"):
        pickle_reader.loads(_pickled(FrozenSlots, b"N}X\x01\0\0\0zK\x01s\x86"))


def test_a_value_that_is_no_member_is_refused_by_name_and_no_code_runs() -> None:
    module = __name__.encode()
    for kind in (b"Level", b"Color"):
        with pytest.raises(FormatError, match=f"{kind.decode()} has no member"):
            pickle_reader.loads(b"\x80\x02c" + module + b"\n" + kind + b"\nK\x09\x85R.")


def test_a_class_of_a_module_that_is_not_imported_is_not_imported() -> None:
    assert "this" not in sys.modules
    with pytest.raises(TrustError, match=r"this\.Color"):
        pickle_reader.loads(b"\x80\x02cthis\nColor\nK\x01\x85R.")
    assert "this" not in sys.modules


def test_a_key_that_takes_for_ever_to_hash_is_refused_in_a_dataclass_too() -> None:
    bomb: Any = 1
    for _ in range(40):
        bomb = (bomb, bomb)
    value = pickle_writer.dumps(Frozen(0, (bomb,)))[2:-1]
    with pytest.raises(FormatError, match="too large"):
        pickle_reader.loads(b"\x80\x02}" + value + b"K\x01s.")


@pytest.mark.usefixtures("nothing_declared")
def test_what_needs_trust_is_said_once_with_the_line_to_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    value = {"space": SimpleNamespace(a=1), "path": Path("a"), "inner": Outer.Inner(1), "closing": Closing(1)}
    names = ["builtins.getattr", f"{__name__}.Closing", f"{__name__}.Outer", "types.SimpleNamespace"]
    with caplog.at_level(logging.WARNING, "datastates"), ds.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.snapshot([from_state_dict("config", value)], step=step)
        ckpt.wait()
    (message,) = [r.getMessage() for r in caplog.records if "trust=" in r.getMessage()]
    assert "'config'" in message
    assert f"trust={sorted(names)}" in message
    file = next(tmp_path.rglob("*.pt"))
    with pytest.raises(TrustError):
        ds.load(file)
    assert ds.load(file, trust=names)["config"] == value


def test_a_class_with_a_number_of_this_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """``copyreg`` gives the class a number, which another process would not know."""
    monkeypatch.setitem(pickle_writer.copyreg._extension_registry, (__name__, "Color"), 240)  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="Color"):
        pickle_writer.dumps(Color.RED)
