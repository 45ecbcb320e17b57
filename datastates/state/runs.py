"""Ranges with a stride, which map positions in a source to positions in a destination. In columns. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from datastates._base.columns import I64, Bools


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Runs, one column entry for each. A run is ``count`` stretches of equal length, equally spaced in source and dest.

    All numbers count elements, or all count bytes. The stretches of a run do not overlap. A run of a single stretch has
    its length as steps.

    Attributes:
        source, dest: Where each run begins in the source and in the destination.
        length: Length of each of the run's stretches.
        count: Number of the run's stretches.
        source_step, dest_step: Distance from the begin of one stretch to the begin of the next.
    """

    source: I64
    dest: I64
    length: I64
    count: I64
    source_step: I64
    dest_step: I64

    @classmethod
    def single(cls, source: I64, dest: I64, length: I64) -> Runs:
        """Make runs of one stretch each."""
        return cls(source, dest, length, np.ones(len(length), np.int64), length, length)

    @classmethod
    def joined(cls, parts: Sequence[Runs]) -> Runs:
        """Join at least one set of runs, one after the other."""
        return cls(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)))

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: I64 | Bools) -> Runs:
        return Runs(*(getattr(self, f.name)[index] for f in fields(self)))

    def placed(self, unit: int, source: int, dest: int = 0) -> Runs:
        """The runs in a smaller unit, and moved. One old unit is ``unit`` new ones.

        Args:
            unit: New units in an old one, such as the bytes of an element.
            source: Distance in new units by which the runs are moved in the source.
            dest: Distance in new units by which the runs are moved in the destination.
        """
        length, steps = self.length * unit, (self.source_step * unit, self.dest_step * unit)
        return Runs(self.source * unit + source, self.dest * unit + dest, length, self.count, *steps)

    @property
    def size(self) -> I64:
        """Length of all stretches of each run together."""
        return self.length * self.count

    @property
    def end(self) -> I64:
        """Where the last stretch of each run ends in the source."""
        return self.source + (self.count - 1) * self.source_step + self.length

    @property
    def has_gaps(self) -> Bools:
        """Whether each run has gaps between its stretches in the source."""
        return (self.count > 1) & (self.source_step > self.length)

    def stretches(self) -> tuple[I64, Runs]:
        """Split the runs into stretches; returns the number of each stretch's run, and each stretch as a run."""
        which, number = pairs(0, self.count)
        source = self.source[which] + number * self.source_step[which]
        return which, Runs.single(source, self.dest[which] + number * self.dest_step[which], self.length[which])

    def regular(self) -> Runs:
        """Join ascending runs of one stretch each into runs of many, where they are equally long and equally spaced."""
        if len(self) < 2 or self.count.max() > 1:
            return self
        links = np.stack((np.diff(self.source), np.diff(self.dest)))
        valid = (self.length[1:] == self.length[:-1]) & (links >= self.length[:-1]).all(axis=0)
        change = (links[:, 1:] != links[:, :-1]).any(axis=0) & valid[1:] & valid[:-1]
        # where each distance differs from the one before, a run can begin at every second distance
        number = np.arange(len(valid))
        begins = np.maximum.accumulate(np.where(np.append(False, change)[: len(valid)], -1, number))
        first = np.flatnonzero(np.append(True, ~valid | ((number - begins) % 2 == 1)))
        count = np.diff(np.append(first, len(self)))
        steps = (np.append(link, 0)[first] for link in links)
        length = self.length[first]
        source_step, dest_step = (np.where(count > 1, step, length) for step in steps)
        return Runs(self.source[first], self.dest[first], length, count, source_step, dest_step)

    def within(self, low: I64, high: I64) -> tuple[I64, Runs]:
        """Cut each run to the range of the source from ``low`` to before ``high``, which must reach into the run.

        At most three runs are left of each: the rest of a stretch, whole stretches, and the begin of a stretch.

        Returns:
            For each run that is left, the number of the run that it is cut from, and the run.
        """
        if (self.count == 1).all():
            begin: I64 = np.maximum(low, self.source)
            length: I64 = np.minimum(high, self.end) - begin
            return np.arange(len(self)), Runs.single(begin, self.dest + (begin - self.source), length)
        low, high, step = np.maximum(low - self.source, 0), high - self.source, self.source_step
        first = -(-low // step)  # the first stretch that begins at `low` or later
        last = np.clip((high - self.length) // step + 1, 0, self.count)  # the first stretch that ends behind `high`
        rest = low - (first - 1) * step
        zero, one = np.zeros_like(low), np.ones_like(low)
        candidates = (
            (first - 1, rest, np.minimum(self.length, high - (first - 1) * step) - rest, one),
            (first, zero, self.length, last - first),
            (last, zero, high - last * step, ((first <= last) & (last < self.count)).astype(np.int64)),
        )
        which, found = [], []
        for number, at, length, count in candidates:
            kept = np.flatnonzero((length > 0) & (count > 0))
            run, at, length, count = self[kept], at[kept], length[kept], count[kept]
            source, dest = (b + number[kept] * s + at for b, s in _places(run))
            steps = (np.where(count > 1, s, length) for _, s in _places(run))
            which.append(kept)
            found.append(Runs(source, dest, length, count, *steps))
        return np.concatenate(which), Runs.joined(found)

    def filled(self) -> tuple[I64, I64, I64]:
        """The stretches of the destination that the runs fill. Touching stretches of one run count as one.

        Returns:
            The number of each stretch's run, and where the stretch begins and ends.
        """
        touching = self.dest_step == self.length
        rest = np.flatnonzero(~touching)
        of, apart = self[rest].stretches()
        which = np.append(np.flatnonzero(touching), rest[of])
        begin = np.append(self.dest[touching], apart.dest)
        return which, begin, begin + np.append(self.size[touching], apart.length)


def spread(
    sizes: Sequence[int], source_steps: Sequence[int], dest_steps: Sequence[int], length: int, source: int, dest: int
) -> Runs:
    """Make runs of a grid of stretches: one stretch for each index of an array of ``sizes``, in row-major order.

    Args:
        sizes: Number of stretches along each dimension.
        source_steps: Distance in the source of neighbouring stretches along each dimension.
        dest_steps: Distance in the destination of neighbouring stretches along each dimension.
        length: Length of each stretch.
        source: Where the first stretch begins in the source.
        dest: Where the first stretch begins in the destination.
    """
    if not sizes:
        return Runs.single(np.array([source]), np.array([dest]), np.array([length]))
    dims = [dim for dim in zip(sizes, source_steps, dest_steps, strict=True) if dim[0] != 1]
    count, *steps = dims.pop() if dims and min(dims[-1][1:]) >= length else (1, length, length)
    while dims and count > 1 and list(dims[-1][1:]) == [count * step for step in steps]:
        count *= dims.pop()[0]
    outer = [n for n, *_ in dims]
    begins = grid(outer, [s for _, s, _ in dims], source), grid(outer, [d for *_, d in dims], dest)
    return Runs(*begins, *(np.full(len(begins[0]), n, np.int64) for n in (length, count, *steps)))


def grid(sizes: Sequence[int], steps: Sequence[int], first: int = 0) -> I64:
    """The positions ``first + sum(i[d] * steps[d])`` for all indices ``i`` of an array of ``sizes``, row-major."""
    result = np.array([first], np.int64)
    for n, step in zip(sizes, steps, strict=True):
        result = (result[:, None] + np.arange(n, dtype=np.int64) * step).ravel()
    return result


def pairs(low: I64 | int, high: I64) -> tuple[I64, I64]:
    """All pairs ``(i, j)`` with ``low[i] <= j < high[i]``, as two columns, ordered by ``i``, then by ``j``."""
    counts = high - low
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts - low, counts)


def _places(runs: Runs) -> tuple[tuple[I64, I64], tuple[I64, I64]]:
    return (runs.source, runs.source_step), (runs.dest, runs.dest_step)
