"""Saves tensors as safetensors files, while training goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from datastates.errors import ProviderError
from datastates.saving.engine import Engine
from datastates.saving.safetensors_frame import SafetensorsFraming
from datastates.saving.saver import Saver
from datastates.saving.snapshot import Snapshot
from datastates.state import arrays, keys
from datastates.state.provider import StateProvider
from datastates.state.shards import Shard


class _Tensors(StateProvider):
    """Tensors by name, each in memory of its own. The framework that saved them restores them."""

    def __init__(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(name)
        self._tensors = tensors

    def shards(self) -> Sequence[Shard]:
        try:  # one by one: tensors of one storage are written apart
            return [arrays.array_shard(keys.component(n), t, lazy=True) for n, t in self._tensors.items()]
        except TypeError as error:
            raise ProviderError(str(error)) from error


class SafetensorsWriter:
    """Writes one file of each checkpoint, and keeps its plan from one checkpoint to the next. Not thread-safe."""

    def __init__(self, engine: Engine, kind: str, metadata: Mapping[str, str]) -> None:
        """Write with that engine.

        Args:
            engine: The engine.
            kind: Names the file in errors.
            metadata: What the header says besides the tensors.
        """
        self._engine = engine
        self._kind = kind
        self._saver = Saver(engine.executor, SafetensorsFraming(metadata))

    def write(self, tensors: Mapping[str, torch.Tensor], path: Path, *, attempt: str, begin: float) -> Snapshot:
        """Begin to write a file. All tensors are captured while training goes on.

        Args:
            tensors: The tensors by name. They are contiguous, and only an optimizer step changes them.
            path: The file, under a temporary name.
            attempt: A name that all files of one checkpoint share.
            begin: When the user's call began, on the monotonic clock.

        Raises:
            ProviderError: Tensors share memory, or the format cannot hold one; the message names it.
        """
        provider = _Tensors(self._kind, tensors)
        return self._engine.take_file(self._saver, [provider], path, attempt=attempt, begin=begin)
