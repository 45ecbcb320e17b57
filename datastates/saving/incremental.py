"""A snapshot that captures and writes only what differs from what the run has committed or restored last.

The state is hashed where it lies. Then the file is made of the ranges of the base that have not changed, which the
file system shares, and a job captures and writes the rest into it.
"""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from datastates._base.columns import I64, U8, U64, Bools
from datastates._base.waiting import Flag
from datastates.container.index import Hashes
from datastates.container.partial_records import as_hashes, chunk_records, hashes_of, same_places
from datastates.errors import DatastatesError
from datastates.executor.executor import Columns
from datastates.executor.jobs import NOTHING, HashJob, Recorded, WriteJob, recorded
from datastates.planning import write
from datastates.saving.bases import Base, Bases
from datastates.saving.container_frame import ContainerFrame
from datastates.saving.frame import Checksums
from datastates.saving.partial_container import PartialContainer
from datastates.saving.running import Running
from datastates.saving.snapshot import attach
from datastates.saving.stale import Saved, Stepped
from datastates.saving.structure import Structure
from datastates.storage import Folders, store_of
from datastates.storage.location import Location

_SMALL = 16 << 20
"""Bytes of a state in host memory whose hashes the call waits for."""
_OWN_STREAM = 2
"""The stream of each thread by itself, CU_STREAM_PER_THREAD of CUDA's driver: nothing is on it."""
_GONE = "the file of step {} is gone, or another one"


@dataclass(eq=False)
class IncrementalRunning(Running):
    """One snapshot in the background, as :class:`~datastates.saving.running.Running`.

    The gate waits until the hashes are known and the unchanged ranges are shared: only then is it known what to
    capture. Eager arrays are copied in the call.
    """

    bases: Bases = field(kw_only=True)
    _columns: Columns | None = None
    _copies: list[np.ndarray[Any, Any]] = field(default_factory=list)
    _digesting: WriteJob | None = None
    _hashing: HashJob | None = None
    _hashes: U8 | None = None
    _watched: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    _fingerprints: U64 = field(default_factory=lambda: np.zeros(0, np.uint64))
    _rewritten: set[int] = field(default_factory=set)
    _submitted: Flag = field(default_factory=Flag)
    _part: PartialContainer | None = None
    _stepped: list[Stepped] = field(default_factory=list)
    _ticket: int = 0
    _found: dict[str, set[int]] = field(default_factory=dict)
    _why_in_full: str = ""

    def begin(self) -> None:
        """Begin to hash the state. State that is not lazy has been copied then."""
        structure = self.collected.structure
        self._columns, self._copies = _with_copies(structure, self.collected.places.columns)
        if self.bases.watch is not None:
            self._ticket, self._stepped = self.bases.watch.stepped()
        replicas, addresses = structure.replicas, self.collected.places.replicas
        if replicas is not None and addresses is not None:
            self._digesting = self.executor.submit_digests((replicas.ranges, addresses))
        self._hashing = self.executor.submit_hash(self._columns, self.planned.frame.plan.source_nbytes)
        self._look_first()
        attach(self.snapshot, self.gate, self._figures, self._recorded)

    def _look_first(self) -> None:
        """Let nobody change host memory unseen before its hashes are taken.

        Of a small state the call waits for the hashes; of a larger one it takes fingerprints, which are compared once
        the hashes are known.
        """
        assert self._hashing is not None
        assert self._columns is not None
        nbytes = self.planned.frame.plan.source_nbytes
        on_host = self._columns[1] < 0
        if on_host.all() and int(nbytes.sum()) <= _SMALL:
            self._hashing.wait()
        else:
            self._watched = np.flatnonzero(on_host & (nbytes > 0))
            self._fingerprints = self._taken()

    def _taken(self) -> U64:
        assert self._columns is not None
        watched, nbytes = self._watched, self.planned.frame.plan.source_nbytes
        return self.executor.fingerprints(self._columns[0][watched], nbytes[watched])

    def open(self) -> None:
        """Make the file of what has not changed, and begin to capture the rest."""
        frame = self.planned.frame
        assert self._hashing is not None
        assert isinstance(frame, ContainerFrame)
        try:
            self._hashing.wait()
            self._rewritten = {*self._hashing.lost, *self._watched[self._taken() != self._fingerprints].tolist()}
            self._hashes = self._hashing.hashes[write.chunk_order(frame.plan)]
            self._hashing = None
            self._watch(frame)
            self.ending.open(frame.plan.end)
            self._is_open = True
            self._part = self._shared(frame)
            self._begin_to_capture()
        finally:
            self._submitted.set()

    def _watch(self, frame: ContainerFrame) -> None:
        """Compare the state with that of the snapshot before."""
        if self.bases.watch is not None and self._columns is not None and self._hashes is not None:
            save = Saved(frame, self.collected.structure, self._columns[0], self._hashes)
            self.bases.watch.compare(self.snapshot.step, save, self._ticket, self._stepped)

    def _shared(self, frame: ContainerFrame) -> PartialContainer | None:
        """The part to write, over a file that has the rest; None to write all."""
        base, self._why_in_full = self.bases.next()
        if base is None:
            return None
        if not same_places(frame.records, base.index.records):
            self._why_in_full = f"arrays lie elsewhere than in step {base.step}"
            return None
        changed = self._changed(base)
        if changed.all():
            self._why_in_full = "all has changed"
            return None
        part = PartialContainer.of(frame, base, changed, self.executor.block)
        if part.partial.written.all():
            self._why_in_full = "all has changed, or shares pages with what has"
        elif not base.is_there():
            self._why_in_full = _GONE.format(base.step)
        elif not _share(part, self.ending.path):
            self._why_in_full = f"the storage at {self.ending.path.parent.parent} does not share ranges of files"
            if base.is_there():
                self.bases.failed(self._why_in_full)
        elif base.is_there():
            return part
        else:
            store_of(self.ending.path).discard([self.ending.path])
            self._why_in_full = _GONE.format(base.step)
        return None

    def _changed(self, base: Base) -> Bools:
        known = hashes_of(base.index)
        assert known is not None
        assert self._hashes is not None
        changed: Bools = (known != self._hashes).any(axis=1)
        return changed

    def _begin_to_capture(self) -> None:
        prepared = self.planned.prepared if self._part is None else self._part.prepared
        columns, nbytes = self._written()
        unwatched = np.zeros(len(nbytes), np.uint8)  # they are hashed again
        self._job = self.executor.submit_write(self.ending.path, prepared, columns, unwatched)

    def _written(self) -> tuple[Columns, U64]:
        """The memory that is captured: its place, and its lengths.

        It is ready, as its hashes are known: no stream that the training has used since need be waited for.
        """
        assert self._columns is not None
        pointers, devices, streams = self._columns
        streams = np.where(devices < 0, streams, np.uint64(_OWN_STREAM))
        if self._part is None:
            return (pointers, devices, streams), self.planned.frame.plan.source_nbytes
        source, plan = self._part.source, self._part.partial
        begin = pointers[source] + plan.offset.astype(np.uint64)
        return (begin, devices[source], streams[source]), plan.plan.source_nbytes

    def _look_again(self) -> None:
        """Hash once more what was captured, before it may change: it must be what was hashed in the call.

        Of two threads that look, the first result counts.
        """
        if "torn" in self._found or self._job is None:
            return
        assert self._hashes is not None
        self._job.wait_captured()
        columns, nbytes = self._written()
        again = self.executor.submit_hash(columns, nbytes)
        again.wait()
        frame = self.planned.frame
        assert isinstance(frame, ContainerFrame)
        if self._part is None:
            written, order = np.arange(len(self._hashes)), write.chunk_order(frame.plan)
        else:
            written, order = np.flatnonzero(self._part.partial.written), np.arange(len(again.hashes))
        differ = written[(again.hashes[order] != self._hashes[written]).any(axis=1)]
        record = chunk_records(frame.records)[differ]
        self._found.setdefault("torn", {int(i) for i in frame.plan.order[record]})

    def _pass(self) -> None:
        self._submitted.wait()
        if self._digesting is not None:
            self._digesting.wait_captured()
        if self._job is not None:
            self._look_again()
            super()._pass()

    def _discard(self) -> None:
        hashing, self._hashing = self._hashing, None
        if hashing is not None:
            with contextlib.suppress(DatastatesError):  # the snapshot has failed already
                hashing.wait()
        self._submitted.set()
        if self._part is not None and self._job is None:  # the file was made for a job
            store_of(self.ending.path).discard([self.ending.path])
        super()._discard()

    def _torn(self) -> set[int]:
        self._look_again()
        torn = super()._torn()
        if self._part is not None:
            torn = {int(self._part.source[i]) for i in torn}
        return torn | self._rewritten | self._found["torn"]

    def _replica_digests(self) -> tuple[U64, list[int]]:
        assert self._digesting is not None
        self._digesting.wait_captured()
        return self._digesting.replica_digests()

    def _checksums(self) -> tuple[Checksums, Hashes | None]:
        assert self._hashes is not None
        frame = self.planned.frame
        assert isinstance(frame, ContainerFrame)
        hashes = as_hashes(self._hashes, len(frame.table))
        return self.job if self._part is None else self._part.with_rest(self.job), hashes

    def _note(self, path: Location) -> None:
        """Make the file the base of the next snapshot: before anybody is told, who may take that at once."""
        tail = self._tail
        assert tail is not None
        assert tail.index is not None
        base = Base(
            path / self.ending.path.name, self.planned.frame.plan.end + len(tail.data), tail.index, tail.index_crc32
        )
        self.bases.committed(base, shares=self._part is not None)

    def _let_go(self) -> None:
        if self._digesting is not None:
            self._digesting.abort()
        super()._let_go()
        self._tail, self._copies = None, []

    def _figures(self) -> dict[str, Any]:
        shared = 0 if self._part is None else self._part.shared_nbytes
        return super()._figures() | {"shared": shared, "in_full": self._why_in_full}

    def _recorded(self) -> Recorded:
        return NOTHING if self._job is None else recorded(self._job)


def _with_copies(structure: Structure, columns: Columns) -> tuple[Columns, list[np.ndarray[Any, Any]]]:
    """The memory of the buffers, with copies in the place of those that may change once the call has returned."""
    pointers, devices, streams = columns
    pointers, copies = pointers.copy(), []
    for i, (eager, buffer) in enumerate(zip(structure.eager, structure.buffers, strict=True)):
        if eager and buffer.nbytes:
            copy = np.empty(buffer.nbytes, np.uint8)
            ctypes.memmove(copy.ctypes.data, int(pointers[i]), buffer.nbytes)
            pointers[i] = copy.ctypes.data
            copies.append(copy)
    return (pointers, devices, streams), copies


def is_possible(structure: Structure, most: int) -> bool:
    """Whether a state can be saved so: what must be copied in the call is in host memory, and no more than ``most``."""
    eager = [i for i, one in enumerate(structure.eager) if one]
    nbytes = sum(structure.buffers[i].nbytes for i in eager)
    is_here = all(structure.columns[1][i] < 0 for i in eager)
    return is_here and nbytes <= most


def _share(part: PartialContainer, path: Location) -> bool:
    """Make a file of the ranges that lie in the base; False where that cannot be, and then there is no file."""
    store = store_of(path)
    if not isinstance(store, Folders):
        return False
    with contextlib.closing(store.writer(path)) as writer:
        for offset, nbytes in zip(*(column.tolist() for column in part.partial.shared), strict=True):
            if not writer.share(part.base.path, offset, nbytes, offset):
                return False
        writer.leave()
    return True
