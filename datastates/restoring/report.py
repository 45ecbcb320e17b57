"""The report of a restore: its sizes, times and rates."""

from __future__ import annotations

from dataclasses import dataclass

from datastates.executor.timeline import Stage
from datastates.storage.location import Face


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """The cost of a restore on this rank. Times are seconds, sizes bytes, rates 10⁹ bytes per second.

    Attributes:
        step: The training step that was restored; 0 if a checkpoint of another format does not say.
        path: The path of the checkpoint; a string for an address in a store.
        nbytes: Bytes that this rank wanted of the files.
        read_nbytes: Bytes that this rank read, for itself and for the other ranks of its host.
        seconds: Duration of the ``restore()`` call. It includes the wait for snapshots in flight and for other ranks.
        stages: By the name of a stage, the sums of its work; see :class:`~datastates.executor.timeline.Stage`.

            - ``open``: waiting for snapshots in flight, choosing the checkpoint, opening it.
            - ``compare``: comparing it with the live state, on all ranks.
            - ``read``, ``verify``, ``copy``: the work of the native core: reads of extents, checksums, copies from the
              host cache into the state.
            - ``wait``: from the begin of the reads until all ranks have all bytes.
            - ``digest``: comparing digests.
            - ``objects``: giving the providers their objects.
    """

    step: int
    path: Face
    nbytes: int
    read_nbytes: int
    seconds: float
    stages: dict[str, Stage]

    @property
    def gbps(self) -> float | None:
        """Rate in 10⁹ wanted bytes per second of the call; None if no byte was wanted."""
        return self.nbytes / self.seconds / 1e9 if self.nbytes and self.seconds else None

    def __str__(self) -> str:
        """The most important figures, as one line for a log."""
        rate = f", {self.gbps:.2f} GB/s" if self.gbps else ""
        return f"step {self.step} restored: {self.nbytes / 1e9:.3f} GB in {self.seconds:.3f} s{rate}: {self.path}"
