"""The load strategy: plans as Megatron-Core does, reads ranges of files into the live tensors, and verifies them."""

from __future__ import annotations

import os
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    TorchDistLoadShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from typing_extensions import Unpack

from datastates.adapters.dcp import DataStatesStorageReader
from datastates.adapters.dcp.save.writer import WriterOptions, WriterSettings
from datastates.adapters.shared.tried import warn_of_untried
from datastates.ranks.world import settle, world_of
from datastates.reading.reads import Tally
from datastates.saving import gate
from datastates.storage import Location


class DataStatesLoadStrategy(TorchDistLoadShardedStrategy):
    """Loads checkpoints of :class:`DataStatesSaveStrategy` or of stock Megatron-Core, for ``dist_checkpointing.load``.

    It reads only the ranges that are needed, coalesced, straight into the tensors, and verifies them by checksums.
    The docstring of :class:`~datastates.adapters.dcp.DataStatesStorageReader` names the verified parts of stock files.

    Use it on the training thread, for one load at a time.
    """

    def __init__(self, **options: Unpack[WriterOptions]) -> None:
        """Take the settings.

        Args:
            **options: Fields of :class:`~datastates.adapters.dcp.save.writer.WriterSettings`.

        Raises:
            SettingsError: An option is unknown or its value is invalid.
        """
        super().__init__()
        warn_of_untried("megatron-core")
        self.settings = WriterSettings.of(options)
        self.tally: Tally | None = None
        """The amount that the last load read, without items that torch's own code read; None before the first load."""

    def load(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str], async_strategy: str = "mcore"
    ) -> dict[str, Any]:
        """Load into the tensors of a sharded state dict, however they were sharded at the save.

        All ranks call it together.

        Args:
            sharded_state_dict: Megatron's sharded tensors and objects, nested. A tensor whose data is None is made.
            checkpoint_dir: The checkpoint's directory.
            async_strategy: For Megatron's own strategy only.

        Returns:
            The same structure, with tensors and objects in the place of the sharded ones.

        Raises:
            CorruptError: Bytes do not match their checksum; the message names the tensor. Some tensors are overwritten.
            FormatError: A file is damaged.
            StorageError: Reading failed.
            CheckpointingException: A tensor has another global shape in the checkpoint.
            KeyError: The checkpoint lacks a tensor.
            CommitError: Another rank could not load its part. A rank that could not raises its own error.
            ValueError: ``checkpoint_dir`` is the address of a store instead of a file path.
        """
        directory = Location.given(checkpoint_dir)
        gate.pass_all()  # tensors may be overwritten from here on: pending snapshots capture them first
        error, loaded = None, {}
        try:
            loaded = self._load(sharded_state_dict, directory)
        except Exception as failure:  # the other ranks must not go on without this one
            error = failure
        world = world_of(None, None, Location("megatron-load"), self.settings.rank_timeout)
        try:
            settle(world, "load", error, b"", lambda _: b"")
        finally:
            world.close()
        return loaded

    def _load(self, sharded_state_dict: dict[str, Any], directory: Location) -> dict[str, Any]:
        tensors = [value for value in nested_values(sharded_state_dict) if isinstance(value, ShardedTensor)]
        by_key, flat, renamed = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state: dict[str, Any] = mcore_to_pyt_state_dict(by_key, True)
        planner = MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[t for t in tensors if not t.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={t.key: t for t in tensors if t.allow_shape_mismatch},
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
        )
        reader = DataStatesStorageReader(directory, **self.settings.model_dump(exclude={"rank_timeout"}))
        # each rank plans alone: a load plan does not depend on other ranks
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, True)
        reader.set_up_storage_reader(metadata, True)
        plan = planner.create_global_plan([planner.create_local_plan()])[0]
        reader.read_data(planner.finish_plan(plan), planner).wait()
        self.tally, self.cached_global_metadata = reader.tally, metadata
        loaded = {key: _unwrap_pyt_sharded_tensor(value) for key, value in state.items()}
        restored: dict[str, Any] = _replace_sharded_keys_with_state_dict_keys(loaded, flat, renamed)
        _restore_dict_types(restored, sharded_state_dict)
        return restored
