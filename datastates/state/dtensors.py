"""torch's DTensors: their local tensors, and which part of the logical tensor each rank holds."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from datastates._base.columns import I64
from datastates._base.loaded import loaded
from datastates.errors import ProviderError
from datastates.state.parts import HeldPart, replicas


@functools.cache
def is_class(cls: Any) -> bool:
    """Whether a class is torch's DTensor or a subclass of it."""
    return any(c.__name__ == "DTensor" and c.__module__.startswith("torch.distributed") for c in cls.__mro__)


def is_dtensor(value: object) -> bool:
    """Whether a value is one of torch's DTensors."""
    cls: Any = type(value)
    return is_class(cls)


def may_exist() -> bool:
    """Whether this process can have DTensors: they need a process group of torch."""
    distributed: Any = loaded("torch.distributed")
    return distributed is not None and distributed.is_available() and bool(distributed.is_initialized())


def mesh_of(value: Any) -> Any:
    """The device mesh of a DTensor; None for other values."""
    return value.device_mesh if is_dtensor(value) else None


def is_parameter(dtensor: Any) -> bool:
    """Whether a DTensor is a ``torch.nn.Parameter``. Its class does not tell: a flag does."""
    return bool(getattr(dtensor, "_is_param", False))


def local(value: Any) -> Any:
    """A DTensor's local tensor; other values are returned as they are."""
    if not is_dtensor(value):
        return value
    tensor = value._local_tensor  # to_local() would make an autograd node, which takes microseconds
    return tensor.wait() if hasattr(tensor, "wait") else tensor  # the result of a collective that may still run


def box_of(key: str, dtensor: Any) -> str:
    """This rank's box of a DTensor as a text that can stand in a key, such as ``0-32of64,0-8of8``.

    Args:
        key: Key of the DTensor, for messages.
        dtensor: The DTensor. Its local tensor need not be plain memory.

    Raises:
        ProviderError: The local tensor is not one box of the logical tensor.
    """
    held = tuple(local(dtensor).shape)
    part = Meshes([dtensor]).part(key, dtensor, held)
    begins = part.offset or ()
    return ",".join(f"{a}-{a + n}of{size}" for a, n, size in zip(begins, held, part.global_shape, strict=False))


def around(like: Any, tensor: Any) -> Any:
    """Make a DTensor that is placed like another one, over a new local tensor of the same shape.

    Raises:
        ProviderError: The tensor has another shape than the local tensor of ``like``.
    """
    if tensor.shape != local(like).shape:
        shapes = f"{tuple(tensor.shape)} in the checkpoint, {tuple(local(like).shape)} in the live state"
        raise ProviderError(f"a DTensor with a local tensor of another shape: {shapes}")
    spec = like._spec
    if spec.tensor_meta.dtype != tensor.dtype:
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=tensor.dtype))
    torch = loaded("torch")
    made = torch.distributed.tensor.DTensor(tensor.detach(), spec, requires_grad=False)
    return torch.nn.Parameter(made, like.requires_grad) if is_parameter(like) else made


class Meshes:
    """The device meshes of the DTensors of one state, and which ranks hold the same parts.

    The ranks of a mesh run the same program, which allows two assumptions:

    - All ranks of the meshes hold each plain array of a state with DTensors. The array of the lowest rank is saved.
    - If the mesh of a DTensor is one slice of a wider mesh, the other slices hold the same tensor. An example are
      parameters without tensor parallelism among parameters with it.

    Each rank derives the answer without communication, and all ranks get the same one. That the copies are equal is
    not assumed: the ranks' digests of them are compared before the commit.
    """

    def __init__(self, values: Sequence[object]) -> None:
        """Collect the meshes of the DTensors among the values."""
        found = {id(mesh): mesh for mesh in map(mesh_of, values) if mesh is not None}
        self._ranks: dict[int, I64] = {i: np.array(mesh.mesh.tolist(), np.int64) for i, mesh in found.items()}
        self.ranks = replicas(rank for ranks in self._ranks.values() for rank in ranks.ravel().tolist())
        self._known: dict[tuple[object, ...], HeldPart] = {}

    def part(self, key: str, value: Any, shape: tuple[int, ...]) -> HeldPart:
        """This rank's part of one of the DTensors, or of a plain array among them.

        Args:
            key: Key of the array, for messages.
            value: The array.
            shape: Shape of the array in memory; for a DTensor, of its local tensor.

        Raises:
            ProviderError: The local tensor is not one box of the logical tensor.
        """
        if not is_dtensor(value):
            return HeldPart(shape, (0,) * len(shape), None, self.ranks, min(self.ranks, default=None))
        order = value._spec.shard_order
        known = (id(value.device_mesh), value.placements, order, tuple(value.shape), shape)
        if known not in self._known:
            self._known[known] = self._part(key, value, shape)
        return self._known[known]

    def _part(self, key: str, value: Any, held: tuple[int, ...]) -> HeldPart:
        mesh, placements, shape = value.device_mesh, value.placements, tuple(value.shape)
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return HeldPart(shape, None, (0, 0))  # a rank outside of the mesh holds an empty vector
        _refuse_what_is_no_box(key, value, coordinate)
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        size, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
        if held != tuple(size):
            raise ProviderError(
                f"{key!r} is a DTensor of shape {shape} with a local tensor of shape {held}, where its placements "
                f"{placements} say {tuple(size)}: it is sharded in another uneven way, or its shape is wrong "
                "(DTensor.from_local takes the right one as shape=)"
            )
        ranks = self._ranks[id(mesh)]
        for d, placement in enumerate(placements):
            if not placement.is_replicate() and (np.diff(ranks, axis=d) < 0).any():
                # torch's collectives go by rank numbers, but its offsets by positions in the mesh
                raise ProviderError(
                    f"{key!r} is a DTensor split over a mesh dimension along which ranks do not ascend, {mesh}: "
                    "torch does not say for certain which rank holds which part"
                )
        # a mesh dimension that splits the tensor: only this coordinate has the part; others: all coordinates have it
        along = [slice(None) if p.is_replicate() else c for p, c in zip(placements, coordinate, strict=True)]
        alike = ranks[tuple(along)]
        return HeldPart(shape, tuple(offset), None, replicas(np.ravel(self._in_all_slices(ranks, alike)).tolist()))

    def _in_all_slices(self, mesh: I64, alike: I64) -> I64:
        """Extend ranks of one mesh by the ranks at the same positions in other slices of the widest mesh around it."""
        around = [wide for wide in self._ranks.values() if wide.size > mesh.size and np.isin(mesh, wide).all()]
        if not around:
            return alike
        wide = max(around, key=np.size)
        at = np.argwhere(np.isin(wide, mesh))
        along = [d for d in range(wide.ndim) if len(set(at[:, d].tolist())) > 1]
        if math.prod(wide.shape[d] for d in along) != mesh.size:
            return alike  # the mesh's ranks belong to the wider mesh, but are no slice of it
        slices: I64 = np.moveaxis(wide, along, range(len(along))).reshape(mesh.size, -1)
        return slices[np.isin(slices, alike).any(axis=1)]


def _refuse_what_is_no_box(key: str, dtensor: Any, coordinate: Sequence[int]) -> None:
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    mesh, placements = dtensor.device_mesh, dtensor.placements
    names = mesh.mesh_dim_names or range(mesh.ndim)
    for name, placement in zip(names, placements, strict=True):
        if placement.is_partial():
            raise ProviderError(
                f"{key!r} is a DTensor placed {placement!r} on mesh dimension {name!r}: each rank holds a term that is "
                "still to be reduced. Save what dtensor.redistribute(placements=...) makes of it, with Replicate() or "
                "Shard(dim) in that place"
            )
        if not placement.is_replicate() and not isinstance(placement, (Shard, _StridedShard)):
            raise ProviderError(
                f"{key!r} is a DTensor placed {placement!r} on mesh dimension {name!r}, which is not known here: save "
                "what dtensor.redistribute(placements=...) makes of it, with Replicate() or Shard(dim) in that place"
            )
    order = dtensor._spec.shard_order or ()
    in_order = all(list(entry.mesh_dims) == sorted(entry.mesh_dims) for entry in order)
    strided = {p.dim for p in placements if isinstance(p, _StridedShard)}
    for dim in strided:
        splits = [
            (size, at, getattr(p, "split_factor", 1))
            for p, size, at in zip(placements, mesh.shape, coordinate, strict=True)
            if not p.is_replicate() and p.dim == dim
        ]
        in_order &= len(stretches(dtensor.shape[dim], splits)) <= 1
    if not in_order:
        raise ProviderError(
            f"{key!r} is a DTensor placed {placements}, by which this rank holds several pieces of it: save what "
            "dtensor.redistribute(placements=...) makes of it, with plain Shard(dim)s"
        )


def stretches(size: int, splits: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """The indices of one dimension that a rank holds, as stretches as long as possible: first index, one past the last.

    Args:
        size: Length of the dimension.
        splits: For each mesh dimension that splits it, in order: how many chunks, which chunk is the rank's, and the
            split factor of ``_StridedShard``. The rest after earlier splits is first cut into as many pieces as the
            factor says, and the rank gets its chunk of each piece.
    """
    held = [(0, size)]
    for count, at, factor in splits:
        held = [piece for i in range(factor) for piece in _chunk(_chunk(held, factor, i), count, at)]
    merged: list[tuple[int, int]] = []
    for begin, end in held:
        if merged and merged[-1][1] == begin:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged


def _chunk(held: Sequence[tuple[int, int]], count: int, at: int) -> list[tuple[int, int]]:
    """Cut stretches that lie end to end into ``count`` chunks, as ``torch.chunk`` does; returns chunk number ``at``."""
    length = -(-sum(end - begin for begin, end in held) // count)
    low, high = at * length, (at + 1) * length
    cut = []
    position = 0
    for begin, end in held:
        first, last = max(begin, begin + low - position), min(end, begin + high - position)
        if first < last:
            cut.append((first, last))
        position += end - begin
    return cut


# --- for thousands of values at every snapshot


def unwrap(values: Sequence[Any], classes: set[type]) -> list[Any]:
    """Replace each DTensor by its local tensor, and keep other values; ``classes`` are the DTensors' classes."""
    tensors = [v._local_tensor if type(v) in classes else v for v in values]
    if any(hasattr(t, "wait") for t in set(map(type, tensors))):
        return list(map(local, values))
    return tensors


def versions(values: Sequence[Any], classes: set[type]) -> list[int]:
    """The version counter of each DTensor itself, not of its local tensor; 0 for other values and without a counter."""
    try:
        return [v._version if type(v) in classes else 0 for v in values]
    except RuntimeError:  # tensors made in inference mode have none
        return [v._version if type(v) in classes and not v.is_inference() else 0 for v in values]


def specs(values: Sequence[Any], classes: set[type]) -> list[object]:
    """List the properties in which DTensors over the same local tensor may differ. The list keeps no tensor alive.

    Returns:
        First the spec of each value, None if it is no DTensor. Then for each value whether it is a DTensor that is a
        parameter.
    """
    found = [v._spec if type(v) in classes else None for v in values]
    return [*found, *(type(v) in classes and getattr(v, "_is_param", False) for v in values)]
