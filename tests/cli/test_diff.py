"""``diff`` names what differs between two checkpoints, whatever their layouts, and reads only what it must."""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import torch

import datastates as ds
from datastates.cli import commands
from datastates.cli.diff import Differences, Distance, compare, distance
from datastates.container.file import Container, open_container
from datastates.errors import CorruptError, FormatError
from datastates.providers import HostTensorProvider, PickledObjectProvider, from_state_dict
from datastates.reading import pieces
from datastates.reading.every_container import open_checkpoint
from datastates.state import arrays, dtypes
from datastates.state.provider import Saved, StateProvider
from datastates.state.shards import Shard

SMALL: dict[str, Any] = {"host_cache": "4MiB", "block": "1MiB"}
Save = Callable[..., list[Container]]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Save providers as a new checkpoint, and open it."""
    numbers = itertools.count()

    def make(*providers: StateProvider) -> list[Container]:
        path = tmp_path / str(next(numbers))
        ds.snapshot(providers, path, **SMALL).wait_committed()
        return open_checkpoint(path)[1]

    return make


def tree(**state: Any) -> StateProvider:
    return from_state_dict("m", state)


class Part(StateProvider):
    """One part of a matrix."""

    def __init__(self, whole: torch.Tensor, rows: slice, columns: slice, key: str = "w") -> None:
        super().__init__("m")
        part = whole[rows, columns].contiguous()
        found = arrays.array_shard(key, part)
        self._shard = replace(found, global_shape=tuple(whole.shape), offset=(rows.start, columns.start))

    def shards(self) -> list[Shard]:
        return [self._shard]

    def destinations(self, saved: Saved) -> list[Shard]:
        return []


WHOLE = torch.arange(600 * 500, dtype=torch.float32).reshape(600, 500)


def cut(save: Save, whole: torch.Tensor, rows: Sequence[int], columns: Sequence[int]) -> list[Container]:
    """A checkpoint of several containers, each with one part of a matrix."""
    ranges = [[slice(a, b) for a, b in itertools.pairwise(places)] for places in (rows, columns)]
    return [save(Part(whole, *part))[0] for part in itertools.product(*ranges)]


def test_equal_states_are_alike_and_not_read(save: Save) -> None:
    state = {"w": WHOLE, "view": WHOLE[3], "host": np.arange(5), "deep": {"list": [1, "text", None]}, "step": 7}
    found = compare(save(tree(**state)), save(tree(**state)))
    assert found == Differences((), (), (), (), equal=4, read=0)
    assert found.is_equal


def test_what_differs_is_named(save: Save) -> None:
    a = {
        "same": torch.ones(3),
        "gone": torch.ones(2),
        "w": torch.ones(4),
        "shape": torch.ones(4),
        "type": torch.ones(4),
    }
    b = {
        "same": torch.ones(3),
        "w": torch.tensor([1.0, 1, 1, 2]),
        "shape": torch.ones(2, 2),
        "type": torch.ones(4).int(),
    }
    b["new"] = torch.zeros(0)
    found = compare(save(HostTensorProvider("m", a)), save(HostTensorProvider("m", b)))
    assert (found.only_a, found.only_b, found.contents) == (("m/gone",), ("m/new",), ("m/w",))
    assert found.descriptions == (
        ("m/shape", "float32 4", "float32 2x2"),
        ("m/type", "float32 4", "int32 4"),
    )
    assert (found.equal, found.read, found.is_equal) == (1, 0, False)


@pytest.mark.parametrize(
    ("rows", "columns", "read"),
    [
        ((0, 600), (0, 500), 0),
        ((0, 1, 300, 600), (0, 500), 0),
        ((0, 600), (0, 100, 500), 0),
        ((0, 200, 600), (0, 100, 500), 0),
        ((0, 600), (0, 3, 500), 600 * 3 * 4),  # runs of 12 bytes have no digest
    ],
)
def test_layouts_do_not_matter(save: Save, rows: Sequence[int], columns: Sequence[int], read: int) -> None:
    parts = cut(save, WHOLE, rows, columns)
    assert compare(save(Part(WHOLE, slice(0, 600), slice(0, 500))), parts) == Differences((), (), (), (), 1, read)
    changed = WHOLE.clone()
    changed[599, 0] += 1
    assert compare(cut(save, changed, (0, 300, 600), (0, 500)), parts).contents == ("m/w",)
    if len(parts) > 1:
        with pytest.raises(FormatError, match="'m/w'"):
            compare(parts[1:], parts)


def test_a_rank_that_disagrees_is_told(save: Save) -> None:
    parts = cut(save, WHOLE, (0, 300, 600), (0, 500))
    other = cut(save, WHOLE.int(), (0, 300, 600), (0, 500))
    with pytest.raises(FormatError, match="'m/w'"):
        compare(parts, [parts[0], other[1]])


@pytest.mark.parametrize("make", [lambda t: t.t(), lambda t: t[:, ::2], lambda t: t.unsqueeze(0).expand(2, 600, 500)])
def test_what_has_no_digest_is_read(save: Save, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def state(base: torch.Tensor) -> StateProvider:
        return from_state_dict("m", {"base": base, "view": make(base)})

    a = save(state(WHOLE.clone()))
    found = compare(a, save(state(WHOLE.clone())))
    assert found.is_equal
    assert found.read > 0
    changed = WHOLE.clone()
    changed[0, 0] += 1
    assert compare(a, save(state(changed))).contents == ("m/base", "m/view")
    assert compare(a, save(from_state_dict("m", {"base": WHOLE, "view": make(WHOLE).contiguous()}))).is_equal


def test_damage_is_found_where_something_is_read(save: Save) -> None:
    a, b = save(tree(w=WHOLE.t())), save(tree(w=WHOLE.t()))
    data = bytearray(a[0].path.read_bytes())
    data[int(a[0].index.records.data_offset[0]) + 500_000] ^= 1
    a[0].path.write_bytes(data)
    with pytest.raises(CorruptError, match="m/w"):
        compare([open_container(a[0].path)], b)


# --- objects


@dataclass
class Config:
    value: Any


NESTED: list[Any] = [1]
NESTED.append(NESTED)
OTHER: list[Any] = [2]
OTHER.append(OTHER)


def pickled(save: Save, value: Any) -> list[Container]:
    return save(PickledObjectProvider("o", get=lambda: value, set=lambda _: None))


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ({"x": 1}, {"x": 1}, True),
        ({"x": 1}, {"x": 2}, False),
        ({"x": 1}, {"x": 1.0}, False),
        ({"x": 1}, {"x": True}, False),
        ({"x": 1, "y": 2}, {"y": 2, "x": 1}, False),
        ([["a" * 9] * 2], [["a" * 9, "".join("a" * 9)]], True),  # one string object twice, or two equal ones
        ((1, [2, {3}]), (1, [2, {3}]), True),
        ((1, [2, {3}]), (1, [2, {4}]), False),
        ([1], (1,), False),
        ([1], [1, 2], False),
        (float("nan"), float("nan"), True),
        (0.0, 1.0, False),
        (OrderedDict(a=1), {"a": 1}, False),
        (np.array(["a", "b"]), np.array(["a", "b"]), True),
        (np.array(["a", "b"]), np.array(["a", "c"]), False),
        (np.array([{}, None]), np.array([{}, None]), True),
        (np.array([{}, None]), np.array([{}, 1]), False),
        (np.float32(2), np.float32(2), True),
        (np.float32(2), np.float64(2), False),
        (torch.float16, torch.float32, False),
        (NESTED, NESTED, True),
        (NESTED, OTHER, False),
        (Config([1]), Config([1]), True),
        (Config([1]), Config([2]), False),
        (UUID(int=1), UUID(int=2), False),
    ],
)
def test_objects_are_compared_by_what_they_say(
    save: Save, monkeypatch: pytest.MonkeyPatch, a: Any, b: Any, same: bool
) -> None:
    saved = pickled(save, a), pickled(save, b)
    monkeypatch.setattr(Config, "__setstate__", lambda *_: pytest.fail("its code was run"), raising=False)
    monkeypatch.setattr(UUID, "__setstate__", lambda *_: pytest.fail("its code was run"))
    found = compare(*saved)
    assert found.is_equal is same
    assert found.contents == (() if same else ("o",))


def test_objects_are_compared_without_their_arrays(save: Save) -> None:
    a = {"n": 1, "w": [torch.ones(5), torch.zeros(70_000)], "s": "text"}
    b = {"n": 1, "w": [torch.zeros(5), torch.zeros(70_000)], "s": "text"}
    assert compare(save(tree(**a)), save(tree(**b))).contents == ("m/w/0",)
    # the same arrays in other records
    shifted = save(HostTensorProvider("first", {"x": torch.zeros(10_000)}), tree(**a))
    assert compare(save(tree(**a)), shifted) == Differences((), ("first/x",), (), (), 3, 0)


def test_objects_of_other_ranks_are_those_of_the_lowest(save: Save) -> None:
    def rank(containers: list[Container], number: int) -> Container:
        index = containers[0].index
        return replace(containers[0], index=replace(index, identity={**index.identity, "rank": number}))

    one, two = pickled(save, [1]), pickled(save, [2])
    alike = [rank(one, 0), rank(one, 1)]
    assert compare(alike, one).is_equal
    assert compare(one, alike).is_equal
    assert compare([rank(one, 0), rank(two, 1)], one).contents == ("o",)
    assert compare([rank(one, 0), rank(two, 1)], [rank(one, 0), rank(two, 1)]).is_equal


# --- the command


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    status = commands.main(["diff", *(str(a) for a in arguments)])
    return status, capsys.readouterr().out


def test_diff_says_what_differs(save: Save, capsys: pytest.CaptureFixture[str]) -> None:
    a = save(tree(w=WHOLE, n=1, **{"odd\nkey": WHOLE}))[0].path.parent
    b = save(tree(w=WHOLE + 1, n=2, x=WHOLE[:1]))[0].path.parent
    status, output = run(capsys, a, b)
    assert status == 1
    assert output.splitlines() == [
        f"m/odd\\nkey is only in {a}",
        f"m/x is only in {b}",
        "m/w differs",
        "m differs",
        "0 alike, 2 of other contents, 0 of another type or shape, 2 in one of them only",
    ]
    status, output = run(capsys, a, b, "--json")
    assert status == 1
    assert json.loads(output) == {
        "schema": 1,
        "equal": False,
        "only_a": ["m/odd\nkey"],
        "only_b": ["m/x"],
        "descriptions": [],
        "contents": ["m/w", "m"],
        "alike": 0,
        "bytes_read": 0,
    }


def test_diff_of_equal_ones(save: Save, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (save(tree(w=WHOLE, n=1))[0].path for _ in range(2))
    assert run(capsys, a.parent, b)[0] == 0
    assert json.loads(run(capsys, a, b.parent, "--json")[1])["equal"] is True


def test_diff_of_another_shape(save: Save, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (save(HostTensorProvider("m", {"w": t}))[0].path for t in (WHOLE, WHOLE[0]))
    status, output = run(capsys, a, b)
    assert (status, output.splitlines()[0]) == (1, f"m/w is float32 600x500 in {a}, float32 500 in {b}")


def test_diff_of_what_is_none_is_a_wrong_call(save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = save(tree(n=1))[0].path
    assert commands.main(["diff", str(a), str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        commands.main(["diff", str(a)])
    assert ended.value.code == 2


# --- how far


def test_diff_says_how_far_values_differ(save: Save, capsys: pytest.CaptureFixture[str]) -> None:
    far = WHOLE.double().add(1)
    far[2, 5] += 0.5
    near = far.clone()
    near[2, 5] -= 0.5
    near[599, 499] += 0.25
    zeros = torch.zeros(3)
    a = save(HostTensorProvider("m", {"w": far, "same": WHOLE, "sign": zeros}))[0].path.parent
    b = save(HostTensorProvider("m", {"w": near, "same": WHOLE, "sign": -zeros}))[0].path.parent
    status, output = run(capsys, a, b, "--values")
    assert status == 1
    norm = np.sqrt(0.5**2 + 0.25**2) / np.linalg.norm(far.numpy())
    assert output.splitlines()[:2] == [
        f"m/w differs in 2 of 300000 elements, at most by 0.5 at [2, 5], by {norm:.3g} of its norm",
        "m/sign differs in no value: in the signs of zeros or in the bits of NaN",
    ]
    values = json.loads(run(capsys, a, b, "--values", "--json")[1])["values"]
    assert list(values) == ["m/w", "m/sign"]
    assert values["m/w"]["relative"] == pytest.approx(norm)
    del values["m/w"]["relative"]
    assert values["m/w"] == {"elements": 300_000, "differing": 2, "not_finite": 0, "most": 0.5, "at": [2, 5]}


def test_values_of_a_tensor_in_many_pieces_and_parts_differ_as_far(
    save: Save, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = WHOLE.clone()
    changed[599, 3] += 7
    changed[0, 499] -= 9
    places = [save(tree(w=w))[0].path for w in (WHOLE, changed)]
    whole = run(capsys, *places, "--values")
    assert "2 of 300000 elements, at most by 9 at [0, 499]" in whole[1]
    monkeypatch.setattr(pieces, "MOST", 1000)
    assert run(capsys, *places, "--values") == whole


@pytest.mark.parametrize("name", [d.name for d in dtypes.ALL if pieces.are_numbers(d)])
def test_values_of_every_type_are_compared(name: str, save: Save, capsys: pytest.CaptureFixture[str]) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")

    def provider(last: int) -> StateProvider:
        if (kind := getattr(torch, name, None)) is not None and dtypes.BY_NAME[name].in_torch:
            return HostTensorProvider("m", {"w": torch.tensor([1.0, 1, last]).to(kind)})
        return HostTensorProvider("m", {"w": np.array([1, 1, last]).astype(getattr(ml_dtypes, name))})

    low = int(name == "float8_e8m0fnu")  # which has powers of two only; int2 ends at 1
    a, b = (save(provider(last))[0].path for last in (low, low + 1))
    assert "differs in 1 of 3 elements, at most by 1 at [2]" in run(capsys, a, b, "--values")[1]


def far(a: Any, b: Any) -> Distance:
    return distance([((10,), np.array(a), np.array(b))])


def test_what_is_not_finite_is_counted_apart() -> None:
    nan, inf = float("nan"), float("inf")
    assert far([nan, 1.0, inf], [nan, 1.0, inf]) == Distance(3, 0, 0, None, None, None)
    found = far([nan, inf, 3.0, 4.0], [1.0, -inf, 3.0, 6.0])
    assert found == Distance(4, 3, 2, 2.0, (13,), 2 / 5)
    assert str(found).endswith("at most by 2 at [13], by 0.4 of its norm; 2 of them are not finite")
    assert far([nan], [0.0]) == Distance(1, 1, 1, None, None, None)
    assert far([1.7e308], [-1.7e308]).not_finite == 1


def test_large_integers_and_complex_numbers_differ_as_stored() -> None:
    assert far([2**60], [2**60 + 1]).differing == 1
    assert far([3 + 4j], [0j]).most == 5.0
    assert far([0.0], [1.0]) == Distance(1, 1, 0, 1.0, (10,), None)
    assert far([True], [False]).most == 1.0
