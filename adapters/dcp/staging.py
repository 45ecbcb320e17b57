"""Lazy staging: a state dict that stays where it is, guarded until it has been captured, in the place of a copy."""

from __future__ import annotations

import copy
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from datastates import arrays, gate
from datastates.adapters.dcp.items import Lazy
from datastates.errors import DatastatesError, TornSnapshotError
from datastates.futures import Snapshot

if TYPE_CHECKING:
    from datastates.adapters.dcp.writer import DataStatesStorageWriter

_GRACE = 60.0
"""Seconds in which a save must begin after its state was staged."""
_POLL = 0.05


class Staged:
    """A state dict that training must not change before it is captured, from staging on.

    Attributes:
        state_dict: The very tensors of the live state, as far as they are lazy, and copies of everything else.
        snapshot: What the gate knows it by; the save that captures it goes on with that.
    """

    def __init__(self, state_dict: dict[str, Any], lazy: Lazy) -> None:
        """Copy what may change at any time; the rest is guarded by the gate from now on."""
        begin = time.monotonic()
        self._kept: list[tuple[str, torch.Tensor]] = []
        self.state_dict: dict[str, Any] = self._copied("", state_dict, lazy)
        self._tensors = [_local(tensor) for _, tensor in self._kept]
        self._before = arrays.witness(self._tensors)
        self._begun = threading.Event()
        self._saver: threading.Thread | None = None
        self._since = begin
        self.snapshot = Snapshot(0, sum(tensor.nbytes for tensor in self._tensors), begin)
        self.snapshot.attach(self._wait_begun, dict, list)
        gate.guard(self.snapshot, automatic=True)
        self.snapshot.called()

    def _copied(self, path: str, value: Any, lazy: Lazy) -> Any:
        if isinstance(value, torch.Tensor):
            if lazy(path, _local(value)):
                self._kept.append((path, value))
                return value
            return value.detach().clone()
        if isinstance(value, dict):
            return {key: self._copied(f"{path}.{key}" if path else str(key), item, lazy) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._copied(f"{path}.{i}", item, lazy) for i, item in enumerate(value))
        return copy.deepcopy(value)

    def saved_by(self, thread: threading.Thread) -> None:
        """Note who is to capture it: if that thread ends before, nobody waits any longer."""
        self._saver = thread

    def check(self) -> None:
        """Raise TornSnapshotError where the state has changed since it was staged; called as its capture begins."""
        versions, addresses = arrays.witness(self._tensors)
        changed = (versions != self._before[0]) | (addresses != self._before[1])
        if changed.any():
            raise TornSnapshotError([self._kept[i][0] for i in changed.nonzero()[0].tolist()])

    def begun(self) -> None:
        """Its capture has begun, or failed: the snapshot's own gate holds from now on."""
        self._tensors, self._kept = [], []
        self._begun.set()

    def give_up(self, error: BaseException) -> None:
        """Nobody will capture it."""
        if not self._begun.is_set():
            self.snapshot.fail(error)
            self.begun()

    def _wait_begun(self) -> None:
        while not self._begun.wait(_POLL):
            ended = self._saver is not None and not self._saver.is_alive()
            if ended or (self._saver is None and time.monotonic() - self._since > _GRACE):
                self.give_up(DatastatesError("the save ended before its state was captured: nothing was written of it"))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Handed(Future[dict[str, Any]]):
    """Done once the state is captured; its result, the state itself, is there at once for who is to capture it."""

    def __init__(self, staged: Staged) -> None:
        super().__init__()
        self._staged = staged.state_dict

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """The state dict, for the save."""
        del timeout
        return self._staged


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
            staged.snapshot.wait_free()
            handed.set_result({})

        threading.Thread(target=tell, name="datastates-staged").start()
        return handed

    def close(self) -> None:
        """Nothing to do: what was staged is the writer's."""
