"""Installs this package's strategies in the module that makes the strategies of Megatron's training scripts."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

from typing_extensions import Unpack

from datastates.adapters.dcp.save.writer import WriterOptions
from datastates.adapters.megatron.load_strategy import DataStatesLoadStrategy
from datastates.adapters.megatron.save_strategy import DataStatesSaveStrategy
from datastates.files.staging import is_large
from datastates.files.torch_files import Lazy

# names that make strategies: functions up to 0.16, the classes from 0.17 on
_SAVE = ("get_default_save_sharded_strategy", "TorchDistSaveShardedStrategy")
_LOAD = ("get_default_load_sharded_strategy", "TorchDistLoadShardedStrategy")


def install(
    checkpointing: ModuleType | None = None,
    *,
    lazy: Lazy = is_large,
    tiers: Any = None,
    **options: Unpack[WriterOptions],
) -> None:
    """Let a Megatron training script save and load with this package. Call it before the script does either.

    It replaces the names by which the module makes its strategies, in that module only. The arguments
    ``--async-save``, ``--ckpt-fully-parallel-save`` and ``--ckpt-fully-parallel-load`` work as before.

    Args:
        checkpointing: The module that makes the strategies; by default ``megatron.training.checkpointing``.
        lazy: As for :class:`DataStatesSaveStrategy`.
        tiers: As for :class:`DataStatesSaveStrategy`.
        **options: Fields of :class:`~datastates.adapters.dcp.save.writer.WriterSettings`, for both strategies.

    Raises:
        SettingsError: An option is unknown or its value is invalid.
        RuntimeError: The module does not make its strategies by a known name.
    """
    module: Any = checkpointing or importlib.import_module("megatron.training.checkpointing")
    save = [name for name in _SAVE if hasattr(module, name)]
    load = [name for name in _LOAD if hasattr(module, name)]
    if not save or not load:
        raise RuntimeError(f"install: {module.__name__} makes its strategies in a way that is not known here")
    DataStatesLoadStrategy(**options)  # raises for invalid options now

    @functools.cache
    def saving() -> DataStatesSaveStrategy:
        return DataStatesSaveStrategy(lazy=lazy, tiers=tiers, **options)

    # Megatron's arguments concern its own way to write and read: drop them
    for name in save:
        setattr(module, name, lambda *_, **__: saving())
    for name in load:
        setattr(module, name, lambda *_, **__: DataStatesLoadStrategy(**options))
