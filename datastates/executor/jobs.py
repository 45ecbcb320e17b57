"""The executor's jobs, each of which writes or reads one file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from datastates import _native
from datastates.executor.timeline import GPU_COPIES, TRAINING_THREAD, Span
from datastates.planning.plans import ReadPlan

WriteJob = _native.WriteJob
_TRACKS = {
    "submit": TRAINING_THREAD,
    "create": "worker {}",
    "cache_wait": "waiting for the cache",
    "checksum": "worker {}",
    "write": "write slot {}",
    "tail": "engine thread",
    "sync": "engine thread",
    "read": "read slot {}",
    "verify": "worker {}",
    "copy": "read slot {}",
}
"""Names of the native core's tracks by stage, except for capture; see :func:`_track`."""
_WORKERS = 1 << 16
"""Number of the first capture track of a worker; ``kWorkerTracks`` in the native core."""


def _track(stage: str, number: int) -> str:
    if stage != "capture":
        return _TRACKS[stage].format(number)
    if number >= _WORKERS:
        return f"worker {number - _WORKERS}"
    return ("capture thread", TRAINING_THREAD)[number] if number < 2 else f"{GPU_COPIES} {number - 2}"


def timeline(job: WriteJob | _native.ReadJob) -> list[Span]:
    """The spans of work that the native core has done for a job so far."""
    return [
        Span(stage, _track(stage, number), begin, end, nbytes) for stage, number, begin, end, nbytes in job.timeline()
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
        return self._job.wait(self._name_record, timeout)

    def stats(self) -> dict[str, Any]:
        """Statistics of the read: bytes, bytes and seconds of each stage, the backend, and whether I/O was direct.

        ``bytes_needed`` counts each wanted byte of the file once, however many destinations it goes to. ``bytes_read``
        counts the bytes that system calls asked for. With direct I/O these include the whole pages around wanted bytes.
        Through the page cache they do not include what the kernel reads ahead. ``bytes_shared`` of them are not needed:
        they lie between needed rows, and storage reads them once for all ranks of a host.
        """
        plan = self._plan
        return self._job.stats() | {
            "bytes_needed": plan.needed_nbytes,
            "bytes_shared": plan.shared_nbytes,
            "bytes_unverified": plan.unverified_nbytes,
        }

    def timeline(self) -> list[Span]:
        """The spans of the job's work so far, with the reads of a read-ahead that it has taken over."""
        return timeline(self._job)
