"""New memory for arrays that replace live ones, where a restore does not write the live arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from datastates._base.loaded import loaded
from datastates.state import arrays, jax_arrays, laziness, subclasses
from datastates.state.parts import HeldPart
from datastates.state.shards import Shard


def describes(value: object) -> bool:
    """Whether a value is a ``jax.ShapeDtypeStruct``, which describes an array without contents."""
    jax: Any = loaded("jax")
    return jax is not None and isinstance(value, jax.ShapeDtypeStruct)


def stand_in(like: Any) -> Any:
    """Make a NumPy array with the element type and shape of ``like``. It takes the memory of one element."""
    return np.broadcast_to(np.zeros((), like.dtype), like.shape)


def _is_of_jax(like: object) -> bool:
    return describes(like) or arrays.kind_of(like) == "jax"


def why_not_made(like: Any) -> str | None:
    """Say why no new array like ``like`` can be made, for a message; None if one can."""
    if not _is_of_jax(like):
        return None
    if (made := jax_arrays.made_type(like)) == like.dtype:
        return jax_arrays.why_not_placed(like)
    return f"{like.dtype} in the live state, of which JAX makes {made} while jax_enable_x64 is off"


@dataclass(frozen=True, slots=True, eq=False)
class Landing:
    """New memory for an array that replaces a live one, for the parts that this process holds.

    Attributes:
        like: The live array, or its ``jax.ShapeDtypeStruct``.
        parts: The parts that this process holds of the array, each with contiguous memory.
    """

    like: Any
    parts: list[tuple[HeldPart, Any]]

    @classmethod
    def of(cls, like: Any, memory: Any = None) -> Landing:
        """Allocate memory for an array like ``like``; its contents are undefined. DTensors are not supported.

        ``memory``: the memory for a tensor of torch, if it is allocated.
        """
        if _is_of_jax(like):
            like = jax_arrays.placed(like)
            return cls(like, jax_arrays.landings(like))
        shape = tuple(like.shape)
        return cls(like, [(HeldPart(shape, (0,) * len(shape)), _empty(like) if memory is None else memory)])

    @classmethod
    def filled(cls, like: Any, shards: Sequence[Shard]) -> Landing:
        """Make the object again from ``like`` and the shards of :meth:`shards`."""
        like = jax_arrays.placed(like) if describes(like) else like
        return cls(like, [(HeldPart(s.global_shape, s.offset, s.flat), s.source) for s in shards])

    def shards(self, key: str) -> list[Shard]:
        """Describe the memory as destinations of a restore: a shard for each part, all with the same key."""
        return [arrays.landing(key, part, memory) for part, memory in self.parts]

    def assemble(self) -> Any:
        """Make the array from filled memory. It has the library, the devices and the sharding of ``like``."""
        if _is_of_jax(self.like):
            return jax_arrays.assemble(self.like, self.parts)
        ((_, array),) = self.parts
        if laziness.is_parameter(self.like):
            return subclasses.as_parameter(array, self.like.requires_grad)
        return array.requires_grad_() if getattr(self.like, "requires_grad", False) else array


def _empty(like: Any) -> Any:
    match arrays.kind_of(like):
        case "torch":
            torch: Any = loaded("torch")
            return torch.empty(like.shape, dtype=like.dtype, device=like.device)
        case "cupy":
            cupy: Any = loaded("cupy")
            with like.device:
                return cupy.empty(like.shape, like.dtype)
    return np.empty(like.shape, like.dtype)
