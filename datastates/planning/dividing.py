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
"""A share is cut where a chunk ends if that moves its border by at most this part of a record. Else two ranks read that
chunk."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows that a rank wants of one file. Each run lies within one record.

    Attributes:
        record: The number of each run's record.
        runs: The rows; their sources are file offsets.
    """

    record: I64
    runs: Runs


Wishes = Mapping[str, Rows]
"""What one rank wants, by file."""


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What one rank reads of a file for all: ranges from ``low`` to before ``high``, ascending and disjoint."""

    low: I64
    high: I64


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """What a rank wants of another one's share of a file.

    Attributes:
        which: The number of the run that each part is from.
        parts: The parts of the runs, with the runs' dests.
        begin: Offset of each part in what is sent. There its stretches lie end to end.
    """

    which: I64
    parts: Runs
    begin: I64


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """How ranks divide what they want.

    Attributes:
        records: By file, the records of which several ranks want rows. No others are divided.
        shares: Each rank's shares, by file.
    """

    records: dict[str, I64]
    shares: list[dict[str, Share]]


def encode(wishes: Wishes) -> bytes:
    """The wishes as a message."""
    told = {}
    for file, rows in wishes.items():
        runs = rows.runs
        columns = rows.record, runs.source, runs.length, runs.count, runs.source_step
        told[file] = [column.tobytes() for column in columns]
    return bytes(pack(told))


def decode(message: bytes) -> dict[str, Rows]:
    """The wishes of a message; their runs have no dests."""
    result = {}
    for file, columns in unpack(message).items():
        record, source, length, count, step = (np.frombuffer(column, np.int64) for column in columns)
        none = np.zeros_like(source)
        result[file] = Rows(record, Runs(source, none, length, count, step, none))
    return result


def divide(wishes: Sequence[Wishes]) -> Division:
    """Divide the records of which several ranks want most rows, given what each rank wants.

    Records that the same ranks want are laid end to end and cut into equal parts, between rows, and where a chunk ends
    if that is near. So each rank reads few files, in order.
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
    """The records of which ranks want rows, one column entry for each, in the order of files and offsets.

    Attributes:
        file, record: The numbers of the file and of the record.
        wants: For each rank, whether it wants rows of the record.
        begin, size: File offset of the first wanted byte, and the distance from there to the end of the last one.
        step: Shares may be cut at multiples of this from ``begin`` on.
        dense: Whether little is read in vain if the record is divided.
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
        """Take what each rank wants, of at least one file."""
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
        whole = np.lcm(step, CHUNK)  # bytes, in rows, after which a chunk ends with a row
        step = np.where(whole * _MOVED <= size, whole, step)
        return cls(file, record, wants, begin, size, step, _is_dense(runs, at, size))

    def __getitem__(self, index: Bools) -> _Records:
        return _Records(*(getattr(self, f.name)[index] for f in fields(self)))


def _is_dense(runs: Runs, at: I64, size: I64) -> Bools:
    """Marks records of which little is read in vain: half is wanted, or all gaps are narrow for a rank by itself.

    ``at`` is the number of each run's record, and ``size`` the distance of the first from the last wanted byte of each.
    """
    order = np.lexsort((runs.length, runs.source, at))
    places = np.stack((at, runs.source, runs.length))[:, order]
    first = order[np.append(True, (places[:, 1:] != places[:, :-1]).any(axis=0))]  # without those that ranks want alike
    wanted = np.bincount(at[first], runs.size[first], len(size))
    narrow = np.bincount(at, ~has_narrow_gaps(runs), len(size)) == 0
    return np.asarray((2 * wanted >= size) | narrow)


def parcels(wishes: Wishes, share: Mapping[str, Share]) -> dict[str, Parcel]:
    """The rows that one rank gets from another rank's share, by file. The files lie end to end in the message."""
    result, sent = {}, 0
    for file in sorted(wishes.keys() & share.keys()):
        which, _, parts = cut(wishes[file].runs, share[file].low, share[file].high)
        end = sent + np.cumsum(parts.size)
        result[file] = Parcel(which, parts, end - parts.size)
        sent = int(end[-1]) if len(end) else sent
    return result


def _parts(members: I64, size: I64, step: I64) -> list[tuple[int, I64, I64]]:
    """The parts of records of these sizes, laid end to end, that each member gets: from where to where in each."""
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
