"""The save strategy: each rank saves its part of Megatron's sharded state into one file while training goes on."""

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
from typing_extensions import Unpack

from datastates.adapters.dcp import DataStatesStorageWriter
from datastates.adapters.dcp.save.async_save import refusing, session_of
from datastates.adapters.dcp.save.writer import WriterOptions
from datastates.adapters.megatron.async_request import request
from datastates.adapters.shared.tried import warn_of_untried
from datastates.files.settings import FileSettings
from datastates.files.staging import Staged, is_large
from datastates.files.torch_files import Lazy, TorchFiles
from datastates.saving.snapshot import Snapshot
from datastates.storage import Location


class DataStatesSaveStrategy(TorchDistSaveShardedStrategy):
    """Saves checkpoints that stock Megatron-Core loads, for ``dist_checkpointing.save``, synchronous or asynchronous.

    Each rank that has something to write writes one file, with checksums and an index of its own. Once all ranks have
    written, ``.metadata`` is put in its place. The class derives from Megatron's strategy because from 0.17 on ``save``
    replaces a strategy of any other class by that one.

    Keep one strategy for all checkpoints, as it keeps plans and pinned memory. Call it on the training thread of every
    rank. Two saves may be under way; a further one waits for the older.
    """

    def __init__(
        self,
        backend: str = "torch_dist",
        version: int = 1,
        keep_only_main_replica: bool = True,
        *,
        lazy: Lazy = is_large,
        tiers: Any = None,
        **options: Unpack[WriterOptions],
    ) -> None:
        """Take the settings.

        Args:
            backend: Name of the format in ``metadata.json``, as in Megatron's strategy.
            version: Version of the format in ``metadata.json``, as in Megatron's strategy.
            keep_only_main_replica: True: only replicas with ``replica_id`` 0 are saved. False: replicas are recognized
                by their place in the tensor, and one of them is saved. As in Megatron's strategy.
            lazy: Given a sharded tensor's key and its local data, whether only an optimizer step changes it. By
                default, tensors of 64 KiB and more.
            tiers: Further places that each checkpoint is brought to once Megatron has written its ``metadata.json``; as
                for :class:`~datastates.files.settings.FileSettings`, also by ``DATASTATES_TIERS``.
            **options: Fields of :class:`~datastates.adapters.dcp.save.writer.WriterSettings`.

        Raises:
            SettingsError: An option is unknown or its value is invalid.
        """
        warn_of_untried("megatron-core")
        super().__init__(backend, version, keep_only_main_replica)
        self.last: Snapshot | None = None
        """This rank's last save: its progress and its report; None before the first."""
        self._lazy = lazy
        self._writer = DataStatesStorageWriter(overwrite=True, **options)
        self._files = TorchFiles(FileSettings.of({"on_error": "warn", **({} if tiers is None else {"tiers": tiers})}))

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str]) -> None:
        """Save, and return once the checkpoint is committed.

        Args:
            sharded_state_dict: As for :meth:`async_save`.
            checkpoint_dir: As for :meth:`async_save`.

        Raises:
            ValueError: ``checkpoint_dir`` is the address of a store instead of a file path.
            DatastatesError: The save failed on some rank; see :meth:`async_save`.
        """
        self._begin(sharded_state_dict, checkpoint_dir).wait_committed()

    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str], async_strategy: str = "mcore"
    ) -> Any:
        """Begin to save; returns before the tensors are captured. Every torch optimizer's step waits until they are.

        Args:
            sharded_state_dict: Megatron's sharded tensors and objects, nested; objects are pickled now.
            checkpoint_dir: The checkpoint's directory, which must exist.
            async_strategy: The queue that takes the request, from 0.17 on: ``mcore`` or ``nvrx``.

        Returns:
            The ``AsyncRequest`` to schedule. If a rank fails, even in describing its part, the finalization raises on
            all ranks: that rank's own error there, a CommitError with its text on the others.

        Raises:
            ValueError: ``checkpoint_dir`` is the address of a store instead of a file path.
        """
        return request(self._begin(sharded_state_dict, checkpoint_dir), async_strategy)

    def close(self) -> None:
        """Wait for saves in flight, and until they are in their tiers, then free threads and memory. Idempotent.

        A tier that fails is not waited for. The next save allocates threads and memory again.
        """
        self._writer.close()
        self._files.close()

    def _begin(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str]) -> Snapshot:
        with refusing(self._writer):
            directory = Location.given(checkpoint_dir)
        session = session_of(self._writer)
        turn = session.reserve()
        found = re.search(r"(\d+)\Z", directory.name)
        stage = partial(Staged, lazy=self._lazy, step=int(found[1]) if found else 0, path=directory, grace=float("inf"))
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
        except Exception as error:  # the other ranks hear of it while they plan
            staged, planner = stage({}, kept=()), _Failed(error)
        except BaseException as error:  # an interrupt
            session.decline(turn, error)
            raise
        try:
            self.last = session.save_staged(staged, directory, planner, turn)
        except BaseException as error:
            session.decline(turn, error)
            raise
        if self._files.settings.tiers and torch.distributed.get_rank() == 0:
            self._bring(self.last, directory)
        return self.last

    def _bring(self, snapshot: Snapshot, directory: Location) -> None:
        """Let a checkpoint be brought to the tiers once it is complete."""
        self._files.begin()
        save = self._files.transaction(f"the checkpoint {directory}", lambda failure: snapshot.wait_committed())
        save.made = os.path.abspath(directory)
        self._files.put(save)

    def _kept(self, part: Any, live: list[tuple[str, torch.Tensor]]) -> Any:
        """A sharded tensor with copied data, or live data, noted in ``live``, if it is lazy; an object as it is."""
        if not isinstance(part, ShardedTensor) or part.data is None:
            return part
        data = part.data.detach()
        if type(data).dequantize is not torch.Tensor.dequantize:  # Transformer Engine's: stored dequantized
            return replace(part, data=data.dequantize().cpu())
        if not self._lazy(part.key, data):
            return replace(part, data=data.clone())
        live.append((part.key, data))
        return replace(part, data=data)


class _Failed(DefaultSavePlanner):
    """A planner for a rank that could not describe its state: it raises that error where planning begins."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Raise the error with which describing the state failed."""
        raise self._error
