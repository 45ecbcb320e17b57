"""Parts of logical tensors: boxes and flat ranges, their intersections and unions. Pure functions.

All positions, lengths and bounds are in elements. Positions in a part count in the part's own row-major order, whatever
its strides in memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from datastates._base.columns import I64
from datastates.state.runs import Runs, pairs, spread
from datastates.state.strides import row_major

_Spread = tuple[Sequence[int], Sequence[int], Sequence[int], int, int, int]
"""The arguments of :func:`~datastates.state.runs.spread`."""
_NONE = Runs.single(*(np.zeros(0, np.int64),) * 3)


class HeldPart(NamedTuple):
    """The part of a logical tensor that a rank holds; see the same fields of :class:`datastates.state.shards.Shard`."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...] | None
    flat: tuple[int, int] | None = None
    replicas: tuple[int, ...] = ()
    owner: int | None = None


def replicas(ranks: Iterable[int]) -> tuple[int, ...]:
    """Write the ranks that hold the same part as a shard does: ascending, each once; empty if there is only one."""
    unique = tuple(sorted(set(ranks)))
    return unique if len(unique) > 1 else ()


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a logical tensor: a box of it, or a range of its row-major flattening.

    Attributes:
        global_shape: Shape of the logical tensor.
        shape: Elements of this part along each dimension; for a flat range, its length alone.
        offset: Where the box begins; None for a flat range.
        flat: First and one past the last element of a flat range; None for a box.
    """

    global_shape: tuple[int, ...]
    shape: tuple[int, ...]
    offset: tuple[int, ...] | None
    flat: tuple[int, int] | None = None

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Part:
        """The whole tensor as a box."""
        return cls(shape, shape, (0,) * len(shape))

    def __str__(self) -> str:
        """A text that is equal for two parts of a tensor if they are equal and of the same kind."""
        return f"elements {self.flat[0]} to {self.flat[1]}" if self.flat is not None else f"{self.offset}+{self.shape}"

    @property
    def numel(self) -> int:
        """Number of the part's elements."""
        return math.prod(self.shape)

    @property
    def is_whole(self) -> bool:
        """Whether the part has all elements of the logical tensor."""
        return self.numel == math.prod(self.global_shape)

    @property
    def has_first(self) -> bool:
        """Whether the part has the logical tensor's first element."""
        begin = self.offset if self.flat is None else self.flat[:1]
        return self.numel > 0 and not any(begin or ())

    @property
    def flaw(self) -> str | None:
        """Why this is no part of the logical tensor, as the end of a message about the key; None if it is a part."""
        if (self.offset is None) == (self.flat is None):
            return "must have either an offset (a box) or a flat range"
        place = self.flat if self.flat is not None else self.offset or ()
        if not all(hasattr(n, "__index__") for n in (*self.global_shape, *place)):
            return f"must have integers for its place, not {place} of {self.global_shape}"
        if self.flat is not None:
            if len(self.flat) != 2:
                return f"must have two bounds of a flat range, not {self.flat}"
            begin, end = self.flat
            fits = 0 <= begin <= end <= math.prod(self.global_shape) and self.shape == (end - begin,)
        else:
            sides = self.offset or (), self.shape, self.global_shape
            fits = len(set(map(len, sides))) == 1 and all(0 <= a <= a + n <= m for a, n, m in zip(*sides, strict=True))
        return None if fits else f"has the shape {self.shape}, and is no part {self} of a tensor of {self.global_shape}"

    @property
    def bounds(self) -> tuple[int, int]:
        """First and one past the last position of the part's elements in the flattened logical tensor."""
        if self.flat is not None:
            return self.flat
        if self.numel == 0:
            return 0, 0
        first = last = 0
        for size, begin, length in zip(self.global_shape, self.offset or (), self.shape, strict=True):
            first, last = first * size + begin, last * size + begin + length - 1
        return first, last + 1

    def runs(self) -> tuple[I64, I64]:
        """Begins and lengths of the part's contiguous stretches in the flattened logical tensor, ascending.

        A stretch's position in the part is the sum of the lengths before it.
        """
        if self.flat is not None or self.is_whole:
            first, n = self.flat[0] if self.flat is not None else 0, self.numel
            return np.array([first] if n else [], np.int64), np.array([n] if n else [], np.int64)
        _, runs = intersect(Part.whole(self.global_shape), self).stretches()
        return runs.source, runs.length


def _shared_box(source: Part, dest: Part) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """The intersection of two boxes: the index in each box at which it begins, and its size; None if it is empty."""
    assert source.offset is not None
    assert dest.offset is not None
    low = [max(a, b) for a, b in zip(source.offset, dest.offset, strict=True)]
    high = [min(a + n, b + m) for a, n, b, m in zip(source.offset, source.shape, dest.offset, dest.shape, strict=True)]
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return None
    at, to = (tuple(a - b for a, b in zip(low, part.offset or (), strict=True)) for part in (source, dest))
    return at, to, tuple(b - a for a, b in zip(low, high, strict=True))


@functools.lru_cache(maxsize=1024)  # tensors of equal shapes are often cut in the same way
def _shared_spread(source: Part, dest: Part) -> _Spread | None:
    """Cut the intersection of two boxes into stretches that are contiguous in both; None if it is empty."""
    if (box := _shared_box(source, dest)) is None:
        return None
    at, to, size = box
    inner = len(size)  # from this dimension on the intersection spans both boxes
    while inner and size[inner - 1] == source.shape[inner - 1] == dest.shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)  # along this dimension it is one stretch
    steps, to_steps = row_major(source.shape), row_major(dest.shape)
    first = sum(b * s for b, s in zip(at, steps, strict=True))
    to_first = sum(b * s for b, s in zip(to, to_steps, strict=True))
    return size[:outer], steps[:outer], to_steps[:outer], math.prod(size[outer:]), first, to_first


def stretch(source: Part, dest: Part) -> tuple[int, int, int] | None:
    """Find the elements that two parts share, if they are contiguous in both. Cheaper than :func:`intersect`.

    Returns:
        The position in each part's row-major order at which the shared elements begin, and their number, which may be
        0. None if they are several stretches, or if one part is a box and the other a flat range.

    Raises:
        ValueError: The logical tensors have different shapes.
    """
    _check_same_tensor(source, dest)
    if source.offset is not None and dest.offset is not None:
        if (found := _shared_spread(source, dest)) is None:
            return 0, 0, 0
        sizes, _, _, length, source_at, dest_at = found
        return (source_at, dest_at, length) if math.prod(sizes) == 1 else None
    if source.flat is None or dest.flat is None:
        return None
    begin, end = max(source.flat[0], dest.flat[0]), min(source.flat[1], dest.flat[1])
    return (begin - source.flat[0], begin - dest.flat[0], end - begin) if begin < end else (0, 0, 0)


def _check_same_tensor(source: Part, dest: Part) -> None:
    if source.global_shape != dest.global_shape:
        raise ValueError(f"parts of tensors of different shapes, {source.global_shape} and {dest.global_shape}")


def intersect(source: Part, dest: Part) -> Runs:
    """The elements that two parts of one logical tensor share.

    Positions are in each part's own row-major order. They ascend in both parts.

    Raises:
        ValueError: The logical tensors have different shapes.
    """
    _check_same_tensor(source, dest)
    if source.offset is not None and dest.offset is not None:
        found = _shared_spread(source, dest)
        return _NONE if found is None else spread(*found)
    if _is_beyond(source, dest) or _is_beyond(dest, source):
        return _NONE
    (a_begin, a_length), (b_begin, b_length) = source.runs(), dest.runs()
    a_end, b_end = a_begin + a_length, b_begin + b_length
    low_at = np.searchsorted(a_end, b_begin, side="right")
    b, a = pairs(low_at, np.maximum(np.searchsorted(a_begin, b_end, side="left"), low_at))
    begin = np.maximum(a_begin[a], b_begin[b])
    length = np.minimum(a_end[a], b_end[b]) - begin
    source_at = begin - a_begin[a] + (np.cumsum(a_length) - a_length)[a]
    return Runs.single(source_at, begin - b_begin[b] + (np.cumsum(b_length) - b_length)[b], length)


def _is_beyond(part: Part, other: Part) -> bool:
    """Whether all of ``part`` lies behind all of ``other`` in the flattened tensor, or ``part`` is empty."""
    return part.numel == 0 or part.bounds[0] >= other.bounds[1]


@dataclass(frozen=True, slots=True)
class Block:
    """A box of elements that two parts share.

    Attributes:
        size: Elements along each dimension.
        source, dest: Where the shared box begins in each part: an index if the part is a box, a position if the part is
            a flat range.
        steps: Distances of neighbouring elements along each dimension, in the part that is a flat range. Empty if both
            parts are boxes.
    """

    size: tuple[int, ...]
    source: tuple[int, ...]
    dest: tuple[int, ...]
    steps: tuple[int, ...]


def blocks(source: Part, dest: Part) -> Iterator[Block]:
    """The elements that two parts share, as boxes; for copying between arrays of any strides.

    Two boxes share at most one box, and so do two flat ranges. A box and a flat range share at most ``2 * ndim - 1``.

    Raises:
        ValueError: The logical tensors have different shapes.
    """
    _check_same_tensor(source, dest)
    if source.offset is not None and dest.offset is not None:
        if (shared := _shared_box(source, dest)) is not None:
            at, to, size = shared
            yield Block(size, at, to, ())
        return
    runs = intersect(source, dest)
    if not len(runs):
        return
    box, box_at = (source, runs.source) if source.flat is None else (dest, runs.dest)
    other = dest if source.flat is None else source
    if box.flat is not None:
        yield Block((int(runs.length[0]),), (int(runs.source[0]),), (int(runs.dest[0]),), (1,))
        return
    # the shared elements are one range in the box's own order, but not in the flat range's
    assert box.offset is not None
    assert other.flat is not None
    steps = row_major(box.global_shape)
    for begin, size in _boxes_of_range(box.shape, int(box_at[0]), int(box_at[-1] + runs.length[-1])):
        first = sum((o + b) * s for o, b, s in zip(box.offset, begin, steps, strict=True)) - other.flat[0]
        yield Block(size, begin, (first,), steps) if box is source else Block(size, (first,), begin, steps)


def _boxes_of_range(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Begins and sizes of the boxes that make up a range of an array's row-major order; at most ``2 * ndim - 1``."""
    if len(shape) <= 1:
        yield ((begin,), (end - begin,)) if shape else ((), ())
        return
    inner = math.prod(shape[1:])
    row = begin // inner
    if begin % inner or end < (row + 1) * inner:
        stop = min(end, (row + 1) * inner)
        for at, size in _boxes_of_range(shape[1:], begin - row * inner, stop - row * inner):
            yield (row, *at), (1, *size)
        begin, row = stop, row + 1
    if (rows := (end - begin) // inner) > 0:
        yield (row, *(0,) * (len(shape) - 1)), (rows, *shape[1:])
        begin += rows * inner
    if begin < end:
        for at, size in _boxes_of_range(shape[1:], 0, end - begin):
            yield (row + rows, *at), (1, *size)


def boxes(shape: Sequence[int], most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a box into boxes of at most ``most`` elements: yields the begin and the size of each, in row-major order."""
    d = next((d for d, n in enumerate(shape) if n > 1), None)
    if d is None or math.prod(shape) <= most:
        if math.prod(shape):
            yield (0,) * len(shape), tuple(shape)
        return
    inner = math.prod(shape) // shape[d]
    step = max(1, most // inner)
    for at in range(0, shape[d], step):
        slab = (*shape[:d], min(step, shape[d] - at), *shape[d + 1 :])
        for begin, size in boxes(slab, most):
            yield (*begin[:d], at + begin[d], *begin[d + 1 :]), size


def uncovered(dest: Part, sources: Sequence[Part]) -> int:
    """Number of elements of ``dest`` that no part of ``sources`` has; sources may overlap.

    Raises:
        ValueError: The logical tensors have different shapes.
    """
    if any(source.global_shape == dest.global_shape and source.is_whole for source in sources):
        return 0
    found = [(source, stretch(source, dest)) for source in sources]
    at, to, length = np.array([one for _, one in found if one is not None], np.int64).reshape(-1, 3).T
    others = (intersect(source, dest) for source, one in found if one is None)
    _, begin, end = Runs.joined([Runs.single(at, to, length), *others]).filled()
    order = np.argsort(begin, kind="stable")
    begin, end = union(begin[order], end[order])
    return dest.numel - int((end - begin).sum())


def overlap(parts: Sequence[Part]) -> bool:
    """Whether any two of a tensor's parts have elements in common. All parts are boxes, or all are flat ranges."""
    filled = [part for part in parts if part.numel]
    if not filled:
        return False
    begin = np.array([part.offset if part.flat is None else part.flat[:1] for part in filled], np.int64)
    end = begin + np.array([part.shape for part in filled], np.int64)
    meet = ((begin[:, None] < end) & (begin < end[:, None])).all(axis=2)
    return int(meet.sum()) > len(filled)


def union(begin: I64, end: I64) -> tuple[I64, I64]:
    """The union of ranges as disjoint stretches; ``begin`` must ascend, and ranges that touch are joined."""
    furthest = np.maximum.accumulate(end)
    new = np.flatnonzero(begin[1:] > furthest[:-1]) + 1
    return begin[np.append(0, new)[: len(begin)]], furthest[np.append(new - 1, len(end) - 1)[: len(end)]]
