"""A snapshot that captures and writes only what differs from what the run has committed or restored last.

The state is hashed where it lies. Then the file is made of the ranges of the base that have not changed, which the
file system shares, and a job captures and writes the rest into it. Where it shares no ranges, the arrays that have not
changed are in a file of their own, which is linked.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from datastates._base.columns import I64, U64, Bools
from datastates._base.waiting import Flag
from datastates.commit.ballot import Ballot
from datastates.commit.claims import is_complete
from datastates.commit.votes import Vote
from datastates.container.index import Hashes
from datastates.container.partial_records import as_hashes, hashes_of, same_places
from datastates.errors import DatastatesError, StorageError, said
from datastates.executor.executor import Columns
from datastates.executor.jobs import HashJob, Recorded, WriteJob, joined
from datastates.planning import write
from datastates.planning.kept import choose_kept
from datastates.saving.bases import Base, Bases, Newest
from datastates.saving.container_frame import ContainerFrame
from datastates.saving.frame import Checksums
from datastates.saving.halves import Half, presumed
from datastates.saving.hashed import Hashed
from datastates.saving.kept_container import KeptContainer
from datastates.saving.partial_container import PartialContainer
from datastates.saving.running import Running, SavePlan
from datastates.saving.snapshot import attach
from datastates.saving.stale import Saved, Stepped
from datastates.saving.structure import Structure
from datastates.storage import Folders, store_of
from datastates.storage.location import Location

_SMALL = 16 << 20
"""Bytes of a state in host memory whose hashes the call waits for."""
_OWN_STREAM = 2
"""The stream of each thread by itself, CU_STREAM_PER_THREAD of CUDA's driver: nothing is on it."""
_FULL_EVERY = "full_every"
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
    _hashed: Hashed | None = None
    _watched: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    _fingerprints: U64 = field(default_factory=lambda: np.zeros(0, np.uint64))
    _rewritten: set[int] = field(default_factory=set)
    _submitted: Flag = field(default_factory=Flag)
    _part: PartialContainer | None = None
    _rest: Half | None = None
    _kept: KeptContainer | None = None
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
        """Begin to capture what is not shared, into a file that has the rest, or beside it."""
        frame = self.planned.frame
        assert self._hashing is not None
        assert isinstance(frame, ContainerFrame)
        try:
            self._hashing.wait()
            self._rewritten = {*self._hashing.lost, *self._watched[self._taken() != self._fingerprints].tolist()}
            self._hashed = Hashed(self.collected.structure, frame, self._hashing.hashes)
            self._hashing = None
            self._watch(self._hashed)
            self.ending.open(0)  # what is shared takes no room
            self._is_open = True
            self._share(self._hashed)
            assert isinstance(self.ending, Ballot)
            self.ending.needs(self._written_nbytes)
            self._begin_to_capture()
        except BaseException:
            self._stop()
            raise
        finally:
            self._submitted.set()

    def _watch(self, hashed: Hashed) -> None:
        """Compare the state with that of the snapshot before."""
        if self.bases.watch is not None and self._columns is not None:
            save = Saved(hashed.frame, hashed.structure, self._columns[0], hashed.in_file)
            self.bases.watch.compare(self.snapshot.step, save, self._ticket, self._stepped)

    def _share(self, hashed: Hashed) -> None:
        """Find out what need not be written, and share it: ranges of a file, or a whole one."""
        newest, self._why_in_full = self.bases.next(self.ending.path)
        if self.bases.refused:
            return
        if self.bases.links:
            self._divide(hashed, newest)
        elif newest is not None:
            self._part = self._shared(hashed, newest.own)

    def _shared(self, hashed: Hashed, base: Base) -> PartialContainer | None:
        """The part to write, over a file that has the rest; None to write all."""
        if self.bases.is_full:
            self._why_in_full = _FULL_EVERY
            return None
        if not same_places(hashed.frame.records, base.index.records):
            self._why_in_full = f"arrays lie elsewhere than in step {base.step}"
            return None
        known = hashes_of(base.index)
        assert known is not None
        changed: Bools = (known != hashed.in_file).any(axis=1)
        if changed.all():
            self._why_in_full = "all has changed"
            return None
        part = PartialContainer.of(hashed.frame, base, changed, self.executor.block)
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

    def _divide(self, hashed: Hashed, newest: Newest | None) -> None:
        """Plan two containers, of which one need not be written if it can be linked; or none, for a single one."""
        assert isinstance(self.ending, Ballot)
        nbytes = hashed.frame.plan.source_nbytes
        if newest is None:
            frozen = presumed(hashed.structure, self.collected.sources)
            kept = choose_kept(nbytes, frozen, np.zeros_like(frozen))
        else:
            kept = choose_kept(nbytes, *hashed.compared(newest))
        if not kept.any():
            self._why_in_full = self._why_in_full or "all has changed, or nearly all"
            return
        rest, half = self.bases.halves.divide(hashed.structure, hashed.frame, kept, self.executor.block)
        if self.ending.world.size == 1 and not is_complete([rest.frame.claims, half.frame.claims]):
            self._why_in_full = "this rank saves parts of tensors alone"  # a catalog tells of whole ones
            return
        self._rest, self.planned = rest, SavePlan(None, (), rest.frame, rest.prepared)
        hashes = half.hashes(hashed.of_buffer)
        self._kept = KeptContainer(half, self.ending, hashes)
        if newest is None or newest.kept is None or not half.is_in(newest.kept.index, hashes):
            self._why_in_full = self._why_in_full or "other arrays are unchanged than before"
        elif self.bases.is_full:
            self._why_in_full = _FULL_EVERY
        else:
            try:
                if not self._kept.link(newest.kept):
                    self._why_in_full = f"the storage at {self.ending.path.parent.parent} does not link files"
                    self.bases.failed(self._why_in_full)
            except StorageError as error:  # the next one may be linked
                self._why_in_full = _GONE.format(newest.own.step)
                if newest.kept.is_there():
                    self._why_in_full = said(error)
                    if error.errno == errno.EXDEV:  # some file systems link within a folder only
                        self.bases.failed(self._why_in_full)

    def _begin_to_capture(self) -> None:
        if self._rest is not None:
            assert self._kept is not None
            if not self._kept.is_linked:
                self._kept.begin(self.executor, self._ready())
            prepared, columns = self._rest.prepared, self._rest.columns(self._ready())
        elif self._part is not None:
            prepared, (columns, _, _) = self._part.prepared, self._captured()
        else:
            prepared, columns = self.planned.prepared, self._ready()
        unwatched = np.zeros(len(columns[0]), np.uint8)  # they are hashed again
        self._job = self.executor.submit_write(self.ending.path, prepared, columns, unwatched)

    def _ready(self) -> Columns:
        """The memory of all buffers. Its hashes are known: no stream that the training has used need be waited for."""
        assert self._columns is not None
        pointers, devices, streams = self._columns
        return pointers, devices, np.where(devices < 0, streams, np.uint64(_OWN_STREAM))

    def _captured(self) -> tuple[Columns, U64, I64]:
        """The memory that is captured: its places and lengths, and the numbers of its chunks in the state."""
        pointers, devices, streams = self._ready()
        if self._part is not None:
            source, plan = self._part.source, self._part.partial
            begin = pointers[source] + plan.offset.astype(np.uint64)
            chunks = write.chunk_order(self._part.frame.plan)[plan.written]
            return (begin, devices[source], streams[source]), plan.plan.source_nbytes, chunks
        assert self._hashed is not None
        nbytes = self._hashed.frame.plan.source_nbytes
        captured = np.ones(len(nbytes), bool)
        if self._kept is not None and self._kept.is_linked:
            assert self._rest is not None
            captured[:] = False
            captured[self._rest.source[self._rest.source >= 0]] = True
        chunks = np.flatnonzero(captured[self._hashed.of_chunk])
        return (pointers[captured], devices[captured], streams[captured]), nbytes[captured], chunks

    def _look_again(self) -> None:
        """Hash once more what was captured, before it may change: it must be what was hashed in the call.

        Of two threads that look, the first result counts.
        """
        if "torn" in self._found or self._job is None:
            return
        assert self._hashed is not None
        self._wait_read()
        columns, nbytes, chunks = self._captured()
        again = self.executor.submit_hash(columns, nbytes)
        again.wait()
        differ = chunks[(again.hashes != self._hashed.chunks[chunks]).any(axis=1)]
        self._found.setdefault("torn", set(self._hashed.of_chunk[differ].tolist()))

    def _wait_read(self) -> None:
        """Wait until the memory has been read."""
        self.job.wait_captured()
        if self._kept is not None:
            self._kept.wait_captured()

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
        if self._kept is not None and self._rest is not None:
            torn = {int(self._rest.source[i]) for i in torn} | self._kept.torn()
        return torn | self._rewritten | self._found["torn"]

    def _replica_digests(self) -> tuple[U64, list[int]]:
        assert self._digesting is not None
        self._digesting.wait_captured()
        return self._digesting.replica_digests()

    def _checksums(self) -> tuple[Checksums, Hashes | None]:
        hashed, frame = self._hashed, self.planned.frame
        assert hashed is not None
        assert isinstance(frame, ContainerFrame)
        in_file = hashed.in_file if self._rest is None else self._rest.hashes(hashed.of_buffer)
        return self.job if self._part is None else self._part.with_rest(self.job), as_hashes(in_file, len(frame.table))

    def _write(self) -> tuple[bytes, Vote]:
        tail, vote = super()._write()
        if self._kept is None:
            return tail, vote
        return tail, replace(vote, files=(*vote.files, self._kept.finish(self.ending.identity)))

    def _stop(self) -> None:
        super()._stop()
        if self._kept is not None:
            self._kept.abort()

    @property
    def _written_nbytes(self) -> int:
        nbytes = super()._written_nbytes + (0 if self._kept is None else self._kept.written_nbytes)
        return nbytes if self._part is None else nbytes - self._part.shared_nbytes

    def _note(self, path: Location) -> None:
        """Make the files the base of the next snapshot: before anybody is told, who may take that at once."""
        tail, kept = self._tail, self._kept
        assert tail is not None
        assert tail.index is not None
        own = Base(
            path / self.ending.path.name, self.planned.frame.plan.end + len(tail.data), tail.index, tail.index_crc32
        )
        newest = Newest(own, None if kept is None else kept.base(path))
        self.bases.committed(newest, shares=self._part is not None or (kept is not None and kept.is_linked))

    def _let_go(self) -> None:
        if self._digesting is not None:
            self._digesting.abort()
        super()._let_go()
        self._tail, self._copies = None, []

    def _figures(self) -> dict[str, Any]:
        shared = 0 if self._part is None else self._part.shared_nbytes
        figures = super()._figures()
        if self._kept is not None:
            shared = self._kept.nbytes if self._kept.is_linked else 0
            written = self._kept.figures()
            figures |= {"bytes": figures.get("bytes", 0) + written["bytes"]} if written else {}
        return figures | {"shared": shared, "in_full": self._why_in_full}

    def _recorded(self) -> Recorded:
        own = super()._recorded()
        return own if self._kept is None else joined(own, self._kept.recorded())


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
