"""The executor's jobs, each of which writes or reads one file, or hashes memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from datastates import _native
from datastates._base.columns import F64, U8, U32, U64
from datastates.errors import StorageError
from datastates.executor.handed import Handed
from datastates.executor.timeline import GPU_COPIES, TRAINING_THREAD, Span
from datastates.planning.plans import ReadPlan

WriteJob = _native.WriteJob
HashJob = _native.HashJob
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
_CALLER, _GPU = 1, 2
"""Number of the capture track of the thread that calls ``snapshot()``, and of the first one of a GPU."""
_CAPTURE, _SUBMIT = map(_native.STAGES.index, ("capture", "submit"))


def _track(stage: str, number: int) -> str:
    if stage != "capture":
        return _TRACKS[stage].format(number)
    if number >= _WORKERS:
        return f"worker {number - _WORKERS}"
    return ("capture thread", TRAINING_THREAD)[number] if number < _GPU else f"{GPU_COPIES} {number - _GPU}"


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """Spans of a job's work, in columns: a few bytes for each, until somebody asks for the spans themselves.

    Attributes:
        stage: For each span, the number of its stage in ``_native.STAGES``.
        track: The number of its track among those of the stage.
        begin, end, nbytes: As in :class:`~datastates.executor.timeline.Span`.
        idle: As there; None if it is 0 for all.
    """

    stage: U8
    track: U32
    begin: F64
    end: F64
    nbytes: U64
    idle: F64 | None = None

    def __len__(self) -> int:
        """The number of spans."""
        return len(self.stage)

    def spans(self) -> list[Span]:
        """The spans."""
        idle = np.zeros(len(self)) if self.idle is None else self.idle
        columns = (self.stage, self.track, self.begin, self.end, self.nbytes, idle)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        names = ((_native.STAGES[stage], number, rest) for stage, number, *rest in rows)
        return [Span(stage, _track(stage, number), *rest) for stage, number, rest in names]

    def coarse(self, seconds: float) -> Recorded:
        """Close the gaps that are shorter than ``seconds``, as :func:`~datastates.executor.timeline.coarse` does.

        Spans of the training thread stay as they are. Those of other tracks of a stage become one track, except for the
        copies of each GPU.
        """
        if not len(self):
            return self
        stage, track = self.stage.astype(np.int64), self.track.astype(np.int64)
        is_capture = stage == _CAPTURE
        copies = is_capture & (track >= _GPU) & (track < _WORKERS)
        apart = (stage == _SUBMIT) | (is_capture & (track == _CALLER))
        row = np.where(copies, track + _WORKERS, stage)
        row[apart] = -1 - np.flatnonzero(apart)
        order = np.lexsort((self.begin, row))
        row, begin, end = row[order], self.begin[order], self.end[order]
        first = np.append(True, row[1:] != row[:-1])
        reached = np.empty_like(end)  # when all spans of the row so far have ended
        for group in np.split(np.arange(len(end)), np.flatnonzero(first)[1:]):
            reached[group] = np.maximum.accumulate(end[group])
        gap = np.where(first, 0.0, begin - np.append(begin[0], reached[:-1]))
        starts = np.flatnonzero(first | (gap >= seconds))
        gap[starts] = 0.0
        chosen = order[starts]
        return Recorded(
            self.stage[chosen],
            self.track[chosen],
            begin[starts],
            np.maximum.reduceat(end, starts),
            np.add.reduceat(self.nbytes[order], starts),
            np.add.reduceat(np.maximum(gap, 0.0), starts),
        )


def joined(one: Recorded, other: Recorded) -> Recorded:
    """The spans of two jobs. The tracks of both have the same names."""
    if not len(other):
        return one
    both = one, other
    idle = [np.zeros(len(part)) if part.idle is None else part.idle for part in both]
    return Recorded(
        np.concatenate([part.stage for part in both]),
        np.concatenate([part.track for part in both]),
        np.concatenate([part.begin for part in both]),
        np.concatenate([part.end for part in both]),
        np.concatenate([part.nbytes for part in both]),
        np.concatenate(idle),
    )


NOTHING = Recorded(np.empty(0, np.uint8), np.empty(0, np.uint32), np.empty(0), np.empty(0), np.empty(0, np.uint64))
"""No spans."""


def recorded(job: WriteJob | _native.ReadJob) -> Recorded:
    """The spans of work that the native core has done for a job so far."""
    return Recorded(*job.timeline())


class ReadJob:
    """One container that is being read into its destinations. Thread-safe."""

    def __init__(
        self, job: _native.ReadJob, plan: ReadPlan, name_record: Callable[[int], str], handed: Handed | None
    ) -> None:
        self._job = job
        self._handed = handed
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
        try:
            return self._job.wait(self._name_record, timeout)
        except StorageError as error:
            if self._handed is not None:
                error.__cause__ = self._handed.failure
            raise

    def stop(self) -> None:
        """Let nothing more begin; :meth:`wait` then raises ClosedError. Idempotent."""
        self._job.stop()

    def end(self) -> None:
        """Stop, and return when no memory is written any more. Idempotent."""
        self._job.end()

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
        """The spans of the job's work so far."""
        return recorded(self._job).spans()
