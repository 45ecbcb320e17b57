"""Megatron's training scripts: the module that makes their strategies is given those of this package."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

from datastates.adapters.dcp.save.staging import Lazy, is_large
from datastates.adapters.megatron.load_strategy import DataStatesLoadStrategy
from datastates.adapters.megatron.save_strategy import DataStatesSaveStrategy

# what makes them: functions up to 0.16, the classes from 0.17 on
_SAVE = ("get_default_save_sharded_strategy", "TorchDistSaveShardedStrategy")
_LOAD = ("get_default_load_sharded_strategy", "TorchDistLoadShardedStrategy")


def install(checkpointing: ModuleType | None = None, *, lazy: Lazy = is_large, **options: Any) -> None:
    """Let a Megatron training script save and load with this package; to be called before it does either.

    The names by which the module makes its strategies are replaced there: nothing else, and nothing elsewhere. Its
    arguments ``--async-save``, ``--ckpt-fully-parallel-save`` and ``--ckpt-fully-parallel-load`` work as ever.

    Args:
        checkpointing: The module that makes them: by default ``megatron.training.checkpointing``.
        lazy: As for :class:`DataStatesSaveStrategy`.
        **options: Fields of :class:`~datastates.adapters.dcp.save.writer.WriterSettings`, for both strategies.

    Raises:
        SettingsError: An option is unknown or impossible.
        RuntimeError: The module makes its strategies in a way that is not known here.
    """
    module: Any = checkpointing or importlib.import_module("megatron.training.checkpointing")
    save = [name for name in _SAVE if hasattr(module, name)]
    load = [name for name in _LOAD if hasattr(module, name)]
    if not save or not load:
        raise RuntimeError(f"install: {module.__name__} makes its strategies in a way that is not known here")
    DataStatesLoadStrategy(**options)  # to be told of impossible options now

    @functools.cache
    def saving() -> DataStatesSaveStrategy:
        return DataStatesSaveStrategy(lazy=lazy, **options)

    # what Megatron passes is about its own way to write and to read
    for name in save:
        setattr(module, name, lambda *_, **__: saving())
    for name in load:
        setattr(module, name, lambda *_, **__: DataStatesLoadStrategy(**options))
