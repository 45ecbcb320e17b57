"""The stager for ``dcp.async_save``, which does not copy tensors that only an optimizer step changes."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from torch.distributed.checkpoint.staging import AsyncStager

from datastates._base.workers import start
from datastates.adapters.dcp.save.staging import Staged, StagedStateDict
from datastates.adapters.dcp.save.writer import DataStatesStorageWriter


class _Handed(Future[dict[str, Any]]):
    """A future that is done once the state is captured. The save gets its result, the live state, at once."""

    def __init__(self, staged: Staged) -> None:
        super().__init__()
        self._state_dict = StagedStateDict(staged)

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """The staged state dict, at once; ``timeout`` has no effect."""
        del timeout
        return self._state_dict


class DataStatesStager(AsyncStager):
    """Stages for a :class:`DataStatesStorageWriter` without copying tensors that only an optimizer step changes.

    ``dcp.async_save(state, storage_writer=writer, async_stager=DataStatesStager(writer))`` returns an
    ``AsyncSaveResponse``. Its ``staging_completion`` is done once the state is captured. A training loop may wait for
    it before the optimizer steps, as torchtitan does; torch's optimizers also wait by themselves.
    """

    def __init__(self, storage_writer: DataStatesStorageWriter) -> None:
        """Stage for ``storage_writer``, which must be the writer of the save."""
        self._writer = storage_writer

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
        """Copy the state that may change at any time, and guard the rest until it is captured.

        Args:
            state_dict: The state dict, as ``dcp.async_save`` hands it over.

        Returns:
            A future that is done once the state is captured. Its ``result()`` does not wait: it returns the staged
            state dict at once, for the save.

        Raises:
            DatastatesError: A save with the writer is under way.
        """
        staged = self._writer.hold(state_dict)
        handed = _Handed(staged)

        def tell() -> None:
            staged.wait_free()
            handed.set_result({})

        start(threading.Thread(target=tell, name="datastates-staged"))
        return handed

    def close(self) -> None:
        """Do nothing: the staged state belongs to the writer."""
