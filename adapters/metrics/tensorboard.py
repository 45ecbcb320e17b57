"""TensorBoard: scalars of snapshots and restores, by step."""

from __future__ import annotations

from typing import Any, Protocol

from datastates.adapters.metrics.figures import figures
from datastates.restoring.restored import Restored
from datastates.saving.snapshot import Snapshot


class Writer(Protocol):
    """A ``torch.utils.tensorboard.SummaryWriter``, or a writer like it."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Write a scalar for a step."""


class TensorBoardMetrics:
    """Writes scalars of snapshots and restores for TensorBoard. As thread-safe as the writer.

    Give it to a checkpointer as ``on_commit``, and call it with what ``restore()`` returns. The names are
    ``datastates/snapshot/stall_seconds`` and so on. The step is the snapshot's.
    """

    def __init__(self, writer: Writer) -> None:
        """Take the writer. It stays the caller's, who closes it after the checkpointer."""
        self._writer = writer

    def __call__(self, done: Snapshot | Restored) -> None:
        """Write a committed snapshot, or a restore; raises as :func:`~datastates.adapters.metrics.figures.figures`."""
        for figure, value in figures(done).items():
            self._writer.add_scalar(figure.path, value, done.step)
