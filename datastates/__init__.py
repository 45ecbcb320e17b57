"""Lazy, asynchronous checkpoints of large-model training state, through composable state providers."""

from importlib.util import find_spec
from typing import Any

if find_spec("datastates._native") is None:
    raise ImportError(
        f"{__path__[0]} has the sources of datastates without its compiled module. Python finds them before "
        "an installed package, as it looks in the current folder and in that of a script first: run it from another "
        f"folder. To install it: pip install {__path__[0].rpartition('/')[0]}"
    )

from datastates.api import compare, export, load, open, restore, snapshot
from datastates.checkpointer import Checkpointer
from datastates.config import IoSettings, Settings
from datastates.container.pickle_writer import dumps
from datastates.errors import DatastatesError
from datastates.exporting.export import Exported
from datastates.kept import TierSettings
from datastates.reading.checkpoint import Checkpoint
from datastates.restoring.request import RestoreRequest
from datastates.restoring.restored import Comparison, Restored, RestoreReport
from datastates.saving.report import Report
from datastates.saving.snapshot import Snapshot
from datastates.state.arrays import array_shard
from datastates.state.provider import StateProvider
from datastates.state.shards import Buffer, Shard, object_shard

__version__ = "0.1.0"

__all__ = [
    "Buffer",
    "Checkpoint",
    "Checkpointer",
    "Comparison",
    "DatastatesError",
    "Exported",
    "IoSettings",
    "Report",
    "RestoreReport",
    "RestoreRequest",
    "Restored",
    "Settings",
    "Shard",
    "Snapshot",
    "StateProvider",
    "TierSettings",
    "array_shard",
    "compare",
    "dumps",
    "export",
    "load",
    "object_shard",
    "open",
    "restore",
    "snapshot",
]


def __getattr__(name: str) -> Any:
    """Import ``CheckpointEngine``, DeepSpeed's ``datastates_ckpt`` engine, when it is accessed: it needs DeepSpeed."""
    if name == "CheckpointEngine":
        from datastates.adapters.deepspeed import CheckpointEngine

        return CheckpointEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
