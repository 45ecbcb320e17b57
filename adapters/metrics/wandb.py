"""Weights & Biases: figures of snapshots and restores in the history of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from datastates.adapters.metrics.figures import FIGURES, figures
from datastates.restoring.restored import Restored
from datastates.saving.snapshot import Snapshot

if TYPE_CHECKING:
    import wandb

_STEP = "datastates/{}/step"


class WandbMetrics:
    """Logs snapshots and restores to a run of Weights & Biases. Thread-safe.

    Give it to a checkpointer as ``on_commit``, and call it with what ``restore()`` returns. The names are
    ``datastates/snapshot/stall_seconds`` and so on. The charts have the step of the snapshot on their x axis, not
    W&B's own: a snapshot is committed some steps after it was taken. The figures are in the row of the run's history
    that is open then, and the next ``run.log()`` of the caller ends it, or ``run.finish()``. A row holds the figures of
    one snapshot: of several that are committed before it ends, those of the last.
    """

    def __init__(self, run: wandb.Run) -> None:
        """Take the run, and define the metrics' x axis in it. The run stays the caller's, who finishes it last."""
        self._run = run
        for figure in FIGURES:
            run.define_metric(figure.path, step_metric=_STEP.format(figure.of))

    def __call__(self, done: Snapshot | Restored) -> None:
        """Log a committed snapshot, or a restore; raises as :func:`~datastates.adapters.metrics.figures.figures`."""
        found = figures(done)
        of = next(iter(found)).of
        row = {_STEP.format(of): done.step, **{figure.path: value for figure, value in found.items()}}
        self._run.log(row, commit=False)  # a row that ended here would be missing what the caller logs to it later
