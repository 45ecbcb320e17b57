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
    """Put a file, or a directory with all below it, and the directory that names it on stable storage."""
    inside = sorted(path.rglob("*"), reverse=True) if path.is_dir() else []
    for one in (*inside, path, path.parent):
        descriptor = os.open(one, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Pending:
    """A checkpoint on its way."""

    def __init__(self, path: Path, wait: Callable[[], None]) -> None:
        self.path = path
        """Where it is once it is durable."""
        self.wait = wait
        """Returns once all its bytes are on stable storage; raises what made it fail."""


class System(ABC):
    """One way to save and restore, in one folder. Of torch.distributed's ranks, all do it together."""

    settings: str
    """How it is set, in a line."""

    def __init__(self, directory: Path, **options: Any) -> None:
        """Open it in a folder of its own; only datastates takes options."""
        if options:
            raise TypeError(f"{type(self).__name__} takes no options")
        self.directory = directory
        self._numbers = itertools.count()

    def next_path(self) -> Path:
        """A path in the folder at which there is nothing yet."""
        return self.directory / f"checkpoint-{next(self._numbers)}"

    def tally(self) -> dict[str, int]:
        """What the last restore took on this rank, by the figure's name, where that is known."""
        return {}

    @abstractmethod
    def save(self, state: State) -> Path:
        """Save; on return every byte, and every name, is on stable storage. The path is new each time."""

    @abstractmethod
    def restore(self, path: Path, state: State) -> None:
        """Put what was saved into the live state: tensors in place."""

    def save_async(self, state: State) -> Pending:
        """Begin to save and return as early as the system can; without an asynchronous mode, save."""
        return Pending(self.save(state), lambda: None)

    def gate(self) -> contextlib.AbstractContextManager[object]:
        """What an update must be within, for what has been saved is perhaps still being copied. The call may wait."""
        return contextlib.nullcontext()

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give threads, processes and memory back."""
