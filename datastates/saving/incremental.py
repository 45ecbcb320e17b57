"""A snapshot that captures and writes only what differs from the newest committed checkpoint.

The state is hashed where it lies. Then the file is made of the ranges of the base that have not changed, which the
file system shares, and a job captures and writes the rest into it.
"""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from datastates._base.columns import U8, Bools
from datastates._base.waiting import Flag
from datastates.container.index import Hashes
from datastates.container.partial_records import as_hashes, hashes_of, same_places
from datastates.errors import DatastatesError
from datastates.executor.executor import Columns
from datastates.executor.jobs import NOTHING, HashJob, Recorded, recorded
from datastates.planning import write
from datastates.saving.bases import Base, Bases
from datastates.saving.container_frame import ContainerFrame
from datastates.saving.frame import Checksums
from datastates.saving.partial_container import PartialContainer
from datastates.saving.running import Running
from datastates.saving.snapshot import attach
from datastates.saving.stale import Stepped
from datastates.saving.structure import Structure
from datastates.storage import Folders, store_of
from datastates.storage.location import Location

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
    _hashing: HashJob | None = None
    _hashes: U8 | None = None
    _submitted: Flag = field(default_factory=Flag)
    _part: PartialContainer | None = None
    _stepped: list[Stepped] = field(default_factory=list)
    _why_in_full: str = ""

    def begin(self) -> None:
        """Begin to hash the state. State that is not lazy has been copied then."""
        structure = self.collected.structure
        self._columns, self._copies = _with_copies(structure, self.collected.places.columns)
        if self.bases.watch is not None:
            self._stepped = self.bases.watch.stepped()
        self._hashing = self.executor.submit_hash(self._columns, self.planned.frame.plan.source_nbytes)
        attach(self.snapshot, self.gate, self._figures, self._recorded)

    def open(self) -> None:
        """Make the file of what has not changed, and begin to capture the rest."""
        frame = self.planned.frame
        assert self._hashing is not None
        assert isinstance(frame, ContainerFrame)
        try:
            self._hashing.wait()
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
            structure, pointers = self.collected.structure, self._columns[0]
            self.bases.watch.compare(self.snapshot.step, frame, structure, pointers, self._hashes, self._stepped)

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
                self.bases.refuse(self._why_in_full)
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
        structure, places = self.collected.structure, self.collected.places
        assert self._columns is not None
        columns, witness = self._columns, structure.witness
        prepared = self.planned.prepared
        if self._part is not None:
            source, prepared = self._part.source, self._part.prepared
            pointers, devices, streams = columns
            offset = self._part.partial.offset.astype(np.uint64)
            columns = pointers[source] + offset, devices[source], streams[source]
            witness = witness[source]
        replicas = None
        if structure.replicas is not None and places.replicas is not None:
            replicas = structure.replicas.ranges, places.replicas
        self._job = self.executor.submit_write(self.ending.path, prepared, columns, witness, replicas)

    def _pass(self) -> None:
        self._submitted.wait()
        if self._job is not None:
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
        torn = super()._torn()
        return torn if self._part is None else {int(self._part.source[i]) for i in torn}

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
            copy = np.frombuffer(ctypes.string_at(int(pointers[i]), buffer.nbytes), np.uint8)
            pointers[i] = copy.ctypes.data
            copies.append(copy)
    return (pointers, devices, streams), copies


def is_possible(structure: Structure) -> bool:
    """Whether a state can be saved so: none of it is in a device's memory and must be copied in the call."""
    return not any(eager and device >= 0 for eager, device in zip(structure.eager, structure.columns[1], strict=True))


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
