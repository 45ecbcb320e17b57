"""The layouts of ZeRO's flat partitions tile every parameter, as splitting by hand does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastates.providers import FlatLayout, Slice

shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=8)
worlds = st.integers(1, 8)


def _concatenated(tensors: list[np.ndarray], world: int, alignment: int) -> list[np.ndarray]:
    """By hand: lay them end to end, pad with -1, cut."""
    flat = np.concatenate([t.reshape(-1) for t in tensors]) if tensors else np.empty(0)
    padded = math.ceil(len(flat) / (alignment * world)) * alignment * world
    return np.split(np.concatenate([flat, np.full(padded - len(flat), -1.0)]), world)


def _each_split(tensors: list[np.ndarray], world: int) -> list[np.ndarray]:
    """By hand: pad each with -1, cut it, and lay a rank's cuts end to end."""
    cuts = [_concatenated([t], world, 1) for t in tensors]
    return [np.concatenate([c[rank] for c in cuts]) if cuts else np.empty(0) for rank in range(world)]


@given(shapes, worlds, st.integers(1, 6), st.booleans())
def test_layouts_hold_what_splitting_by_hand_gives(
    given_shapes: list[tuple[int, ...]], world: int, alignment: int, each: bool
) -> None:
    parameters = [(f"p{i}", shape) for i, shape in enumerate(given_shapes)]
    first = np.cumsum([0, *map(math.prod, given_shapes)])
    tensors = [np.arange(first[i], first[i + 1], dtype=np.float64) for i in range(len(given_shapes))]
    flats = _each_split(tensors, world) if each else _concatenated(tensors, world, alignment)
    seen = [np.zeros(t.size, int) for t in tensors]
    owned: list[object] = []
    for rank, flat in enumerate(flats):
        if each:
            layout = FlatLayout.each_split(parameters, rank, world)
        else:
            layout = FlatLayout.concatenated(parameters, rank, world, alignment=alignment)
        assert layout.numel == len(flat)
        is_padding = np.ones(len(flat), bool)
        for piece in layout.slices:
            number = int(str(piece.name)[1:])
            here = slice(piece.at, piece.at + piece.end - piece.begin)
            assert np.array_equal(flat[here], tensors[number][piece.begin : piece.end])
            seen[number][piece.begin : piece.end] += 1
            is_padding[here] = False
        assert np.array_equal(is_padding, flat == -1)
        runs = layout.runs()
        assert [piece for _, _, pieces in runs for piece in pieces] == list(layout.slices)
        assert all(not is_padding[begin:end].any() for begin, end, _ in runs)
        assert sum(end - begin for begin, end, _ in runs) == int((~is_padding).sum())
        owned += layout.owned
    assert all((times == 1).all() for times in seen)
    assert sorted(map(str, owned)) == sorted(name for name, _ in parameters)


def test_deepspeed_layouts_by_hand() -> None:
    """Two ranks, three parameters: the numbers are worked out on paper from DeepSpeed's rules."""
    parameters = [("a", (3,)), ("b", (2, 3)), ("c", (4,))]
    # ZeRO-1 and 2: 13 elements, padded to a multiple of 2 ranks x 2, are 16: 8 for each
    first, second = (FlatLayout.concatenated(parameters, rank, 2, alignment=2) for rank in range(2))
    assert (first.numel, second.numel) == (8, 8)
    assert first.slices == (Slice("a", (3,), 0, 3, 0), Slice("b", (2, 3), 0, 5, 3))
    assert second.slices == (Slice("b", (2, 3), 5, 6, 0), Slice("c", (4,), 0, 4, 1))
    assert second.runs() == [(0, 5, list(second.slices))]
    # ZeRO-3: 2 of 3, 3 of 6, 2 of 4; the second rank's part of a has one element and one of padding
    first, second = (FlatLayout.each_split(parameters, rank, 2) for rank in range(2))
    assert (first.numel, second.numel) == (7, 7)
    assert first.slices == (Slice("a", (3,), 0, 2, 0), Slice("b", (2, 3), 0, 3, 2), Slice("c", (4,), 0, 2, 5))
    assert second.slices == (Slice("a", (3,), 2, 3, 0), Slice("b", (2, 3), 3, 6, 2), Slice("c", (4,), 2, 4, 5))
    assert [(begin, end) for begin, end, _ in second.runs()] == [(0, 1), (2, 7)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FlatLayout.concatenated([("a", (2,))], 2, 2), "rank=2"),
        (lambda: FlatLayout.concatenated([("a", (2,))], 0, 1, alignment=0), "alignment=0"),
        (lambda: FlatLayout.each_split([("a", (2,)), ("a", (3,))], 0, 1), "two parameters are named 'a'"),
        (lambda: FlatLayout.each_split([("a", (2, -1))], 0, 1), "'a' has a negative dimension"),
        (lambda: FlatLayout((("a", (2,)),), (Slice("b", (2,), 0, 2, 0),), 2), "'b' is of shape"),
        (lambda: FlatLayout((("a", (2,)),), (Slice("a", (2,), 0, 3, 0),), 3), "'a' has no elements 0 to 3"),
        (lambda: FlatLayout((("a", (2,)),), (Slice("a", (2,), 0, 2, 1),), 2), "reach to 3"),
        (
            lambda: FlatLayout((("a", (2,)),), (Slice("a", (2,), 0, 1, 1), Slice("a", (2,), 1, 2, 1)), 2),
            "before the end of another",
        ),
    ],
)
def test_impossible_layouts_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
