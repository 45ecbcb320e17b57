"""One rank's files: an engine with its plan, kept from one save to the next."""

from __future__ import annotations

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from datastates.adapters.dcp.items import ItemsProvider, Lazy
from datastates.barrier import World
from datastates.config import IoSettings
from datastates.ending import Ending, Identity
from datastates.engine import Engine, make_executor
from datastates.futures import Snapshot
from datastates.saving import Saver


def identity(attempt: str) -> Identity:
    """What a file's index says of it: it is part of no checkpoint of this package's own kind."""
    return {"step": 0, "rank": 0, "world_size": 1, "attempt": attempt}


class FileWriter:
    """Writes the items of a plan into one container. Used by one thread at a time."""

    def __init__(self, settings: IoSettings, world: World) -> None:
        """The engine is started by the first save; it closes ``world`` when it ends."""
        self._settings = settings
        self._world = world
        self._engine: Engine | None = None
        self._saver: Saver | None = None

    def begin(
        self, plan: SavePlan, planner: SavePlanner, ending: Ending, snapshot: Snapshot, lazy: Lazy
    ) -> dict[str, MetadataIndex]:
        """Begin to capture and write; ``snapshot`` says how far that is, and what failed in storage or on a device.

        Returns:
            What DCP calls the file's arrays, by key: see :func:`~datastates.adapters.dcp.items.results`.

        Raises:
            ProviderError: An item is no tensor that can be stored.
        """
        provider = ItemsProvider(plan, planner, lazy)
        if self._engine is None or self._saver is None:
            self._engine = Engine(make_executor(self._settings), self._world, threads=2, auto_gate=True)
            self._saver = Saver(self._engine.executor, 0, 1, nested=True)
        collected = self._saver.collect([provider])
        snapshot.holds(collected.structure.nbytes)
        self._engine.fill_file(self._saver, collected, ending, snapshot)
        return provider.indices

    def close(self) -> None:
        """Give threads and memory back. Idempotent."""
        if self._engine is not None:
            self._engine.close()
        self._engine = self._saver = None

    def close_later(self) -> None:
        """Close the world once what is in flight has ended; memory is given back with this object."""
        if self._engine is not None:
            self._engine.close_later()
