"""Plans as columns of numbers, which the planner, the container and the executor exchange."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from datastates._base.columns import I32, I64, U8, U32, U64


@dataclass(frozen=True, slots=True, eq=False)
class WritePlan:
    """The layout of a container file, and the pieces in which it is written.

    A source is a memory buffer of the snapshot. A record is a source in the file; sources are numbered in the caller's
    order, records in the file's order. Literal bytes are the file's bytes between the records' data. An extent is a
    contiguous range of the file that is captured and written as a unit. All offsets and lengths are in bytes.

    Attributes:
        order: For each record, the number of its source.
        source_nbytes: Length of each source.
        eager: 1 for each source that must be captured before ``snapshot()`` returns.
        header_offset: File offset of each record's local header, which ends where the record's data begins.
        data_offset: File offset of each record's data.
        end: End of the last record's descriptor, where the tail begins.
        extent_offset, extent_length: The extents, which tile the file from 0 to ``end``. Gaps between them are in
            the file already.
        extent_piece: Extent ``i`` consists of the pieces from ``extent_piece[i]`` to before ``extent_piece[i + 1]``.
        piece_source: Source of each piece, or -1 for a piece of the literal bytes.
        piece_source_offset: Offset of the piece in its source, or in the literal bytes laid end to end.
        piece_extent_offset: Offset of the piece in its extent.
        piece_length: Length of the piece.
        patch_extent, patch_offset, patch_source: Places where a source's CRC-32 is added: the extent, the offset in it,
            and the source.
        patch_after: Bytes between the end of that source and the end of what the checksum there is of.
    """

    order: I64
    source_nbytes: U64
    eager: U8
    header_offset: U64
    data_offset: U64
    end: int
    extent_offset: U64
    extent_length: U64
    extent_piece: U64
    piece_source: I32
    piece_source_offset: U64
    piece_extent_offset: U64
    piece_length: U64
    patch_extent: U64
    patch_offset: U64
    patch_source: I32
    patch_after: U64


@dataclass(frozen=True, slots=True, eq=False)
class DigestRuns:
    """Stretches of sources that contribute to the digests of logical tensors, sorted by source, then by offset.

    A stretch consists of runs of equal length. The runs are contiguous in the source, and equally spaced in the logical
    tensor. Each run contributes its raw CRC-32, shifted by the number of bytes that follow it in the tensor. A digest
    is the exclusive or of its contributions. All lengths and offsets are in bytes.

    Attributes:
        digests: Number of digests.
        source: Source of each stretch.
        offset, length: Offset of the stretch in its source, and its length.
        run_length: Length of each of its runs.
        after: Bytes of the logical tensor that follow the first run.
        step: Distance in the logical tensor from the beginning of one run to the beginning of the next.
        digest: Number of the digest that the stretch contributes to.
    """

    digests: int
    source: I32
    offset: U64
    length: U64
    run_length: U64
    after: U64
    step: U64
    digest: U32


_NONE = np.zeros(0, np.uint64)
NO_RUNS = DigestRuns(0, np.zeros(0, np.int32), _NONE, _NONE, _NONE, _NONE, _NONE, np.zeros(0, np.uint32))
"""No digests other than the records' own checksums."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """The checksummed chunks of a file's records, in file order; lengths and offsets in bytes.

    Attributes:
        record: Number of the record that each chunk belongs to.
        offset: File offset of each chunk.
        length: Length of each chunk.
        crc: CRC-32 of each chunk.
        checked: Whether the checksums are known. A file without an index of chunk checksums has none.
    """

    record: I32
    offset: U64
    length: U64
    crc: U32
    checked: bool = True


_PARTS = ("span", "piece", "check")
"""The columns of a :class:`ReadPlan` that have several entries for each extent."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """Which ranges of a container to read, and where their bytes go; offsets and lengths in bytes.

    An extent is a range of the file that is handled as a unit. Its spans are read; its pieces are copied to
    destinations; its checks are chunks that are verified. A span or a piece may have several stretches of equal length,
    equally spaced: the rows of a part of a matrix.

    Attributes:
        extent_offset, extent_length: The extents in the file, ascending.
        extent_shared: 1 for each extent whose unwanted bytes are probably wanted by other ranks of the host. It is read
            through the page cache.
        extent_span: Extent ``i`` has the spans from ``extent_span[i]`` to before ``extent_span[i + 1]``.
        span_offset, span_length: Each span's first stretch, within its extent. Bytes between stretches are not read.
        span_count, span_step: Number of the span's stretches, and the distance of their begins.
        extent_piece: Extent ``i`` has the pieces from ``extent_piece[i]`` to before ``extent_piece[i + 1]``.
        piece_dest: Destination of each piece.
        piece_dest_offset: Offset of the piece in its destination.
        piece_extent_offset: Offset of the piece in its extent.
        piece_length: Length of each of the piece's stretches. The two offsets belong to the first stretch.
        piece_count: Number of the piece's stretches.
        piece_extent_step, piece_dest_step: Distance from the begin of one stretch to the begin of the next, in the
            extent and in the destination.
        extent_check: Extent ``i`` has the checks from ``extent_check[i]`` to before ``extent_check[i + 1]``.
        check_offset, check_length: Each checked chunk, within a span of its extent.
        check_crc: CRC-32 of the chunk.
        check_record: Record of the chunk, which the error names if the CRC-32 differs.
        extent_needed: Number of wanted bytes of each extent, each counted once.
        extent_between: Number of unwanted bytes of each extent that are read because they lie in narrow gaps.
        extent_unverified: Number of wanted bytes that no check covers.
        dest_nbytes: Length of each destination.
        unverified_dest: The destinations that get some bytes that no check covers, ascending.
    """

    extent_offset: U64
    extent_length: U64
    extent_shared: U8
    extent_span: U64
    span_offset: U64
    span_length: U64
    span_count: U64
    span_step: U64
    extent_piece: U64
    piece_dest: I32
    piece_dest_offset: U64
    piece_extent_offset: U64
    piece_length: U64
    piece_count: U64
    piece_extent_step: U64
    piece_dest_step: U64
    extent_check: U64
    check_offset: U64
    check_length: U64
    check_crc: U32
    check_record: I32
    extent_needed: U64
    extent_between: U64
    extent_unverified: U64
    dest_nbytes: U64
    unverified_dest: I32

    @property
    def needed_nbytes(self) -> int:
        """Number of wanted bytes of the file, each counted once."""
        return int(self.extent_needed.sum())

    @property
    def shared_nbytes(self) -> int:
        """Number of unwanted bytes of the file that are read because they lie in narrow gaps."""
        return int(self.extent_between.sum())

    @property
    def unverified_nbytes(self) -> int:
        """Number of wanted bytes that no check covers."""
        return int(self.extent_unverified.sum())

    def part(self, first: int, last: int) -> ReadPlan:
        """A plan of the extents from ``first`` to before ``last`` alone, with all destinations."""
        columns: dict[str, Any] = {}
        for field in fields(self):
            of, _, what = field.name.partition("_")
            column = getattr(self, field.name)
            if of == "extent" and what in _PARTS:
                columns[field.name] = column[first : last + 1] - column[first]
            elif of == "extent":
                columns[field.name] = column[first:last]
            elif of in _PARTS:
                index = getattr(self, f"extent_{of}")
                columns[field.name] = column[int(index[first]) : int(index[last])]
        return replace(self, **columns)


def fields_of(plan: Any, *, but: Collection[str]) -> dict[str, Any]:
    """The fields of a plan by name, as keyword arguments for the native core, without the fields named in ``but``."""
    return {field.name: getattr(plan, field.name) for field in fields(plan) if field.name not in but}
