"""Providers of arrays by name: host memory, GPU memory, DTensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from datastates.state import laziness, subclasses
from datastates.state.destinations import Destinations
from datastates.state.known_layout import Describer, Known
from datastates.state.provider import Saved, StateProvider
from datastates.state.shards import HOST, Shard, Shards


class ArraysProvider(StateProvider):
    """Named arrays, restored in place. Subclasses say in which memory they may lie."""

    takes_parts = True

    def __init__(self, name: str, tensors: Mapping[str, Any], *, lazy: bool | None = None) -> None:
        """Keep the mapping, which every snapshot and restore reads anew.

        Args:
            name: Top-level key in the checkpoint.
            tensors: Arrays by key, of torch, NumPy or CuPy.
            lazy: True: the arrays stay unchanged until the snapshot is captured. Torch optimizers wait for that; call
                ``Checkpointer.gate()`` before any other update. False: ``snapshot()`` copies the arrays. By default
                the class says which are lazy.
        """
        super().__init__(name)
        if not (hasattr(tensors, "keys") or hasattr(tensors, "state_dict")):
            raise TypeError(f"{name!r}: a mapping of keys to arrays is wanted, not a {type(tensors).__name__}")
        self._tensors = tensors
        self._lazy = lazy
        self._flags: list[bool] | None = None
        self._describer = Describer()
        self._checked: object = None

    def tensors(self) -> Mapping[str, Any]:
        """The arrays by key, as they are now."""
        return self._tensors

    def is_lazy(self, array: object) -> bool:
        """Whether an array is lazy if the caller has not said it: if no change of it can go unseen."""
        return laziness.is_lazy_by_default(array)

    @abstractmethod
    def check(self, shard: Shard) -> None:
        """Raise TypeError for an array in memory that this provider does not take."""

    def knowledge(self) -> object:
        """The addresses and layouts of the arrays."""
        return self._describer.known

    def learn(self, knowledge: object) -> None:
        """Take the addresses and layouts that an earlier provider found out."""
        assert isinstance(knowledge, Known)
        self._describer.known = knowledge

    def shards(self) -> Sequence[Shard]:
        """Describe each array as a shard; raises TypeError for an array in memory that this provider does not take."""
        tensors = self.tensors()
        keys, values = list(tensors.keys()), list(tensors.values())
        shards = self._described(keys, values)
        layout = shards.layout if isinstance(shards, Shards) else shards
        if layout is not self._checked:
            for shard in layout:
                self.check(shard)
            self._checked = shards.layout if isinstance(shards, Shards) else None
        return shards

    def _described(self, keys: Sequence[str], values: Sequence[object]) -> Sequence[Shard]:
        if self._lazy is not None:
            return self._describer.describe(keys, values, [self._lazy] * len(keys))
        # is_lazy() is asked again only for an array that lies in other memory than before
        if (flags := self._flags) is not None:
            again = self._describer.again(keys, values, lambda _: flags)
            if again is not None:
                return again
        self._flags = list(map(self.is_lazy, values))
        return self._describer.describe(keys, values, self._flags)

    def destinations(self, saved: Saved) -> Sequence[Shard]:
        """The live arrays that the checkpoint holds. They may lie in any memory."""
        stored, tensors = saved.arrays(), self.tensors()
        listed = set(stored)  # most keys are in this set, whose look-up is cheaper than the mapping's
        found = {key: array for key, array in tensors.items() if key in listed or key in stored}
        saved.report(
            missing=[key for key in tensors if key not in found],
            unexpected=sorted([*listed.difference(tensors), *saved.objects()]),
        )
        return Destinations(list(found), list(found.values()))


class GpuTensorProvider(ArraysProvider):
    """Arrays in GPU memory, of torch or CuPy, by name. By default torch's are lazy.

    ``snapshot()`` raises TypeError for an array in host memory.
    """

    def check(self, shard: Shard) -> None:
        """Raise TypeError for an array in host memory."""
        if shard.buffer is not None and shard.buffer.device == HOST:
            raise TypeError(f"{self.name}/{shard.key} is not on a GPU")


class HostTensorProvider(ArraysProvider):
    """Arrays in host memory, of torch (pinned or not) or NumPy, by name.

    By default parameters are lazy. ``snapshot()`` copies all other arrays, because code other than an optimizer's step
    may change them. ``snapshot()`` raises TypeError for an array in GPU memory.
    """

    def is_lazy(self, array: object) -> bool:
        """Whether an array is lazy by default: a parameter, or an array of JAX on an accelerator."""
        plain = subclasses.is_tensor(array) and not laziness.is_parameter(array)
        return not plain and super().is_lazy(array)

    def check(self, shard: Shard) -> None:
        """Raise TypeError for an array in GPU memory."""
        if shard.buffer is not None and shard.buffer.device != HOST:
            raise TypeError(f"{self.name}/{shard.key} is not in host memory")


class _Module(Protocol):
    def state_dict(self, *, keep_vars: bool) -> Mapping[str, Any]: ...


class DTensorProvider(ArraysProvider):
    """DTensors by name. Each rank describes the part that it holds, and which other ranks hold the same part.

    Other arrays may be among the DTensors. They must be the same on all ranks of the DTensors' meshes: they are
    compared. By default a torch tensor is lazy if torch alone can write its memory.
    """

    def __init__(self, name: str, tensors: Mapping[str, Any] | _Module, *, lazy: bool | None = None) -> None:
        """Keep the mapping or module, which every snapshot and restore reads anew.

        Args:
            name: Top-level key in the checkpoint.
            tensors: DTensors by key; or a module, for its parameters by name.
            lazy: True: the arrays stay unchanged until the snapshot is captured. Torch optimizers wait for that; call
                ``Checkpointer.gate()`` before any other update. False: ``snapshot()`` copies the arrays. By default
                the class says which are lazy.
        """
        super().__init__(name, cast(Any, tensors), lazy=lazy)

    def tensors(self) -> Mapping[str, Any]:
        """The mapping, or the module's present parameters."""
        source: Any = self._tensors
        if not hasattr(source, "state_dict"):
            return super().tensors()
        # state_dict() first reshards parameters that FSDP has gathered for a forward pass
        return {key: value for key, value in source.state_dict(keep_vars=True).items() if laziness.is_parameter(value)}

    def check(self, shard: Shard) -> None:
        """Accept host memory and GPU memory."""
