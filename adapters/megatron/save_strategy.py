"""The save strategy: what Megatron-Core describes becomes one container a rank, captured while training goes on."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner

from datastates.adapters.dcp import DataStatesStorageWriter
from datastates.adapters.dcp.save.async_save import refusing, session_of
from datastates.adapters.dcp.save.staging import Lazy, Staged, is_large
from datastates.adapters.megatron.async_request import request
from datastates.adapters.megatron.paths import local
from datastates.saving.snapshot import Snapshot


class DataStatesSaveStrategy(TorchDistSaveShardedStrategy):
    """Saves for ``dist_checkpointing.save``, synchronously and asynchronously, what stock Megatron-Core loads.

    Each rank that has something to write writes one file, with checksums and an index of its own; ``.metadata`` is put
    in its place when all have. A subclass of Megatron's strategy, as from 0.17 on ``save`` replaces any other by that.

    Keep one for all checkpoints: it keeps its plans and its pinned memory. Used by one save at a time, on the training
    thread of every rank; two saves may be under way, and a further one waits.
    """

    def __init__(
        self,
        backend: str = "torch_dist",
        version: int = 1,
        keep_only_main_replica: bool = True,
        *,
        lazy: Lazy = is_large,
        **options: Any,
    ) -> None:
        """Save as these say.

        Args:
            backend: What ``metadata.json`` calls the format, as in Megatron's strategy.
            version: Likewise.
            keep_only_main_replica: False: replicas are told by their place, not by ``replica_id``; as in Megatron's.
            lazy: Given a sharded tensor's key and its local data, whether only an optimizer's step changes it. By
                default those of 64 KiB and more.
            **options: Fields of :class:`~datastates.adapters.dcp.save.writer.WriterSettings`.

        Raises:
            SettingsError: An option is unknown or impossible.
        """
        super().__init__(backend, version, keep_only_main_replica)
        self.last: Snapshot | None = None
        """The last save of this rank: how far it is, and what it cost."""
        self._lazy = lazy
        self._writer = DataStatesStorageWriter(overwrite=True, **options)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str]) -> None:
        """Save, and return when all ranks have; raises as the asynchronous save does in its finalization."""
        self._begin(sharded_state_dict, checkpoint_dir).wait_committed()

    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str], async_strategy: str = "mcore"
    ) -> Any:
        """Begin to save; returns before the tensors are captured, for which every torch optimizer's step waits.

        Args:
            sharded_state_dict: Megatron's sharded tensors and objects, nested; objects are pickled now.
            checkpoint_dir: The checkpoint's directory; it is there.
            async_strategy: Whose queue is to take the request, from 0.17 on: ``mcore`` or ``nvrx``.

        Returns:
            The ``AsyncRequest`` to schedule. What fails on one rank, if only in describing its part, is raised by its
            finalization on all of them: the error itself on that rank, a CommitError that names it on the others.

        Raises:
            ValueError: ``checkpoint_dir`` is in no file system.
        """
        return request(self._begin(sharded_state_dict, checkpoint_dir), async_strategy)

    def close(self) -> None:
        """Wait for saves in flight, and give threads and memory back; the next save takes them again. Idempotent."""
        self._writer.close()

    def _begin(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str]) -> Snapshot:
        with refusing(self._writer):
            directory = local(checkpoint_dir)
        session = session_of(self._writer, directory)
        turn = session.reserve()
        found = re.search(r"(\d+)\Z", directory.name)
        stage = partial(Staged, lazy=self._lazy, step=int(found[1]) if found else 0, grace=float("inf"))
        planner: SavePlanner
        try:
            planner = MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica,
                can_run_decentralized_global_plan=False,
                flatten_state_dict=False,
                flatten_sharded_tensors=False,
            )
            live: list[tuple[str, torch.Tensor]] = []
            by_key, *_ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
            kept = {key: [self._kept(part, live) for part in parts] for key, parts in by_key.items()}
            staged = stage(mcore_to_pyt_state_dict(kept, False), kept=live)
        except Exception as error:  # the other ranks are to hear of it where they plan
            staged, planner = stage({}, kept=()), _Failed(error)
        except BaseException as error:  # an interrupt
            session.decline(turn, error)
            raise
        self.last = session.save_staged(staged, directory, planner, turn)
        return self.last

    def _kept(self, part: Any, live: list[tuple[str, torch.Tensor]]) -> Any:
        """A sharded tensor or object as it is now, but for what is lazy: that is noted."""
        if not isinstance(part, ShardedTensor) or part.data is None:
            return part
        data = part.data.detach()
        if type(data).dequantize is not torch.Tensor.dequantize:  # Transformer Engine's: stored as what it stands for
            return replace(part, data=data.dequantize().cpu())
        if not self._lazy(part.key, data):
            return replace(part, data=data.clone())
        live.append((part.key, data))
        return replace(part, data=data)


class _Failed(DefaultSavePlanner):
    """A planner of what could not be described."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Raise why."""
        raise self._error
