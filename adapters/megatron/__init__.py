"""Megatron-Core: lazy checkpoints in Megatron's own files, by strategies for ``megatron.core.dist_checkpointing``."""

from megatron.core import __version__ as _version

if tuple(map(int, _version.split(".")[:2])) < (0, 16):  # those before store flattened parts by rules of their own
    raise ImportError(f"datastates.adapters.megatron needs Megatron-Core 0.16 or later, and this is {_version}")

from datastates.adapters.megatron.load_strategy import DataStatesLoadStrategy
from datastates.adapters.megatron.save_strategy import DataStatesSaveStrategy
from datastates.adapters.megatron.training import install

__all__ = ["DataStatesLoadStrategy", "DataStatesSaveStrategy", "install"]
