"""Writes lazily the folders of torch.distributed.checkpoint in which frameworks save sharded models and optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from datastates.adapters.dcp import DataStatesStorageWriter
from datastates.adapters.dcp.save.async_save import session_of
from datastates.adapters.dcp.save.writer import WriterSettings
from datastates.adapters.shared.guarded import guarded_of
from datastates.adapters.shared.stand_ins import Function, having, standing_in
from datastates.config import IoSettings
from datastates.files.staging import is_large
from datastates.saving.snapshot import Snapshot
from datastates.state import dtensors
from datastates.storage import Location


class ShardedFolders:
    """Stands in for ``torch.distributed.checkpoint.save`` while a framework saves. Used on the training thread."""

    def __init__(self, settings: IoSettings) -> None:
        """Take the settings, which include the settings of writers; nothing is started yet."""
        self._options: Any = {name: getattr(settings, name) for name in WriterSettings.model_fields}
        self._writers: dict[str, DataStatesStorageWriter] = {}

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy: the settings alone."""
        return {**vars(self), "_writers": {}}

    @contextlib.contextmanager
    def writing(
        self,
        folder: Path,
        modules: Sequence[torch.nn.Module],
        optimizers: Sequence[Any],
        snapshots: list[Snapshot],
        *,
        fsdp1: bool = False,
    ) -> Iterator[None]:
        """A context in which ``torch.distributed.checkpoint`` saves to ``folder``, and to folders below it, lazily.

        Args:
            folder: The folder of the checkpoint.
            modules: The models. What no optimizer's step guards is copied.
            optimizers: The optimizers that train the models.
            snapshots: The list that takes the folders' snapshots.
            fsdp1: Whether FSDP of version 1 made the state dicts. It copies every shard, so no optimizer waits, unless
                it was told to ignore DTensors of the models: these and their optimizer states are live tensors.
        """
        is_guarded = guarded_of(modules, optimizers)
        live = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
        owned = fsdp1 and not any(map(dtensors.is_dtensor, live))

        def instead_of_save(stock: Function) -> Function:
            def save(state_dict: dict[str, Any], **options: Any) -> Any:
                storage, place = options.get("storage_writer"), options.get("checkpoint_id")
                if isinstance(storage, FileSystemWriter):
                    place = storage.path
                if place is None or not (path := Path(place)).is_relative_to(folder):
                    return stock(state_dict, **options)
                writer = self._writer(str(path.relative_to(folder)))
                writer.lazy = lambda name, tensor: is_large(name, tensor) and is_guarded(name, tensor)
                session = session_of(writer)
                planner = options.get("planner") or DefaultSavePlanner()
                snapshots.append(session.save(state_dict, Location(path), planner, owned=owned))
                return None

            return save

        with standing_in(dcp, "save", instead_of_save):
            yield

    @contextlib.contextmanager
    def writing_for(
        self,
        accelerator: Any,
        folder: Path,
        modules: Sequence[torch.nn.Module],
        optimizers: Sequence[Any],
        snapshots: list[Snapshot],
    ) -> Iterator[None]:
        """As :meth:`writing`, for accelerate's FSDP. Shards of FSDP2, which are not copies, stay on the device."""
        config = accelerator.state.fsdp_plugin.state_dict_config
        fsdp1 = not accelerator.is_fsdp2
        with (
            having(config, "offload_to_cpu", config.offload_to_cpu and fsdp1),
            self.writing(folder, modules, optimizers, snapshots, fsdp1=fsdp1),
        ):
            yield

    def _writer(self, name: str) -> DataStatesStorageWriter:
        """The writer for the folder ``name`` in each checkpoint: it keeps plans and pinned memory."""
        if name not in self._writers:
            self._writers[name] = DataStatesStorageWriter(**self._options)
        return self._writers[name]

    def close(self) -> None:
        """Wait for saves in flight, and free threads and memory."""
        while self._writers:
            self._writers.popitem()[1].close()
