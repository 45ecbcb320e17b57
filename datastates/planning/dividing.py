"""Divides rows that several ranks of a host want of the same files: each rank reads a share for all. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from datastates._base.columns import I64, Bools
from datastates._base.packing import pack, unpack
from datastates._base.sizes import CHUNK
from datastates.planning.read import cut
from datastates.planning.wanted import has_narrow_gaps
from datastates.state.runs import Runs

_MOVED = 8
"""A border between two shares is moved to the end of a chunk if it moves by at most one part in so many of a record.

Otherwise both ranks read the chunk.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows that a rank wants of one file. Each run lies within one record.

    Attributes:
        record: Number of the record that each run lies in.
        runs: The rows in bytes; their sources are file offsets.
    """

    record: I64
    runs: Runs


Wishes = Mapping[str, Rows]
"""The rows that one rank wants, by file."""


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """The ranges of a file that one rank reads for all ranks of the host, ascending and disjoint.

    Range ``i`` has the file's bytes from ``low[i]`` to before ``high[i]``.
    """

    low: I64
    high: I64


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """The rows of a file that one rank wants and another one reads in its share. The reader sends them in one message.

    Attributes:
        which: Number of the wanted run that each part is cut from.
        parts: The parts of the runs, with the runs' dests.
        begin: Offset in the message of each part. The part's stretches lie there end to end.
    """

    which: I64
    parts: Runs
    begin: I64


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """How the ranks of a host divide the rows that several of them want.

    Attributes:
        records: By file, the numbers of the records that are divided.
        shares: For each rank, its share of each file.
    """

    records: dict[str, I64]
    shares: list[dict[str, Share]]


def encode(wishes: Wishes) -> bytes:
    """Encode the rows that a rank wants as a message to the other ranks; see :func:`decode`."""
    told = {}
    for file, rows in wishes.items():
        runs = rows.runs
        columns = rows.record, runs.source, runs.length, runs.count, runs.source_step
        told[file] = [column.tobytes() for column in columns]
    return bytes(pack(told))


def decode(message: bytes) -> dict[str, Rows]:
    """Decode a message of :func:`encode`. The dests of the runs are not sent, and are 0."""
    result = {}
    for file, columns in unpack(message).items():
        record, source, length, count, step = (np.frombuffer(column, np.int64) for column in columns)
        none = np.zeros_like(source)
        result[file] = Rows(record, Runs(source, none, length, count, step, none))
    return result


def divide(wishes: Sequence[Wishes]) -> Division:
    """Divide the records whose rows several ranks want, and let each rank read a part.

    Records that the same ranks want are laid end to end and cut into equal parts, so each rank reads few files, in
    order. A cut lies between two rows, and at the end of a chunk if that is near. A record stays undivided if that
    would read too many unwanted bytes.

    Args:
        wishes: For each rank, the rows that it wants.
    """
    files = sorted({file for one in wishes for file in one})
    if not files:
        return Division({}, [{} for _ in wishes])
    every = _Records.of(wishes, files)
    common = every[(every.wants.sum(axis=1) > 1) & every.dense]
    cuts: list[list[tuple[I64, I64, I64]]] = [[] for _ in wishes]
    groups, group = np.unique(common.wants, axis=0, return_inverse=True)
    for n, ranks in enumerate(groups):
        some = common[group.ravel() == n]
        for member, low, high in _parts(np.flatnonzero(ranks), some.size, some.step):
            kept = high > low
            cuts[member].append((some.file[kept], (some.begin + low)[kept], (some.begin + high)[kept]))
    records = {files[n]: common.record[common.file == n] for n in np.unique(common.file).tolist()}
    return Division(records, [_by_file(files, parts) for parts in cuts])


@dataclass(frozen=True, slots=True, eq=False)
class _Records:
    """The records that hold wanted rows, one column entry for each, in the order of files and offsets.

    Attributes:
        file, record: Numbers of the record's file, and of the record in it.
        wants: For each record and rank, whether the rank wants rows of the record.
        begin, size: File offset of the first wanted byte, and the number of bytes from there to the end of the last.
        step: Shares may be cut at multiples of so many bytes from ``begin`` on.
        dense: Whether few unwanted bytes are read if the record is divided; see :func:`_is_dense`.
    """

    file: I64
    record: I64
    wants: np.ndarray[Any, np.dtype[np.bool_]]
    begin: I64
    size: I64
    step: I64
    dense: Bools

    @classmethod
    def of(cls, wishes: Sequence[Wishes], files: Sequence[str]) -> _Records:
        """Collect the records of the rows that each rank wants. ``files`` has the names of all files, at least one."""
        held = [(n, rank, one[file]) for n, file in enumerate(files) for rank, one in enumerate(wishes) if file in one]
        number, rank = (np.repeat([h[i] for h in held], [len(rows.record) for *_, rows in held]) for i in (0, 1))
        runs = Runs.joined([rows.runs for *_, rows in held])
        places = np.stack((number, np.concatenate([rows.record for *_, rows in held])))
        (file, record), at = np.unique(places, axis=1, return_inverse=True)
        at, count, most = at.ravel(), len(file), np.iinfo(np.int64).max
        wants = np.zeros((count, len(wishes)), bool)
        wants[at, rank] = True
        begin, least_step = np.full((2, count), most)
        end, step = np.zeros((2, count), np.int64)
        np.minimum.at(begin, at, runs.source)
        np.maximum.at(end, at, runs.end)
        np.minimum.at(least_step, at, runs.source_step)
        np.maximum.at(step, at, runs.source_step)
        size = end - begin
        step = np.where(step == least_step, step, size)  # rows of several kinds stay together
        whole = np.lcm(step, CHUNK)  # bytes after which a row and a chunk end together
        step = np.where(whole * _MOVED <= size, whole, step)
        return cls(file, record, wants, begin, size, step, _is_dense(runs, at, size))

    def __getitem__(self, index: Bools) -> _Records:
        return _Records(*(getattr(self, f.name)[index] for f in fields(self)))


def _is_dense(runs: Runs, at: I64, size: I64) -> Bools:
    """Mark records that are read with few unwanted bytes: half is wanted, or each rank's rows have narrow gaps.

    Args:
        runs: The rows that all ranks want.
        at: Number of the record that each run lies in.
        size: For each record, the number of bytes from its first to its last wanted byte.
    """
    order = np.lexsort((runs.length, runs.source, at))
    places = np.stack((at, runs.source, runs.length))[:, order]
    first = order[np.append(True, (places[:, 1:] != places[:, :-1]).any(axis=0))]  # each run once, of several ranks'
    wanted = np.bincount(at[first], runs.size[first], len(size))
    narrow = np.bincount(at, ~has_narrow_gaps(runs), len(size)) == 0
    return np.asarray((2 * wanted >= size) | narrow)


def parcels(wishes: Wishes, share: Mapping[str, Share]) -> dict[str, Parcel]:
    """The rows that one rank wants and another one reads, by file. The files lie end to end in the reader's message.

    Args:
        wishes: The rows that the one rank wants.
        share: The other rank's share of each file.
    """
    result, sent = {}, 0
    for file in sorted(wishes.keys() & share.keys()):
        which, _, parts = cut(wishes[file].runs, share[file].low, share[file].high)
        end = sent + np.cumsum(parts.size)
        result[file] = Parcel(which, parts, end - parts.size)
        sent = int(end[-1]) if len(end) else sent
    return result


def _parts(members: I64, size: I64, step: I64) -> list[tuple[int, I64, I64]]:
    """Lay records of these sizes end to end, and cut them into equal parts at multiples of each record's ``step``.

    Returns:
        For each member, its number, and in each record the first byte of its part and one past the last.
    """
    after = np.cumsum(size)
    bounds = [int(after[-1]) * n // len(members) for n in range(len(members) + 1)]
    edges = [np.clip(bound - (after - size), 0, size) for bound in bounds]
    edges = [np.where(edge < size, edge // step * step, size) for edge in edges]
    return [(int(member), edges[n], edges[n + 1]) for n, member in enumerate(members)]


def _by_file(files: Sequence[str], cuts: Sequence[tuple[I64, I64, I64]]) -> dict[str, Share]:
    if not cuts:
        return {}
    file, low, high = (np.concatenate(column) for column in zip(*cuts, strict=True))
    order = np.lexsort((low, file))
    file, low, high = file[order], low[order], high[order]
    return {files[n]: Share(low[file == n], high[file == n]) for n in np.unique(file).tolist()}
