"""A provider for DTensors by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

from datastates.providers.tensor import ArraysProvider
from datastates.state import arrays
from datastates.state.shards import Shard


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
