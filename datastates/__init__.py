"""Lazy, asynchronous checkpoints of large-model training state, through composable state providers."""

from typing import Any

from datastates.arrays import array_shard
from datastates.checkpoint import Checkpointer, load, open, restore, snapshot
from datastates.config import IoSettings, Settings
from datastates.errors import DatastatesError
from datastates.futures import Report, Snapshot
from datastates.pickling import dumps
from datastates.protocol import Buffer, Shard, StateProvider, object_shard
from datastates.reader import Checkpoint

__version__ = "0.1.0"

__all__ = [
    "Buffer",
    "Checkpoint",
    "CheckpointEngine",
    "Checkpointer",
    "DatastatesError",
    "IoSettings",
    "Report",
    "Settings",
    "Shard",
    "Snapshot",
    "StateProvider",
    "array_shard",
    "dumps",
    "load",
    "object_shard",
    "open",
    "restore",
    "snapshot",
]


def __getattr__(name: str) -> Any:
    """The engine that DeepSpeed asks for by its entry ``datastates_ckpt``; nothing of DeepSpeed is imported before."""
    if name == "CheckpointEngine":
        from datastates.adapters.deepspeed import CheckpointEngine

        return CheckpointEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
