"""Providers of arrays by name: host memory, GPU memory, DTensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from datastates.state import arrays
from datastates.state.provider import Saved, StateProvider
from datastates.state.repeated import Describer, Known
from datastates.state.shards import HOST, Shard, Shards


class ArraysProvider(StateProvider):
    """Named arrays, captured lazily unless said otherwise, and restored in place; subclasses say where they may lie."""

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

    def tensors(self) -> Mapping[str, Any]:
        """The arrays by key, as they are now."""
        return self._tensors

    @abstractmethod
    def check(self, shard: Shard) -> None:
        """Raise TypeError for an array that does not belong here."""

    def knowledge(self) -> object:
        """Where the arrays lie."""
        return self._describer.known

    def learn(self, knowledge: object) -> None:
        """Take it."""
        assert isinstance(knowledge, Known)
        self._describer.known = knowledge

    def shards(self) -> Sequence[Shard]:
        """One shard for each array; raises TypeError for one that is elsewhere."""
        tensors = self.tensors()
        keys, values = list(tensors.keys()), list(tensors.values())
        shards = self._describer.describe(keys, values, [self._lazy] * len(keys))
        layout = shards.layout if isinstance(shards, Shards) else shards
        if layout is not self._checked:
            for shard in layout:
                self.check(shard)
            self._checked = shards.layout if isinstance(shards, Shards) else None
        return shards

    def destinations(self, saved: Saved) -> Sequence[Shard]:
        """The live arrays that the checkpoint holds; what lies where is of no matter to them."""
        stored, tensors = saved.arrays(), self.tensors()
        saved.report(
            missing=[key for key in tensors if key not in stored],
            unexpected=sorted([*(key for key in stored if key not in tensors), *saved.objects()]),
        )
        found = {key: array for key, array in tensors.items() if key in stored}
        return arrays.Destinations(list(found), list(found.values()))


class GpuTensorProvider(ArraysProvider):
    """Arrays in GPU memory, of torch or CuPy."""

    def check(self, shard: Shard) -> None:
        """Refuse host memory."""
        if shard.buffer is not None and shard.buffer.device == HOST:
            raise TypeError(f"{self.name}/{shard.key} is not on a GPU")


class HostTensorProvider(ArraysProvider):
    """Arrays in host memory, of torch (pinned or not) or NumPy."""

    def check(self, shard: Shard) -> None:
        """Refuse GPU memory."""
        if shard.buffer is not None and shard.buffer.device != HOST:
            raise TypeError(f"{self.name}/{shard.key} is not in host memory")


class _Module(Protocol):
    def state_dict(self, *, keep_vars: bool) -> Mapping[str, Any]: ...


class DTensorProvider(ArraysProvider):
    """DTensors by name, placed in whatever way: each rank describes the part that it holds, and who else holds it.

    Arrays of other kinds may be among them: they are taken to be alike on all ranks of the DTensors' meshes.
    """

    def __init__(self, name: str, tensors: Mapping[str, Any] | _Module, *, lazy: bool = True) -> None:
        """Keep the mapping: it is asked for its DTensors at each snapshot.

        Args:
            name: Top-level key in the checkpoint.
            tensors: DTensors by key, or a module: its parameters by their names.
            lazy: Whether they stay unchanged until the snapshot is captured; an update that is not a torch optimizer's
                must then be guarded by ``Checkpointer.gate()``.
        """
        super().__init__(name, cast(Any, tensors), lazy=lazy)

    def tensors(self) -> Mapping[str, Any]:
        """The mapping, or the module's parameters now."""
        source: Any = self._tensors
        if not hasattr(source, "state_dict"):
            return super().tensors()
        # state_dict() first takes parameters back that FSDP has gathered for a forward pass
        return {key: value for key, value in source.state_dict(keep_vars=True).items() if arrays.is_parameter(value)}

    def check(self, shard: Shard) -> None:
        """On the host and on GPUs alike."""
