"""Megatron-Core: lazy checkpoints in Megatron's own format, with strategies for ``dist_checkpointing``."""

from megatron.core import __version__ as _version

if tuple(map(int, _version.split(".")[:2])) < (0, 16):  # earlier versions store flattened parts in another way
    raise ImportError(f"datastates.adapters.megatron needs Megatron-Core 0.16 or later, and this is {_version}")

from datastates.adapters.megatron.load_strategy import DataStatesLoadStrategy
from datastates.adapters.megatron.save_strategy import DataStatesSaveStrategy
from datastates.adapters.megatron.training import install

__all__ = ["DataStatesLoadStrategy", "DataStatesSaveStrategy", "install"]
