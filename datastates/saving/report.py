"""What a snapshot cost: sizes, times and rates."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datastates.executor.timeline import Stage

STATES = ("started", "captured", "persisted", "committed")


@dataclass(frozen=True, slots=True)
class Report:
    """What a snapshot cost so far; times in seconds, sizes in bytes, rates in 10⁹ bytes a second.

    Attributes:
        step: The snapshot's step.
        path: The checkpoint directory, once committed.
        state: How far it is: ``started``, ``captured``, ``persisted``, ``committed`` or ``failed``.
        nbytes: Bytes of arrays.
        file_nbytes: Bytes of the container, 0 until it is persisted.
        snapshot_seconds: How long the ``snapshot()`` call took, so far while it has not returned.
        gate_seconds: How long gates held the CPU up for this snapshot; a GPU stream's own wait is not in it.
        capture_seconds: From the call until captured, None before that.
        persist_seconds: From the call until persisted, None before that.
        commit_seconds: From the call until committed, None before that.
        backend: ``io_uring``, ``pwrite``, or ``memory`` for a file system in memory.
        direct: Whether the page cache was bypassed.
        stages: For every stage so far its seconds, bytes and rate, and what it waited for.
        executor: The native core's own figures.
    """

    step: int
    path: Path
    state: str
    nbytes: int
    file_nbytes: int
    snapshot_seconds: float
    gate_seconds: float
    capture_seconds: float | None
    persist_seconds: float | None
    commit_seconds: float | None
    backend: str
    direct: bool
    stages: dict[str, Stage] = field(default_factory=dict)
    executor: dict[str, Any] = field(default_factory=dict)

    @property
    def stall_seconds(self) -> float:
        """What training waited for: the call and the gates."""
        return self.snapshot_seconds + self.gate_seconds

    def __str__(self) -> str:
        """One line for a log."""
        durable = (
            f"durable after {self.persist_seconds:.3f} s, {self.persist_gbps:.2f} GB/s" if self.persist_gbps else ""
        )
        sizes = f"{self.nbytes / 1e9:.3f} GB, training waited {1e3 * self.stall_seconds:.1f} ms"
        return f"step {self.step} {self.state}: {sizes}, {durable or 'not durable'}: {self.path}"

    @property
    def persist_gbps(self) -> float | None:
        """Bytes of arrays over the time until they were on stable storage."""
        return self.nbytes / self.persist_seconds / 1e9 if self.persist_seconds else None
