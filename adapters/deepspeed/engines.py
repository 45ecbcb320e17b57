"""The checkpoint engines of this process. One engine may load a checkpoint that another one is saving."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Protocol

from datastates.adapters.deepspeed.save import Save


class Engine(Protocol):
    """The methods of a ``CheckpointEngine`` that this module calls."""

    process: int
    saves: list[Save]

    def wait(self, persist: bool = True) -> bool:
        """Wait for the engine's checkpoints; see ``CheckpointEngine.wait``."""

    def wait_for(self, file: Path) -> None:
        """Wait for the checkpoint that writes a file."""


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def add(engine: Engine) -> None:
    """Note an engine. It is forgotten with its last reference."""
    _engines.add(engine)


def every() -> list[Engine]:
    """All noted engines, also engines of the process that this one was forked from."""
    return list(_engines)


def wait() -> None:
    """Wait for the checkpoints under way of every engine, as ``wait()`` of each does.

    Raises:
        DatastatesError: With ``on_error="raise"``, a checkpoint has failed and this was not raised yet.
        SnapshotAbandonedError: The process that this one was forked from was still saving.
    """
    for engine in every():
        if engine.process == os.getpid() or not all(save.ended for save in engine.saves):
            engine.wait()
