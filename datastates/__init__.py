"""Lazy, asynchronous checkpoints of large-model training state, through composable state providers."""

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
