"""Writes one rank's files, with an executor and a plan that are kept from one save to the next."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from datastates._base import gc_pause
from datastates.adapters.dcp.save.items import ItemsProvider, Written
from datastates.commit.ending import Ending
from datastates.executor.executor import Executor
from datastates.saving.container_frame import ContainerFrame, ContainerFraming
from datastates.saving.running import Running
from datastates.saving.saver import Saver
from datastates.saving.snapshot import Snapshot


class FileWriter:
    """Writes the items of a plan into one container. Used by one thread at a time."""

    def __init__(self, executor: Executor) -> None:
        """Write with that executor."""
        self._saver = Saver(executor, ContainerFraming(nested=True))

    @gc_pause.paused()
    def begin(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        ending: Ending,
        snapshot: Snapshot,
        check: Callable[[], None] = lambda: None,
    ) -> tuple[Running, Written]:
        """Begin to capture and write.

        Args:
            plan: The items to write.
            planner: Resolves each item to its data.
            ending: Where the file is to be written, and how it ends.
            snapshot: The save's future.
            check: Raises if the state has changed since it was staged. From this call on, the snapshot watches it.

        Returns:
            The rest of the work, to be run; and the file, which tells DCP where each item is once it is written.

        Raises:
            ProviderError: An item is no tensor that can be stored.
            StorageError: The file cannot be made.
        """
        provider = ItemsProvider(plan, planner)
        collected = self._saver.collect([provider])
        snapshot.holds(collected.structure.nbytes)
        running = self._saver.begin(collected, snapshot, ending)
        try:
            running.job.wait_made()  # new_file() takes a name that no file has
            check()
        except BaseException as error:
            running.cancel(error)
            raise
        frame = running.planned.frame
        assert isinstance(frame, ContainerFrame)
        return running, Written(ending.path, provider.indices, frame.places)
