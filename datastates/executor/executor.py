"""The door to the native core: plans and pointers go in, bytes move, errors come out as :mod:`datastates.errors`.

Apart from the checksum in :mod:`datastates.container.archive`, nothing else imports the native module.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from datastates import _native
from datastates._base import faults
from datastates._base.columns import I32, U8, U64
from datastates._base.sizes import CHUNK, PAGE
from datastates.errors import ClosedError, CorruptError, DatastatesError, DeviceError, FormatError, StorageError
from datastates.executor.timeline import Span
from datastates.planning.plans import NO_RUNS, DigestRuns, ReadPlan, WritePlan
from datastates.state.shards import Buffer

_T = TypeVar("_T")
PreparedWrite = _native.WritePlan
ReadAhead = _native.ReadAhead
_AHEAD = 8
"""Extents that are read ahead at most, for each read that is in flight at a time."""
_TRACKS = {
    "submit": "training thread",
    "create": "worker {}",
    "cache_wait": "waiting for the cache",
    "checksum": "worker {}",
    "write": "write slot {}",
    "tail": "engine thread",
    "sync": "engine thread",
}
"""Names of the native core's tracks, by stage; those of capture are in :func:`_track`."""
_WORKERS = 1 << 16
"""The first of capture's tracks that is a worker's: ``kWorkerTracks`` of the native core."""
Columns: TypeAlias = "tuple[U64, I32, U64]"
"""Addresses, device numbers and stream handles of buffers."""


def _track(stage: str, number: int) -> str:
    if stage != "capture":
        return _TRACKS[stage].format(number)
    if number >= _WORKERS:
        return f"worker {number - _WORKERS}"
    return ("capture thread", "training thread")[number] if number < 2 else f"copies from GPU {number - 2}"


def prepare_write(plan: WritePlan, literal: bytes | memoryview, runs: DigestRuns = NO_RUNS) -> PreparedWrite:
    """Hand a plan to the native core, to be used for any number of snapshots.

    Args:
        plan: What goes where.
        literal: The bytes between the records' data, end to end.
        runs: What to digest of the sources while they are checksummed.
    """
    return _native.WritePlan(
        source_nbytes=plan.source_nbytes,
        eager=plan.eager,
        chunk_bytes=CHUNK,
        literal=literal,
        extent_offset=plan.extent_offset,
        extent_length=plan.extent_length,
        extent_piece=plan.extent_piece,
        piece_source=plan.piece_source,
        piece_source_offset=plan.piece_source_offset,
        piece_extent_offset=plan.piece_extent_offset,
        piece_length=plan.piece_length,
        patch_extent=plan.patch_extent,
        patch_offset=plan.patch_offset,
        patch_source=plan.patch_source,
        digests=runs.digests,
        runs_source=runs.source,
        runs_offset=runs.offset,
        runs_length=runs.length,
        runs_run_length=runs.run_length,
        runs_after=runs.after,
        runs_step=runs.step,
        runs_digest=runs.digest,
    )


def _prepare_read(plan: ReadPlan) -> _native.ReadPlan:
    return _native.ReadPlan(
        dest_nbytes=plan.dest_nbytes,
        extent_offset=plan.extent_offset,
        extent_length=plan.extent_length,
        extent_span=plan.extent_span,
        span_offset=plan.span_offset,
        span_length=plan.span_length,
        extent_piece=plan.extent_piece,
        piece_dest=plan.piece_dest,
        piece_dest_offset=plan.piece_dest_offset,
        piece_extent_offset=plan.piece_extent_offset,
        piece_length=plan.piece_length,
        extent_check=plan.extent_check,
        check_offset=plan.check_offset,
        check_length=plan.check_length,
        check_crc=plan.check_crc,
        check_record=plan.check_record,
    )


def _translate(error: _native.NativeError, name_record: Callable[[int], str] | None = None) -> DatastatesError:
    message = str(error.args[0]) if error.args else str(error)
    match error.code:
        case "cuda":
            return DeviceError(message)
        case "corrupt" if error.record >= 0 and name_record is not None:
            key = name_record(error.record)
            return CorruptError(f"{key!r} in {error.path} does not match its checksum", key=key, path=error.path)
        case "corrupt":
            return FormatError(message)
        case "closed" | "cancelled":
            return ClosedError(message)
        case "invalid":
            return DatastatesError(message)
    return StorageError(error.errno, error.op, error.path, message)


def _native_call(call: Callable[[], _T], name_record: Callable[[int], str] | None = None) -> _T:
    try:
        return call()
    except _native.NativeError as error:
        raise _translate(error, name_record) from None


class WriteJob:
    """One container being captured and written. Thread-safe."""

    def __init__(self, job: _native.WriteJob) -> None:
        self._job = job

    @property
    def made(self) -> bool:
        """Whether it has made its file: not one that was there before."""
        return self._job.made

    def wait_made(self) -> None:
        """Wait until its file exists. Raises what failed."""
        _native_call(self._job.wait_made)

    @property
    def captured(self) -> bool:
        """Whether all sources have been copied off their memory."""
        return self._job.captured

    def wait_captured(self, timeout: float | None = None) -> bool:
        """Wait until all sources are copied; False when ``timeout`` seconds pass first. Raises what failed."""
        return _native_call(lambda: self._job.wait_captured(timeout))

    def wait_checksummed(self, timeout: float | None = None) -> bool:
        """Wait until all checksums and digests are known, which is before the last extents are written.

        False when ``timeout`` seconds pass first. Raises what failed.
        """
        return _native_call(lambda: self._job.wait_checksummed(timeout))

    def gate(self, streams: Sequence[tuple[int, int]]) -> None:
        """Return once the sources may change for work enqueued on ``streams``, given as (device, stream handle).

        Never raises for a failed job: nothing more is read then.
        """
        _native_call(lambda: self._job.gate(streams))

    def torn(self) -> list[int]:
        """Sources whose captured bytes are not those of the time of ``submit_write``; call it after capture."""
        return self._job.torn()

    def checksums(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """CRC-32 of each source, and of each chunk of each source end to end; call it once checksummed."""
        sources, chunks = self._job.checksums()
        return np.frombuffer(sources, "<u4"), np.frombuffer(chunks, "<u4")

    def digests(self) -> np.ndarray[Any, Any]:
        """The digests that the plan's runs contribute to; call it once checksummed."""
        return np.frombuffer(self._job.digests(), "<u4")

    def finish(self, tail: bytes) -> None:
        """Append the tail, sync the file to stable storage, and close it."""
        _native_call(lambda: self._job.finish(tail))

    def abort(self) -> None:
        """Stop at once; returns when no memory of the caller's is touched any more. Idempotent."""
        self._job.abort()

    def stats(self) -> dict[str, Any]:
        """Bytes and seconds of each stage, the backend and whether I/O was direct."""
        return self._job.stats()

    def timeline(self) -> list[Span]:
        """What was done when, so far."""
        return [
            Span(stage, _track(stage, number), begin, end, nbytes)
            for stage, number, begin, end, nbytes in self._job.timeline()
        ]


class ReadJob:
    """One container being read into place. Thread-safe."""

    def __init__(self, job: _native.ReadJob, plan: ReadPlan, name_record: Callable[[int], str]) -> None:
        self._job = job
        self._plan = plan
        self._name_record = name_record

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until everything is read, and verified as planned; False when ``timeout`` seconds pass first.

        Raises:
            CorruptError: Bytes do not match their checksum; some destinations have been overwritten by then.
            StorageError: Reading failed.
        """
        return _native_call(lambda: self._job.wait(timeout), self._name_record)

    def stats(self) -> dict[str, Any]:
        """Bytes needed, read and unverified, bytes and seconds of each stage, the backend and whether I/O was direct.

        A wanted byte of the file is needed once, however many destinations it goes to. Read are the bytes that the
        system was asked for: past the page cache with the whole pages around them; through it without those, and
        without what else the kernel takes in, which other readers find there.
        """
        wanted = {"bytes_needed": self._plan.needed_nbytes, "bytes_unverified": int(self._plan.unverified_length.sum())}
        return self._job.stats() | wanted


class Executor:
    """The native executor with its host cache; after a fork the child gets a fresh one at first use. Thread-safe."""

    def __init__(
        self,
        *,
        host_cache: int,
        block: int,
        queue_depth: int,
        io_backend: str,
        direct_io: bool,
        io_threads: int,
        device_cache: int,
    ) -> None:
        self._options: dict[str, Any] = {
            "cache_bytes": host_cache // block * block,
            "block_bytes": block,
            "queue_depth": queue_depth,
            "backend": io_backend,
            "direct": direct_io,
            "io_threads": io_threads,
            "device_cache_bytes": device_cache,
        }
        self.block = block
        self._closed = False
        self._native: _native.Executor | None = _native_call(lambda: _native.Executor(**self._options))
        _live.add(self)

    def _core(self) -> _native.Executor:
        if self._closed:
            raise ClosedError("the executor is closed")
        if self._native is None:
            self._native = _native_call(lambda: _native.Executor(**self._options))
        return self._native

    def _forget(self) -> None:
        # the parent's threads and ring do not exist in the child, and what ends them must not run there
        if self._native is not None:
            self._native.abandon()
            self._native = None

    def prepare(self, device: int, nbytes: int) -> None:
        """Page-lock so many bytes of the host cache for a CUDA device, in the background, before they are needed.

        Raises:
            DeviceError: There is no such device.
        """
        core = self._core()
        _native_call(lambda: core.prepare_device(device))
        _native_call(lambda: core.reserve(nbytes))

    def submit_write(self, path: Path, prepared: PreparedWrite, sources: Columns, witness: U8) -> WriteJob:
        """Start capturing; eager sources are captured when this returns. Where it raises, it leaves no file.

        Args:
            path: The container to create, in the background; it must not exist. Where that fails, so does the job.
            prepared: The plan.
            sources: The memory of the plan's sources.
            witness: For each source, 1 to take fingerprints.
        """
        core = self._core()
        return WriteJob(_native_call(lambda: core.submit_write(os.fsencode(path), prepared, *sources, witness)))

    def submit_read(
        self,
        path: Path,
        plan: ReadPlan,
        dests: Columns,
        name_record: Callable[[int], str],
        ahead: ReadAhead | None = None,
    ) -> ReadJob:
        """Start reading a container's ranges into ``dests``, the memory of the plan's destinations.

        ``name_record`` names a storage record for the error when its bytes are wrong. What ``ahead`` has read of the
        same file is not read again, as far as the extents are the same.
        """
        core, prepared = self._core(), _prepare_read(plan)
        job = _native_call(lambda: core.submit_read(os.fsencode(path), prepared, *dests, ahead))
        return ReadJob(job, plan, name_record)

    def read_ahead(self, path: Path, plan: ReadPlan) -> ReadAhead:
        """Begin to read a file's extents before it is known where they go; the plan has no destinations.

        They stay in the host cache until a job takes them, or until it is closed, which it must be. What the page cache
        has is left out, what fails is found when it is read again, and nothing is read while another one is open.
        """
        core, prepared = self._core(), _prepare_read(plan)
        return _native_call(lambda: core.read_ahead(os.fsencode(path), prepared))

    @property
    def most_ahead(self) -> int:
        """How many extents are worth reading ahead: half of the host cache is left to others."""
        blocks: int = self._options["cache_bytes"] // self.block
        return min(_AHEAD * int(self._options["queue_depth"]), blocks // 2)

    def extent_nbytes(self, path: Path) -> int:
        """How long an extent of a file should be at most: a block has room for the pages around it.

        Of a file in memory half of that: what all workers have at hand then stays in the processor's caches.
        """
        in_memory = _native_call(lambda: _native.in_memory(os.fsencode(path)))
        return (self.block // 2 if in_memory else self.block) - 2 * PAGE

    def close(self) -> None:
        """Wait for running jobs and give the host cache back. Idempotent."""
        self._closed = True
        if self._native is not None:
            self._native.close()
            self._native = None


def columns(buffers: Sequence[Buffer]) -> Columns:
    """Where buffers are, as the native core wants it: addresses, device numbers, stream handles."""
    return (
        np.array([b.pointer for b in buffers], np.uint64),
        np.array([b.device for b in buffers], np.int32),
        np.array([b.stream for b in buffers], np.uint64),
    )


_live: weakref.WeakSet[Executor] = weakref.WeakSet()


def _after_fork() -> None:
    for executor in list(_live):
        executor._forget()


os.register_at_fork(after_in_child=_after_fork)

for _fault in faults.parse(os.environ.get("DATASTATES_FAULTS", "")):
    if "." not in _fault.point:
        _native.arm_fault(_fault.point, _fault.action, _fault.value, _fault.nth, 1)
