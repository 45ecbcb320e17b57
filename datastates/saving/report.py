"""The report of a snapshot: its sizes, times and rates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from datastates.executor.timeline import Stage
from datastates.storage.location import Face


@dataclass(frozen=True, slots=True)
class Report:
    """The cost of a snapshot so far, on this rank. Times are seconds, sizes bytes, rates 10⁹ bytes per second.

    Attributes:
        step: The training step that the snapshot was taken at.
        path: The path of the checkpoint directory: the expected one until the commit, then the actual one. The address
            of one in a store.
        places: The places that have the checkpoint by now, once it is committed: that of ``path``, "peers" if copies
            are on other hosts, and those of the setting ``tiers`` that it has been brought to, as far as this rank
            knows; rank 0 knows all. Of a run's last 1,000 checkpoints; older reports tell the first place
            alone.
        state: The state that the snapshot has reached: ``started``, ``captured``, ``persisted``, ``committed`` or
            ``failed``.
        nbytes: Bytes of the arrays.
        file_nbytes: Bytes of the container; 0 until it is persisted.
        snapshot_seconds: Duration of the ``snapshot()`` call; until it returns, the time since it began.
        gate_seconds: Time that gates held up the CPU for this snapshot. Waits of GPU streams do not count.
        capture_seconds: Time from the call until captured; None before that.
        persist_seconds: Time from the call until persisted; None before that.
        commit_seconds: Time from the call until committed; None before that.
        backend: ``io_uring``, ``pwrite``, ``memory`` for a file in memory, or ``handed`` for a store. Empty until the
            writing has begun.
        direct: Whether writing bypasses the page cache.
        stages: By the name of a stage, the sums of its finished work; see :class:`~datastates.executor.timeline.Stage`.
        executor: Figures of the native core; empty until the writing has begun. The keys are:

            - ``bytes``: bytes that are written to the container; until it is persisted, without its metadata.
            - ``extents``: number of extents that the container's data is written in.
            - ``capture_seconds``: seconds from handing the arrays to the native core until all were captured; 0 before.
            - ``backend``, ``direct``: the same as the attributes of this object.
            - ``pinned``: whether all host memory that the cache has reserved is page-locked.
            - ``device_cache_bytes``: bytes that gates copied to spare GPU memory; see ``device_cache`` in the settings.
            - ``evacuate_seconds``: seconds that gates needed to enqueue the copies to spare GPU memory.
            - ``shared``: with ``incremental``, bytes of the container that lie in an earlier one's file, too.
            - ``in_full``: with ``incremental``, why all was written; empty where something was shared.
            - ``dropped_spans``: number of spans that the timeline had no room for; ``stages`` lacks them.
    """

    step: int
    path: Face
    places: tuple[Face, ...]
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
        """Seconds that training waited for this snapshot: in the call and at gates."""
        return self.snapshot_seconds + self.gate_seconds

    def __str__(self) -> str:
        """The most important figures, as one line for a log."""
        durable = (
            f"durable after {self.persist_seconds:.3f} s, {self.persist_gbps:.2f} GB/s" if self.persist_gbps else ""
        )
        sizes = f"{self.nbytes / 1e9:.3f} GB, training waited {1e3 * self.stall_seconds:.1f} ms"
        return f"step {self.step} {self.state}: {sizes}, {durable or 'not durable'}: {self.path}"

    @property
    def persist_gbps(self) -> float | None:
        """Rate in 10⁹ bytes of arrays per second, from the call until they were on stable storage; None before that."""
        return self.nbytes / self.persist_seconds / 1e9 if self.persist_seconds else None
