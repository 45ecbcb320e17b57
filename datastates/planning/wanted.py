"""The ranges of a file that a read wants, in columns. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from datastates._base.columns import I32, I64, Bools
from datastates._base.sizes import PAGE
from datastates.planning.plans import Chunks
from datastates.state import parts
from datastates.state.runs import Runs

GAP = 64 * 1024
"""Longest gap in bytes between two wanted ranges that is read over, as that is cheaper than a second read."""


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """The wanted ranges of a file, ascending. All numbers count bytes.

    Attributes:
        runs: The ranges, some with gaps, as the columns of a matrix have. A range with gaps overlaps no other range.
            In its gaps lie only ranges of the same comb, as the other columns; see :func:`_in_combs`.
        first, last: For each range, the number of the first chunk that it intersects, and one past the last.
        chunk_begin, chunk_end: File offsets of each chunk.
        union: All wanted bytes, each once.
        fetched: All wanted bytes and the bytes in narrow gaps, each once.
    """

    runs: Runs
    first: I64
    last: I64
    chunk_begin: I64
    chunk_end: I64
    union: Runs
    fetched: Runs

    @classmethod
    def of(cls, runs: Runs, chunks: Chunks) -> Wanted:
        """Describe :func:`simplified` ranges of a file that consists of these chunks."""
        chunk_begin = chunks.offset.astype(np.int64)
        chunk_end = chunk_begin + chunks.length.astype(np.int64)
        first = np.searchsorted(chunk_end, runs.source, side="right")
        last = np.searchsorted(chunk_begin, runs.end, side="left")
        apart = _joined(runs)
        gapped = apart.has_gaps
        wide = gapped & ~_has_narrow_gaps(apart)
        union = _union(apart, gapped)
        fetched = union if wide.sum() == gapped.sum() else _union(apart, wide)
        return cls(runs, first, last, chunk_begin, chunk_end, union, fetched)

    @property
    def needed_nbytes(self) -> int:
        """Number of wanted bytes, each counted once."""
        return int(self.union.size.sum())

    @property
    def shared_nbytes(self) -> int:
        """Number of bytes in narrow gaps between wanted bytes."""
        return int(self.fetched.size.sum()) - self.needed_nbytes

    def coverage(self, weight: I64 | int = 1) -> I64:
        """For each chunk, the sum of the weights of the ranges that intersect it. ``weight`` is each range's."""
        marks = np.zeros(len(self.chunk_begin) + 1, np.int64)
        np.add.at(marks, self.first, weight)
        np.add.at(marks, self.last, -weight)
        return np.cumsum(marks[:-1])


def _has_narrow_gaps(runs: Runs) -> Bools:
    """Mark runs whose gaps are shorter than a page, or no longer than the stretches beside them."""
    return runs.has_gaps & (runs.source_step - runs.length <= np.maximum(PAGE - 1, runs.length))


def simplified(dest: I32, wanted: Runs) -> tuple[I32, Runs]:
    """Drop empty ranges and sort the others by file offset; returns the destination of each, and the ranges.

    A range with gaps is split into its stretches, unless it is a comb or a part of one.
    """
    kept = wanted.size > 0
    dest, runs = dest[kept], wanted[kept]
    order = np.argsort(runs.source, kind="stable")
    dest, runs = dest[order], runs[order]
    if not runs.has_gaps.any():
        return dest, runs
    apart = runs.has_gaps & ~_in_combs(runs)
    which, single = runs[apart].stretches()
    dest = np.append(dest[~apart], dest[apart][which])
    runs = Runs.joined([runs[~apart], single])
    order = np.argsort(runs.source, kind="stable")
    return dest[order], runs[order]


def _in_combs(runs: Runs) -> Bools:
    """Mark the runs that make combs, among ascending runs.

    A comb is a group of interleaved runs, such as columns of one matrix that go to several destinations. Each stretch
    begins where a stretch of the run before ends, or is the same stretch. The stretches and the gaps between the rows
    are short. A run that no other run reaches into may be a comb by itself.
    """
    begin, end, again = runs.source, runs.end, _again(runs)
    starts = np.append(True, begin[1:] >= np.maximum.accumulate(end)[:-1])
    follows = again | np.append(True, begin[1:] == begin[:-1] + runs.length[:-1])
    alike = np.append(True, (runs.count[1:] == runs.count[:-1]) & (runs.source_step[1:] == runs.source_step[:-1]))
    fits = runs.has_gaps & (runs.length < GAP) & (starts | (follows & alike))
    firsts = np.flatnonzero(starts)
    space = runs.source_step[firsts] - np.add.reduceat(np.where(again, 0, runs.length), firsts)
    combs = np.logical_and.reduceat(fits, firsts) & (space >= 0) & (space <= GAP)
    return np.asarray(combs[np.cumsum(starts) - 1])


def _joined(runs: Runs) -> Runs:
    """Join the runs of each comb into one run, among :func:`simplified` ranges."""
    gapped = runs.has_gaps
    joins = gapped[1:] & gapped[:-1] & (runs.source[1:] < runs.end[:-1])
    if not joins.any():
        return runs
    firsts = np.flatnonzero(np.append(True, ~joins))
    return replace(runs[firsts], length=np.add.reduceat(np.where(_again(runs), 0, runs.length), firsts))


def _again(runs: Runs) -> Bools:
    """Mark runs with gaps that begin where the run before begins, and have stretches of the same length."""
    same = (runs.source[1:] == runs.source[:-1]) & (runs.length[1:] == runs.length[:-1])
    return np.append(False, same & runs.has_gaps[1:])[: len(runs)]


def _union(runs: Runs, gapped: Bools) -> Runs:
    """All bytes of ascending runs, each once. A run not marked in ``gapped`` counts with the bytes in its gaps."""
    begin, end = parts.union(runs.source[~gapped], runs.end[~gapped])
    union = Runs.single(begin, begin, end - begin)
    if not gapped.any():
        return union
    union = Runs.joined([runs[gapped], union])
    return union[np.argsort(union.source, kind="stable")]


def bytes_between(runs: Runs, low: I64, high: I64) -> I64:
    """For each range from ``low`` to before ``high``, how many bytes of disjoint, ascending runs lie in it."""
    before, end, gapped = np.cumsum(runs.size) - runs.size, runs.end, runs.has_gaps.any()

    def below(position: I64) -> I64:
        at = np.maximum(np.searchsorted(runs.source, position, side="right") - 1, 0)
        distance = np.maximum(np.minimum(position, end[at]) - runs.source[at], 0)
        if not gapped:  # saves the divisions, which take long
            return before[at] + distance
        step, length = runs.source_step[at], runs.length[at]
        return before[at] + distance // step * length + np.minimum(distance % step, length)

    return below(high) - below(low)
