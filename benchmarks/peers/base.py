"""What every compared system can do."""

from __future__ import annotations

import contextlib
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from states import State


def fsync_tree(path: Path) -> None:
    """Sync a file, or a directory with everything below it, and its parent directory."""
    inside = sorted(path.rglob("*"), reverse=True) if path.is_dir() else []
    for one in (*inside, path, path.parent):
        descriptor = os.open(one, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Pending:
    """A checkpoint that is being saved."""

    def __init__(self, path: Path, wait: Callable[[], None]) -> None:
        self.path = path
        """Where the checkpoint is once it is durable."""
        self.wait = wait
        """Returns once all bytes are on stable storage; raises what made the save fail."""


class System(ABC):
    """One way to save and restore, in one folder. With torch.distributed, all ranks call each method together."""

    settings: str
    """The system's settings in one line."""

    def __init__(self, directory: Path, **options: Any) -> None:
        """Open the system in a folder of its own. Only datastates takes options."""
        if options:
            raise TypeError(f"{type(self).__name__} takes no options")
        self.directory = directory
        self._numbers = itertools.count()

    def next_path(self) -> Path:
        """A path in the folder where nothing exists yet."""
        return self.directory / f"checkpoint-{next(self._numbers)}"

    @abstractmethod
    def save(self, state: State) -> Path:
        """Save to a new path, and return it once every byte and every directory entry is on stable storage."""

    @abstractmethod
    def restore(self, path: Path, state: State) -> None:
        """Restore a checkpoint into the live state, tensors in place."""

    def save_async(self, state: State) -> Pending:
        """Begin to save, and return as early as the system can. A system without an asynchronous mode saves."""
        return Pending(self.save(state), lambda: None)

    def gate(self) -> contextlib.AbstractContextManager[object]:
        """The context for an update of the state, which a save may still be copying. The call may wait."""
        return contextlib.nullcontext()

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give threads, processes and memory back."""


class AsyncSystem(System):
    """A system whose save is an asynchronous one that is waited for."""

    def save(self, state: State) -> Path:
        pending = self.save_async(state)
        pending.wait()
        return pending.path

    @abstractmethod
    def save_async(self, state: State) -> Pending:
        """Begin to save, and return as early as the system can."""
