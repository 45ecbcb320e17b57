"""datastates with its defaults; the line of settings names what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datastates as ds
from datastates.providers import from_state_dict, from_stateful
from datastates.state.provider import StateProvider
from peers.base import AsyncSystem, Pending
from states import State


class Datastates(AsyncSystem):
    """One Checkpointer, as in a training loop. It gates torch's optimizers itself, so ``gate`` does nothing."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory)
        given = ", ".join(f"{name}={value!r}" for name, value in options.items()) or "defaults"
        self.settings = f"Checkpointer, {given}; checksums on; restored through the same Checkpointer"
        self._checkpointer = ds.Checkpointer(directory, **options)
        self._state: State | None = None
        self._providers: list[StateProvider] = []

    def save_async(self, state: State) -> Pending:
        step = next(self._numbers)
        self._last = self._checkpointer.snapshot(self._providers_of(state), step=step)
        return Pending(self.directory / f"step-{step:08d}", self._last.wait_committed)

    @property
    def figures(self) -> dict[str, Any]:
        """The native core's figures of the last save."""
        return self._last.report.executor

    def restore(self, path: Path, state: State) -> None:
        self._checkpointer.restore(self._providers_of(state), step=int(path.name.partition("-")[2]))

    def close(self) -> None:
        self._checkpointer.close()

    def _providers_of(self, state: State) -> list[StateProvider]:
        """The same providers for the same state: a training loop makes them once."""
        if state is not self._state:
            self._state = state
            self._providers = [
                from_stateful(name, value) if hasattr(value, "state_dict") else from_state_dict(name, value)
                for name, value in state.items()
            ]
        return self._providers


class DatastatesWithPwrite(Datastates):
    """datastates without io_uring, which the default profile of containers forbids."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory, io_backend="pwrite", **options)


class DatastatesIncremental(Datastates):
    """datastates that writes only what has changed since its last save."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory, incremental=True, **options)


class DatastatesWithDeviceCache(Datastates):
    """datastates with a device cache: captured bytes go to spare GPU memory first."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory, device_cache="8GiB", **options)
