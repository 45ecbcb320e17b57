"""Plans as columns of numbers: what planner, container and executor hand each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from datastates._base.columns import I32, I64, U8, U32, U64


@dataclass(frozen=True, slots=True, eq=False)
class WritePlan:
    """Where every byte of a container's records goes, and in which pieces it gets there.

    Sources are the memory buffers of the snapshot, in the caller's order; records are the same in the file's order. All
    offsets and lengths are in bytes.

    Attributes:
        order: For each record of the file, the source it holds.
        source_nbytes: Length of each source.
        eager: 1 for each source that must be captured before ``snapshot()`` returns.
        header_offset: For each record, where its local header begins; the header ends where the data begins.
        data_offset: For each record, where its data begins.
        end: One past the last descriptor: where the tail begins.
        extent_offset, extent_length: The extents: contiguous ranges of the file from 0 to ``end``.
        extent_piece: Extent ``i`` is made of the pieces from ``extent_piece[i]`` to ``extent_piece[i + 1]``.
        piece_source: A piece's source, or -1: a piece of the literal bytes between the records' data.
        piece_source_offset: Where in the source, or in the literal, the piece begins.
        piece_extent_offset: Where in its extent the piece begins.
        piece_length: Its length.
        patch_extent, patch_offset, patch_source: Where, in which extent, the CRC-32 of which source is filled in.
        literal_offset, literal_length: Where each stretch of literal bytes is in the file; they are kept end to end.
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
    literal_offset: U64
    literal_length: U64


@dataclass(frozen=True, slots=True, eq=False)
class DigestRuns:
    """Stretches of sources that are parts of logical tensors, for the tensors' digests; by source, then by offset.

    A stretch is made of runs of one length: end to end in the source, and equally far apart in the logical tensor. A
    run contributes its raw CRC-32, shifted by the bytes that follow it in the tensor; digests are exclusive ors of
    contributions. All lengths and offsets are in bytes.

    Attributes:
        digests: How many digests there are.
        source: The source that a stretch lies in.
        offset, length: Where in it, and how long.
        run_length: Length of each of its runs.
        after: Bytes of the logical tensor that follow the first run.
        step: Bytes of the logical tensor from one run's begin to the next one's.
        digest: The digest it contributes to.
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
"""Nothing to digest beside the records themselves."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """The chunks of a file's records that are checksummed each, in file order; lengths and offsets in bytes.

    Attributes:
        record: Which record a chunk belongs to.
        offset: Where in the file it begins.
        length: Its length.
        crc: Its CRC-32.
        checked: Whether the checksums are known; of files of others they are not.
    """

    record: I32
    offset: U64
    length: U64
    crc: U32
    checked: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """Which ranges of a container to read, and where their bytes go; offsets and lengths in bytes.

    Attributes:
        extent_offset, extent_length: Ranges of the file that are handled at once, ascending.
        extent_span: Of extent ``i`` the spans from ``extent_span[i]`` to ``extent_span[i + 1]`` are read.
        span_offset, span_length: A span, within its extent. An extent of one span is read as a whole; of others what
            is between the spans is left out.
        extent_piece: Extent ``i`` serves the pieces from ``extent_piece[i]`` to ``extent_piece[i + 1]``.
        piece_dest: A piece's destination.
        piece_dest_offset: Where in the destination the piece goes.
        piece_extent_offset: Where in the extent it begins.
        piece_length: Its length.
        extent_check: Extent ``i`` is verified by the checks from ``extent_check[i]`` to ``extent_check[i + 1]``.
        check_offset, check_length: A checked chunk, within a span of its extent.
        check_crc: Its CRC-32.
        check_record: The record it belongs to, to name it when it is wrong.
        dest_nbytes: Length of each destination.
        needed_nbytes: Bytes of the file that are wanted, each counted once.
        unverified_offset, unverified_length: Stretches of the file that are wanted and read, and under no check;
            disjoint and ascending.
    """

    extent_offset: U64
    extent_length: U64
    extent_span: U64
    span_offset: U64
    span_length: U64
    extent_piece: U64
    piece_dest: I32
    piece_dest_offset: U64
    piece_extent_offset: U64
    piece_length: U64
    extent_check: U64
    check_offset: U64
    check_length: U64
    check_crc: U32
    check_record: I32
    dest_nbytes: U64
    needed_nbytes: int
    unverified_offset: U64
    unverified_length: U64
