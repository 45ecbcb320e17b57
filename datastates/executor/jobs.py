"""What the executor has under way: jobs that write and read one file each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from datastates import _native
from datastates.executor.native_errors import native_call
from datastates.executor.timeline import Span
from datastates.planning.plans import ReadPlan

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


def _track(stage: str, number: int) -> str:
    if stage != "capture":
        return _TRACKS[stage].format(number)
    if number >= _WORKERS:
        return f"worker {number - _WORKERS}"
    return ("capture thread", "training thread")[number] if number < 2 else f"copies from GPU {number - 2}"


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
        native_call(self._job.wait_made)

    @property
    def captured(self) -> bool:
        """Whether all sources have been copied."""
        return self._job.captured

    def wait_captured(self, timeout: float | None = None) -> bool:
        """Wait until all sources are copied; False after ``timeout`` seconds. Raises the error of a failed job."""
        return native_call(lambda: self._job.wait_captured(timeout))

    def wait_checksummed(self, timeout: float | None = None) -> bool:
        """Wait until all checksums and digests are known, which is before the last extents are written.

        Returns False after ``timeout`` seconds. Raises the error of a failed job.
        """
        return native_call(lambda: self._job.wait_checksummed(timeout))

    def gate(self, streams: Sequence[tuple[int, int]]) -> None:
        """Return when the sources may be changed by the CPU and by work enqueued on ``streams``.

        A failed job reads nothing more, and raises no error here.

        Args:
            streams: Pairs of device number and stream handle.
        """
        native_call(lambda: self._job.gate(streams))

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
        native_call(lambda: self._job.finish(tail))

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
        return native_call(lambda: self._job.wait(timeout), self._name_record)

    def stats(self) -> dict[str, Any]:
        """What was read: bytes, bytes and seconds of each stage, the backend, and whether I/O was direct.

        ``bytes_needed`` counts each wanted byte of the file once, however many destinations it goes to. ``bytes_read``
        counts the bytes that system calls asked for. With direct I/O these include the whole pages around wanted bytes.
        Through the page cache they do not include what the kernel reads ahead. ``bytes_shared`` of them are not needed:
        they lie between rows that are, and storage reads them once for all ranks of a host.
        """
        plan = self._plan
        return self._job.stats() | {
            "bytes_needed": plan.needed_nbytes,
            "bytes_shared": plan.shared_nbytes,
            "bytes_unverified": plan.unverified_nbytes,
        }
