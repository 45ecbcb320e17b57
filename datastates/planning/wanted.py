"""What a restore wants of a file, in columns. Pure functions."""

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
    """The wanted ranges of a file, ascending.

    Attributes:
        runs: The ranges. Those with gaps share no byte of the file with others. Others lie in the gaps only within a
            comb; see :func:`_in_combs`.
        first, last: The numbers of the first chunk that each intersects, and of the one behind the last.
        chunk_begin, chunk_end: File offsets of each chunk.
        union: What all ranges want together, each byte once.
        fetched: The same with the bytes in narrow gaps.
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
        """Take :func:`simplified` ranges of a file that has these chunks."""
        chunk_begin = chunks.offset.astype(np.int64)
        chunk_end = chunk_begin + chunks.length.astype(np.int64)
        first = np.searchsorted(chunk_end, runs.source, side="right")
        last = np.searchsorted(chunk_begin, runs.end, side="left")
        apart = _joined(runs)
        gapped = apart.has_gaps
        wide = gapped & ~has_narrow_gaps(apart)
        union = _union(apart, gapped)
        fetched = union if wide.sum() == gapped.sum() else _union(apart, wide)
        return cls(runs, first, last, chunk_begin, chunk_end, union, fetched)

    @property
    def needed_nbytes(self) -> int:
        """Bytes that are wanted."""
        return int(self.union.size.sum())

    @property
    def shared_nbytes(self) -> int:
        """Bytes in narrow gaps."""
        return int(self.fetched.size.sum()) - self.needed_nbytes

    def coverage(self, weight: I64 | int = 1) -> I64:
        """For each chunk, the sum of the weights of the ranges that intersect it."""
        marks = np.zeros(len(self.chunk_begin) + 1, np.int64)
        np.add.at(marks, self.first, weight)
        np.add.at(marks, self.last, -weight)
        return np.cumsum(marks[:-1])


def has_narrow_gaps(runs: Runs) -> Bools:
    """Marks runs whose gaps are shorter than a page, or no longer than the stretches beside them."""
    return runs.has_gaps & (runs.source_step - runs.length <= np.maximum(PAGE - 1, runs.length))


def simplified(dest: I32, wanted: Runs) -> tuple[I32, Runs]:
    """The ranges that are not empty, ascending, and their destinations.

    A range with gaps becomes many unless it is a comb, or part of one.
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
    """Marks those of ascending runs that make combs: each stretch begins where one of the run before ends, or is it.

    Such are the columns of one matrix that go to several destinations. A comb's stretches are short, and so is what
    lies between its rows. A run that no other reaches into is a comb of one.
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
    """Simplified ranges, and each comb as one of them."""
    gapped = runs.has_gaps
    joins = gapped[1:] & gapped[:-1] & (runs.source[1:] < runs.end[:-1])
    if not joins.any():
        return runs
    firsts = np.flatnonzero(np.append(True, ~joins))
    return replace(runs[firsts], length=np.add.reduceat(np.where(_again(runs), 0, runs.length), firsts))


def _again(runs: Runs) -> Bools:
    """Marks runs with gaps that begin where the one before begins, and have stretches of the same length."""
    same = (runs.source[1:] == runs.source[:-1]) & (runs.length[1:] == runs.length[:-1])
    return np.append(False, same & runs.has_gaps[1:])[: len(runs)]


def _union(runs: Runs, gapped: Bools) -> Runs:
    """What ascending runs have together, each byte once; those that are not ``gapped`` have the bytes in their gaps."""
    begin, end = parts.union(runs.source[~gapped], runs.end[~gapped])
    union = Runs.single(begin, begin, end - begin)
    if not gapped.any():
        return union
    union = Runs.joined([runs[gapped], union])
    return union[np.argsort(union.source, kind="stable")]


def bytes_between(runs: Runs, low: I64, high: I64) -> I64:
    """Number of bytes that disjoint, ascending runs have in each range from ``low`` to before ``high``."""
    before, end, gapped = np.cumsum(runs.size) - runs.size, runs.end, runs.has_gaps.any()

    def below(position: I64) -> I64:
        at = np.maximum(np.searchsorted(runs.source, position, side="right") - 1, 0)
        distance = np.maximum(np.minimum(position, end[at]) - runs.source[at], 0)
        if not gapped:  # divisions take long
            return before[at] + distance
        step, length = runs.source_step[at], runs.length[at]
        return before[at] + distance // step * length + np.minimum(distance % step, length)

    return below(high) - below(low)
