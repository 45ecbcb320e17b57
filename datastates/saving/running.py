"""A snapshot in flight: capture, write and commit."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from datastates._base.columns import U64
from datastates._base.waiting import Flag
from datastates.commit.ending import Ending
from datastates.commit.replicas import ReplicaDigests
from datastates.commit.votes import File, Vote
from datastates.container.index import Hashes
from datastates.container.pickle_writer import is_dialect
from datastates.errors import DatastatesError, DeviceError, ProviderError, TornSnapshotError
from datastates.executor.executor import Executor, PreparedWrite
from datastates.executor.jobs import NOTHING, Recorded, WriteJob, recorded
from datastates.saving.collect import Collected
from datastates.saving.frame import Checksums, Frame, Tail
from datastates.saving.snapshot import Snapshot, attach, detach, fail, reach, stage
from datastates.saving.structure import Structure
from datastates.state import devices, jax_arrays
from datastates.state import versions as array_versions
from datastates.state.provider import Encoder
from datastates.state.shards import Shard, Shards, full_key
from datastates.storage.location import Location


@dataclass(frozen=True, slots=True, eq=False)
class SavePlan:
    """The plan of a file, which depends on the structure of the state alone. The next snapshot may use it again.

    Attributes:
        structure: The structure; None if its shards keep live arrays.
        key: The structure's :meth:`~datastates.saving.structure.Structure.plan_key`.
        frame: Plans and encodes the bytes of the file besides the arrays.
        prepared: The plan in the form that the executor takes.
    """

    structure: Structure | None
    key: tuple[Any, ...]
    frame: Frame
    prepared: PreparedWrite


def _serialize(collected: Collected, provider: int, shard: Shard) -> bytes | Encoder:
    result = collected.providers[provider].serialize(shard)
    if not (callable(result) or (isinstance(result, bytes) and is_dialect(result))):
        key = full_key(collected.structure.names[provider], shard.key)
        raise ProviderError(
            f"{key!r}: serialize() must return what datastates.dumps(value) gives, not other bytes or objects"
        )
    return result


class ArrayWitness:
    """Finds arrays that changed since ``snapshot()``, without reading their data. Thread-safe.

    Of a tensor it compares torch's version counter and the address. Of a JAX array it checks whether it was donated.
    Each array is checked once, before the gate allows updates: later changes do not count.
    """

    def __init__(self, collected: Collected) -> None:
        self._structure = collected.structure
        counted = self._structure.counted
        every = len(counted) == len(collected.sources)
        self._tensors = list(collected.sources) if every else [collected.sources[i] for i in counted.tolist()]
        known = [s.versions for s in collected.described if isinstance(s, Shards)]
        if len(known) == len(collected.described):
            self._before = np.concatenate(known)[counted] if known else counted
        else:
            self._before, _ = array_versions.witness(self._tensors)
        self._donatable = [(i, collected.sources[i]) for i in self._structure.donatable]
        # no lock, as the gate may be interrupted: of two threads that check at once, the first result counts
        self._found: dict[str, list[str]] = {}

    def compare(self) -> list[str]:
        """Keys of the tensors that changed before the first call of this method."""
        tensors = self._tensors  # taken before the test below, as another thread drops them after setting "changed"
        if "changed" not in self._found:
            versions, addresses = array_versions.witness(tensors)
            changed = (versions != self._before) | (addresses != self._structure.addresses)
            keys = [self._structure.key(i) for i in self._structure.counted[changed].tolist()]
            self._found.setdefault("changed", keys)
            self._tensors = []
        return self._found["changed"]

    def lost(self) -> list[str]:
        """Keys of arrays that were donated to a computation, or deleted, before the first call of this method.

        Their memory may have been written before it was copied. Call this once the copies are done: an array that is
        still there then was there during the copy.
        """
        donatable = self._donatable
        if "lost" not in self._found:
            keys = [self._structure.key(i) for i, array in donatable if jax_arrays.is_gone(array)]
            self._found.setdefault("lost", keys)
            self._donatable = []
        return self._found["lost"]

    def forget(self) -> None:
        """Drop the arrays of a failed snapshot. Afterwards no keys are returned."""
        for what in ("changed", "lost"):
            self._found.setdefault(what, [])
        self._tensors, self._donatable = [], []


@dataclass(slots=True, eq=False)
class Running:
    """One snapshot in the background: serializes lazy objects, waits for the data, appends the metadata, commits.

    Before :meth:`begin`, no file or job of the snapshot exists. Afterwards, call :meth:`run` or :meth:`cancel`. If
    :meth:`begin` or :meth:`open` was interrupted, call :meth:`cancel`.
    """

    executor: Executor
    collected: Collected
    snapshot: Snapshot
    planned: SavePlan
    objects: list[tuple[int, Shard, bytes | Encoder | None]]
    witness: ArrayWitness
    ending: Ending
    lazy_serialized: Flag = field(default_factory=Flag)
    cause: Exception | None = None  # the error that occurred at the gate
    replicas: ReplicaDigests | None = None
    _job: WriteJob | None = None
    _is_open: bool = False
    _tail: Tail | None = None

    def begin(self) -> None:
        """Begin to capture the state, by the job that writes the file. State that is not lazy has been copied then.

        The storage is used only if more is to be copied than fits into one block: the blocks then become free again as
        they are written.
        """
        plan = self.planned.prepared
        if plan.eager_extents > 1:
            self.ending.open(self.planned.frame.plan.end)
            self._is_open = True
        path = self.ending.path if self._is_open else None
        structure, places = self.collected.structure, self.collected.places
        replicas = None
        if structure.replicas is not None and places.replicas is not None:
            replicas = structure.replicas.ranges, places.replicas
        self._job = job = self.executor.submit_write(path, plan, places.columns, structure.witness, replicas)
        attach(self.snapshot, self.gate, job.stats, partial(recorded, job))

    def open(self) -> None:
        """Make the directory for the file, if :meth:`begin` has not done so, and let the job create the file."""
        if not self._is_open:
            self.ending.open(self.planned.frame.plan.end)
            self._is_open = True
            self.executor.create(self.job, self.ending.path, self.planned.prepared)

    @property
    def job(self) -> WriteJob:
        """The job that writes the file. Call :meth:`begin` before."""
        assert self._job is not None
        return self._job

    def gate(self) -> None:
        """Wait until the CPU no longer reads live state, and let the consumers' GPU streams wait for the copies.

        An error here makes the snapshot fail, once nothing reads the state any more. It is not raised to the update of
        the state that waits here.
        """
        try:
            self._pass()
        except Exception as error:
            self.cause = error  # before the job is stopped: run() notices the stop
            self._stop()
            fail(self.snapshot, error)

    def _pass(self) -> None:
        self.lazy_serialized.wait()
        self.witness.compare()
        try:
            self.job.gate(devices.consumer_streams(self.collected.structure.devices))
            if self.collected.structure.donatable:
                self.job.wait_captured()  # JAX alone knows the streams of its computations: they cannot be made to wait
                self.witness.lost()
        except DeviceError:
            # the device has failed: the snapshot reports it, not the optimizer that waits here
            with contextlib.suppress(DatastatesError):
                self.job.wait_captured()

    def run(self) -> BaseException | None:
        """Finish the snapshot. An error makes it fail, and is returned, for the other ranks to be told."""
        try:
            self._serialize_lazy()
            self.open()
            self._wait_captured()
            tail, vote = self._write()
            self.job.finish(tail)
            reach(self.snapshot, "persisted", file_nbytes=sum(file.nbytes for file in vote.files))
            with stage(self.snapshot, "commit"):
                path = self.ending.commit(vote)
            self._note(path)
            reach(self.snapshot, "committed", at=self.ending.committed, path=path)
        except BaseException as error:  # the snapshot passes it to whoever waits
            cause = self.cause or error
            try:
                self._discard()
            finally:
                cause = self.ending.cause_of(cause, self._written_nbytes)
                fail(self.snapshot, cause)
            return cause
        self._let_go()
        return None

    def _note(self, path: Location) -> None:
        """Note where the file is, once it is committed."""

    def cancel(self, error: BaseException) -> None:
        """Stop at once, remove the written file, and let the snapshot fail with ``error``."""
        try:
            self._discard()
        finally:
            fail(self.snapshot, error)

    def _discard(self) -> None:
        self.lazy_serialized.set()
        self._stop()
        self.ending.abandon(made=self._job is not None and self._job.made)
        self.witness.forget()
        self._let_go()

    def _stop(self) -> None:
        """Stop the work of the native core: no memory is read any more."""
        if self._job is not None:
            self._job.abort()

    @property
    def _written_nbytes(self) -> int:
        """About how many bytes are written."""
        return self.planned.frame.plan.end

    def _serialize_lazy(self) -> None:
        try:
            with stage(self.snapshot, "serialize"):
                self.objects = [
                    (p, s, _serialize(self.collected, p, s) if data is None else data) for p, s, data in self.objects
                ]
        finally:
            self.lazy_serialized.set()

    def _wait_captured(self) -> None:
        self.job.wait_captured()
        changed = set(self.witness.compare())
        if torn := self._torn():
            structure = self.collected.structure
            for i, source in enumerate(structure.source):
                # an eager array may change after its copy: it does not count, even if a lazy array shares its buffer;
                # a buffer without a fingerprint is torn only if its memory was unmapped
                if source in torn and (structure.arrays[i][1].lazy or not structure.witness[source]):
                    changed.add(structure.key(i))
        changed.update(self.witness.lost())
        if (replicas := self.collected.structure.replicas) is not None:
            digests, unmapped = self._replica_digests()
            changed.update(self.collected.structure.key(int(replicas.row[i])) for i in unmapped)
            self.replicas = replicas.digests(digests)
        if changed:
            raise TornSnapshotError(sorted(changed))
        self.collected.release()  # a reference would keep JAX's next computation from taking over a donated array
        reach(self.snapshot, "captured")

    def _torn(self) -> set[int]:
        """The sources whose memory changed before it was captured."""
        return set(self.job.torn())

    def _replica_digests(self) -> tuple[U64, list[int]]:
        """The digests of the replicas, and the numbers of those whose memory was unmapped."""
        return self.job.replica_digests()

    def _checksums(self) -> tuple[Checksums, Hashes | None]:
        """The checksums of the file's arrays, and the hashes of its chunks if there are any."""
        return self.job, None

    def _write(self) -> tuple[bytes, Vote]:
        """Encode the metadata while the data is being written; returns the file's tail, and this rank's vote."""
        frame = self.planned.frame
        with stage(self.snapshot, "serialize"):
            encode_tail = frame.encode_objects(self.objects)
        self._release()
        self.job.wait_checksummed()
        with stage(self.snapshot, "encode"):
            sums, hashes = self._checksums()
            self._tail = tail = encode_tail(sums, self.ending.identity, hashes)
        file = File(self.ending.path.name, frame.plan.end + len(tail.data), tail.index_crc32, tail.claims)
        return tail.data, Vote(step=self.snapshot.step, files=(file,), replicas=self.replicas)

    def _let_go(self) -> None:
        self._release()
        detach(self.snapshot, self._figures(), self._recorded())

    def _recorded(self) -> Recorded:
        return NOTHING if self._job is None else recorded(self._job)

    def _figures(self) -> dict[str, Any]:
        return self._job.stats() if self._job else {}

    def _release(self) -> None:
        self.collected.release()
        self.objects = []
