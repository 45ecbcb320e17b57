"""One rank's files: an executor with its plan, kept from one save to the next."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from datastates._base import gc_pause
from datastates.adapters.dcp.save.items import ItemsProvider, Written
from datastates.commit.ending import Ending
from datastates.executor.executor import Executor
from datastates.saving.running import Running
from datastates.saving.saver import Saver
from datastates.saving.snapshot import Snapshot


class FileWriter:
    """Writes the items of a plan into one container. Used by one thread at a time."""

    def __init__(self, executor: Executor) -> None:
        """Write with that executor."""
        self._saver = Saver(executor, 0, 1, nested=True)

    @gc_pause.paused()
    def begin(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        ending: Ending,
        snapshot: Snapshot,
        check: Callable[[], None] = lambda: None,
    ) -> tuple[Running, Written]:
        """Begin to capture and write; what is returned is the rest, to be run.

        ``check`` raises where the state is no longer the one to be saved; from its call on it is watched here.

        Returns:
            With it, the file as DCP is to be told of it, once it is written.

        Raises:
            ProviderError: An item is no tensor that can be stored.
            StorageError: The file cannot be made.
        """
        provider = ItemsProvider(plan, planner)
        collected = self._saver.collect([provider])
        snapshot.holds(collected.structure.nbytes)
        running = self._saver.begin(collected, snapshot, ending)
        try:
            running.job.wait_made()  # others choose their names by what exists
            check()
        except BaseException as error:
            running.cancel(error)
            raise
        return running, Written(ending.path, provider.indices, running.planned.places)
