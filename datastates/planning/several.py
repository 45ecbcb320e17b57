"""Plans the reading of several files at once, which takes hardly longer than planning one. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, starmap

import numpy as np

from datastates._base.columns import I32, U8, U64
from datastates.planning.plans import Chunks, ReadPlan, fields_of
from datastates.planning.read import plan_read
from datastates.planning.wanted import GAP
from datastates.state.runs import Runs


@dataclass(frozen=True, slots=True, eq=False)
class FileRanges:
    """The wanted ranges of one file. Other fields are arguments of :func:`~datastates.planning.read.plan_read`.

    Attributes:
        nbytes: Length of the file in bytes.
    """

    nbytes: int
    wanted: Runs
    dest: I32
    dest_nbytes: U64
    in_place: U8
    whole: U8
    chunks: Chunks


def plan_several(files: Sequence[FileRanges], extent_nbytes: int, spare_nbytes: int = 0) -> list[ReadPlan]:
    """Plan each file as :func:`~datastates.planning.read.plan_read` does, with one budget of unwanted bytes for all.

    The files are laid one behind the other, planned as one, and cut apart again. All must have checksums, or none.

    Args:
        files: The wanted ranges of each file.
        extent_nbytes: Longest extent in bytes.
        spare_nbytes: Unwanted bytes that may be read in any case, of all files together.
    """
    if not files:
        return []
    if len(files) == 1:
        columns = fields_of(files[0], but=("nbytes",))
        return [plan_read(**columns, extent_nbytes=extent_nbytes, spare_nbytes=spare_nbytes)]
    begin = _begins([file.nbytes + GAP + 1 for file in files])  # no extent reaches over a gap of this length
    first_dest = _begins([len(file.dest_nbytes) for file in files])
    first_record = _begins([int(file.chunks.record.max(initial=-1)) + 1 for file in files])
    placed = list(zip(files, begin, first_dest, first_record, strict=False))  # the last entries are ends, without files
    chunks = Chunks(
        np.concatenate([f.chunks.record + np.int32(record) for f, _, _, record in placed]),
        np.concatenate([f.chunks.offset + np.uint64(at) for f, at, _, _ in placed]),
        np.concatenate([f.chunks.length for f in files]),
        np.concatenate([f.chunks.crc for f in files]),
        files[0].chunks.checked,
    )
    every = plan_read(
        wanted=Runs.joined([replace(f.wanted, source=f.wanted.source + at) for f, at, _, _ in placed]),
        dest=np.concatenate([f.dest + np.int32(dest) for f, _, dest, _ in placed]),
        dest_nbytes=np.concatenate([f.dest_nbytes for f in files]),
        in_place=np.concatenate([f.in_place for f in files]),
        whole=np.concatenate([f.whole for f in files]),
        chunks=chunks,
        extent_nbytes=extent_nbytes,
        spare_nbytes=spare_nbytes,
    )
    extents = np.searchsorted(every.extent_offset, np.array(begin, np.uint64)).tolist()
    loose = np.searchsorted(every.unverified_dest, np.array(first_dest)).tolist()
    parts = starmap(every.part, pairwise(extents))
    return [
        replace(
            part,
            extent_offset=part.extent_offset - np.uint64(at),
            piece_dest=part.piece_dest - np.int32(dest),
            check_record=part.check_record - np.int32(record),
            dest_nbytes=f.dest_nbytes,
            unverified_dest=part.unverified_dest[low:high] - np.int32(dest),
        )
        for (f, at, dest, record), part, (low, high) in zip(placed, parts, pairwise(loose), strict=True)
    ]


def _begins(lengths: Sequence[int]) -> list[int]:
    """The begins of items that lie end to end, and the end of the last: ``_begins([3, 2]) == [0, 3, 5]``."""
    return [0, *np.cumsum(lengths, dtype=np.int64).tolist()]
