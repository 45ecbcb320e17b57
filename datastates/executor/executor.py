"""The interface to the native core, which carries out plans; its errors become those of :mod:`datastates.errors`."""

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
"""Most extents that are read ahead, for each read that may be in flight."""
_TRACKS = {
    "submit": "training thread",
    "create": "worker {}",
    "cache_wait": "waiting for the cache",
    "checksum": "worker {}",
    "write": "write slot {}",
    "tail": "engine thread",
    "sync": "engine thread",
}
"""Names of the native core's tracks by stage, except for capture; see :func:`_track`."""
_WORKERS = 1 << 16
"""Number of the first capture track of a worker; ``kWorkerTracks`` in the native core."""
Columns: TypeAlias = "tuple[U64, I32, U64]"
"""Addresses, device numbers and stream handles of buffers."""


def _track(stage: str, number: int) -> str:
    if stage != "capture":
        return _TRACKS[stage].format(number)
    if number >= _WORKERS:
        return f"worker {number - _WORKERS}"
    return ("capture thread", "training thread")[number] if number < 2 else f"copies from GPU {number - 2}"


def prepare_write(plan: WritePlan, literal: bytes | memoryview, runs: DigestRuns = NO_RUNS) -> PreparedWrite:
    """Hand a plan to the native core, for any number of snapshots.

    Args:
        plan: The plan.
        literal: The bytes between the records' data, end to end.
        runs: The stretches of sources to digest.

    Raises:
        NativeError: The plan contradicts itself.
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
    """One container that is being captured and written. Thread-safe."""

    def __init__(self, job: _native.WriteJob) -> None:
        self._job = job

    @property
    def made(self) -> bool:
        """Whether the job has created its file. False if the file existed before, which fails the job."""
        return self._job.made

    def wait_made(self) -> None:
        """Wait until the job has created its file. Raises the error of a failed job."""
        _native_call(self._job.wait_made)

    @property
    def captured(self) -> bool:
        """Whether all sources have been copied."""
        return self._job.captured

    def wait_captured(self, timeout: float | None = None) -> bool:
        """Wait until all sources are copied; False after ``timeout`` seconds. Raises the error of a failed job."""
        return _native_call(lambda: self._job.wait_captured(timeout))

    def wait_checksummed(self, timeout: float | None = None) -> bool:
        """Wait until all checksums and digests are known, which is before the last extents are written.

        Returns False after ``timeout`` seconds. Raises the error of a failed job.
        """
        return _native_call(lambda: self._job.wait_checksummed(timeout))

    def gate(self, streams: Sequence[tuple[int, int]]) -> None:
        """Return when the sources may be changed by the CPU and by work enqueued on ``streams``.

        A failed job reads nothing more, and raises no error here.

        Args:
            streams: Pairs of device number and stream handle.
        """
        _native_call(lambda: self._job.gate(streams))

    def torn(self) -> list[int]:
        """Numbers of the sources that changed between ``submit_write`` and their capture. Call it after capture."""
        return self._job.torn()

    def checksums(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """CRC-32 of each source, and CRC-32 of each chunk of all sources end to end. Call it once checksummed."""
        sources, chunks = self._job.checksums()
        return np.frombuffer(sources, "<u4"), np.frombuffer(chunks, "<u4")

    def digests(self) -> np.ndarray[Any, Any]:
        """The digests that the plan's runs contribute to. Call it once checksummed."""
        return np.frombuffer(self._job.digests(), "<u4")

    def finish(self, tail: bytes) -> None:
        """Wait until the extents are written, append the tail, sync the file, and close it. Raises the job's error."""
        _native_call(lambda: self._job.finish(tail))

    def abort(self) -> None:
        """Stop at once; returns when the job no longer accesses the caller's memory. Idempotent."""
        self._job.abort()

    def stats(self) -> dict[str, Any]:
        """Bytes and seconds of each stage, the backend and whether I/O was direct."""
        return self._job.stats()

    def timeline(self) -> list[Span]:
        """The spans of work so far."""
        return [
            Span(stage, _track(stage, number), begin, end, nbytes)
            for stage, number, begin, end, nbytes in self._job.timeline()
        ]


class ReadJob:
    """One container that is being read into its destinations. Thread-safe."""

    def __init__(self, job: _native.ReadJob, plan: ReadPlan, name_record: Callable[[int], str]) -> None:
        self._job = job
        self._plan = plan
        self._name_record = name_record

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until everything is read and verified as planned; False after ``timeout`` seconds.

        Destinations may be partly overwritten when it raises.

        Raises:
            CorruptError: Bytes do not match their checksum.
            FormatError: The file ends too early.
            StorageError: Reading failed.
            DeviceError: A copy to a device failed.
        """
        return _native_call(lambda: self._job.wait(timeout), self._name_record)

    def stats(self) -> dict[str, Any]:
        """Bytes needed, read and unverified, bytes and seconds of each stage, the backend and whether I/O was direct.

        ``bytes_needed`` counts each wanted byte of the file once, however many destinations it goes to. ``bytes_read``
        counts the bytes that system calls asked for. With direct I/O these include the whole pages around wanted bytes.
        Through the page cache they do not include what the kernel reads ahead.
        """
        wanted = {"bytes_needed": self._plan.needed_nbytes, "bytes_unverified": int(self._plan.unverified_length.sum())}
        return self._job.stats() | wanted


class Executor:
    """The native executor with its host cache. Thread-safe. After a fork, the child makes a new one at first use."""

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
        # the parent's threads and rings do not exist in the child, so the child must not try to end them
        if self._native is not None:
            self._native.abandon()
            self._native = None

    def prepare(self, device: int, nbytes: int) -> None:
        """Allocate ``nbytes`` of the host cache in the background and page-lock them for a CUDA device.

        Raises:
            DeviceError: There is no such device.
        """
        core = self._core()
        _native_call(lambda: core.prepare_device(device))
        _native_call(lambda: core.reserve(nbytes))

    def submit_write(self, path: Path, prepared: PreparedWrite, sources: Columns, witness: U8) -> WriteJob:
        """Start a write job; eager sources are captured when this returns. If it raises, it leaves no file.

        Args:
            path: The container, which must not exist. It is created in the background; if that fails, the job fails.
            prepared: The plan.
            sources: The memory of the plan's sources. It must stay alive until it is captured or the job is aborted.
            witness: For each source, 1 to take the fingerprints that :meth:`WriteJob.torn` compares.
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
        """Start reading a container's ranges into memory.

        Args:
            path: The container.
            plan: What to read.
            dests: The memory of the plan's destinations. It must stay alive until the job is done.
            name_record: Gives the key of a record by its number, for errors.
            ahead: A read-ahead of the same file. Extents of it that are also in the plan are not read again.
        """
        core, prepared = self._core(), _prepare_read(plan)
        job = _native_call(lambda: core.submit_read(os.fsencode(path), prepared, *dests, ahead))
        return ReadJob(job, plan, name_record)

    def read_ahead(self, path: Path, plan: ReadPlan) -> ReadAhead:
        """Begin to read a file's extents into the host cache, before their destinations are known.

        They stay in the host cache until :meth:`submit_read` takes them or the result is closed. The caller must close
        it. Extents in the page cache are not read. An error is not reported here: the extent is read again by the job.
        Nothing is read while another read-ahead is open.

        Args:
            path: The container.
            plan: A plan without destinations, of at most :attr:`most_ahead` extents.
        """
        core, prepared = self._core(), _prepare_read(plan)
        return _native_call(lambda: core.read_ahead(os.fsencode(path), prepared))

    @property
    def most_ahead(self) -> int:
        """Most extents to read ahead. They take at most half of the host cache."""
        blocks: int = self._options["cache_bytes"] // self.block
        return min(_AHEAD * int(self._options["queue_depth"]), blocks // 2)

    def extent_nbytes(self, path: Path) -> int:
        """Longest extent in bytes for reading a file: a block, less room for alignment to pages on both sides.

        For a file in memory, half a block is used, so that the data of all workers stays in the processor's caches.
        """
        in_memory = _native_call(lambda: _native.in_memory(os.fsencode(path)))
        return (self.block // 2 if in_memory else self.block) - 2 * PAGE

    def close(self) -> None:
        """Wait for running jobs and release the host cache. Idempotent."""
        self._closed = True
        if self._native is not None:
            self._native.close()
            self._native = None


def columns(buffers: Sequence[Buffer]) -> Columns:
    """The buffers as columns for the native core: addresses, device numbers, stream handles."""
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
