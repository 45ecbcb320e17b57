"""Providers for arrays by name, on the GPU or on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from datastates import arrays
from datastates.describing import Describer
from datastates.protocol import HOST, Saved, Shard, Shards, StateProvider


class _ArraysProvider(StateProvider):
    """Named arrays, captured lazily unless said otherwise, and restored in place."""

    _wants_device: bool

    def __init__(self, name: str, tensors: Mapping[str, Any], *, lazy: bool = True) -> None:
        """Keep the mapping: it is asked for its arrays at each snapshot.

        Args:
            name: Top-level key in the checkpoint.
            tensors: Arrays by key, of torch, NumPy or CuPy.
            lazy: Whether they stay unchanged until the snapshot is captured; an update that is not a torch optimizer's
                must then be guarded by ``Checkpointer.gate()``.
        """
        super().__init__(name)
        self._tensors = tensors
        self._lazy = lazy
        self._describer = Describer()
        self._checked: object = None

    def shards(self) -> Sequence[Shard]:
        """One shard for each array; raises TypeError for one that is elsewhere."""
        keys, values = list(self._tensors.keys()), list(self._tensors.values())
        shards = self._describer.describe(keys, values, [self._lazy] * len(keys))
        layout = shards.layout if isinstance(shards, Shards) else shards
        if layout is not self._checked:
            for shard in layout:
                if shard.buffer is not None and (shard.buffer.device != HOST) != self._wants_device:
                    where = "on a GPU" if self._wants_device else "in host memory"
                    raise TypeError(f"{self.name}/{shard.key} is not {where}")
            self._checked = shards.layout if isinstance(shards, Shards) else None
        return shards

    def destinations(self, saved: Saved) -> Sequence[Shard]:
        """The live arrays that the checkpoint holds; what lies where is of no matter to them."""
        stored = saved.arrays()
        saved.report(
            missing=[key for key in self._tensors if key not in stored],
            unexpected=sorted([*(key for key in stored if key not in self._tensors), *saved.objects()]),
        )
        return [arrays.destination(key, array) for key, array in self._tensors.items() if key in stored]


class GpuTensorProvider(_ArraysProvider):
    """Arrays in GPU memory, of torch or CuPy."""

    _wants_device = True


class HostTensorProvider(_ArraysProvider):
    """Arrays in host memory, of torch (pinned or not) or NumPy."""

    _wants_device = False
