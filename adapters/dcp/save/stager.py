"""The stager for ``dcp.async_save``: nothing is copied that only an optimizer step changes."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.staging import AsyncStager

if TYPE_CHECKING:
    from datastates.adapters.dcp.save.writer import DataStatesStorageWriter
from datastates.adapters.dcp.save.staging import Held, Staged


class _Handed(Future[dict[str, Any]]):
    """Done once the state is captured; its result, the state itself, is there at once for who is to capture it."""

    def __init__(self, staged: Staged) -> None:
        super().__init__()
        self._state_dict = Held(staged)

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """The state dict, for the save."""
        del timeout
        return self._state_dict


class DataStatesStager(AsyncStager):
    """Stages for a :class:`DataStatesStorageWriter` without copying what only an optimizer step changes.

    ``dcp.async_save(state, storage_writer=writer, async_stager=DataStatesStager(writer))`` returns an
    ``AsyncSaveResponse``; its ``staging_completion`` is done once the state is captured, and may be waited for before
    the optimizer steps, as torchtitan does. Torch's optimizers wait for that by themselves.
    """

    def __init__(self, storage_writer: DataStatesStorageWriter) -> None:
        """Stage for that writer."""
        self._writer = storage_writer

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
        """Guard the state from now on; see the class."""
        staged = self._writer.hold(state_dict)
        handed = _Handed(staged)

        def tell() -> None:
            staged.wait_free()
            handed.set_result({})

        threading.Thread(target=tell, name="datastates-staged").start()
        return handed

    def close(self) -> None:
        """Nothing to do: what was staged is the writer's."""
