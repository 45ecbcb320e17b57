"""torch's DTensors: the local tensor, and which part of the logical tensor it is."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from datastates._base.columns import I64
from datastates.errors import ProviderError


class DTensorPart(NamedTuple):
    """What a rank holds of a logical tensor; the fields are those of :class:`datastates.state.shards.Shard`."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...] | None
    flat: tuple[int, int] | None
    replicas: tuple[int, ...]


@functools.cache
def is_class(cls: Any) -> bool:
    """Whether that is torch's DTensor, or a class of its kind."""
    return any(c.__name__ == "DTensor" and c.__module__.startswith("torch.distributed") for c in cls.__mro__)


def is_dtensor(value: object) -> bool:
    """Whether a value is one of torch's DTensors."""
    cls: Any = type(value)
    return is_class(cls)


def is_parameter(dtensor: Any) -> bool:
    """Whether a DTensor was made a parameter, which leaves its class as it was."""
    return bool(getattr(dtensor, "_is_param", False))


def local(value: Any) -> Any:
    """A DTensor's local tensor, other values as they are."""
    if not is_dtensor(value):
        return value
    tensor = value._local_tensor  # to_local() would make an autograd node, in some microseconds
    return tensor.wait() if hasattr(tensor, "wait") else tensor  # of a collective that may still be under way


class Meshes:
    """The device meshes of DTensors that belong together, and which ranks hold the same parts by them.

    The ranks of a mesh run the same program. So a plain array beside DTensors is taken to be alike on all ranks of
    their meshes; and of a DTensor whose mesh is one slice of a wider mesh (parameters without tensor parallelism
    among others with it), the other slices are taken to hold the same. No rank is asked: the same answer everywhere.
    """

    def __init__(self, values: Sequence[object]) -> None:
        """The meshes of those values that are DTensors."""
        found = {id(mesh): mesh for mesh in (v.device_mesh for v in values if is_dtensor(v))}  # type: ignore[attr-defined]
        self._ranks: dict[int, I64] = {i: np.array(mesh.mesh.tolist(), np.int64) for i, mesh in found.items()}
        self.ranks = _ascending(np.concatenate(list(map(np.ravel, self._ranks.values())))) if found else ()
        self._known: dict[tuple[int, object], tuple[int, ...]] = {}

    def part(self, key: str, value: Any, shape: tuple[int, ...]) -> DTensorPart:
        """This rank's part of one of the DTensors, or of a plain array among them.

        Args:
            key: Its key, for messages.
            value: The array.
            shape: Shape of what lies in memory.

        Raises:
            ProviderError: What is local is no box of the logical tensor.
        """
        if not is_dtensor(value):
            return DTensorPart(shape, (0,) * len(shape), None, self.ranks)
        mesh, placements, held = value.device_mesh, value.placements, shape
        shape = tuple(value.shape)
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return DTensorPart(shape, None, (0, 0), ())  # torch gives ranks outside of the mesh an empty vector
        _refuse_what_is_no_box(key, value, coordinate)
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        size, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
        if held != tuple(size):
            raise ProviderError(
                f"{key!r} is a DTensor of shape {shape} with a local tensor of shape {held}, where its placements "
                f"{placements} say {tuple(size)}: it is sharded unevenly in a way of its own, or its shape is another "
                "(DTensor.from_local takes it as shape=)"
            )
        known = (id(mesh), placements)
        if known not in self._known:
            ranks = self._ranks[id(mesh)]
            for d, placement in enumerate(placements):
                if not placement.is_replicate() and (np.diff(ranks, axis=d) < 0).any():
                    # torch's collectives go by the ranks' numbers, and its offsets by their places in the mesh
                    raise ProviderError(
                        f"{key!r} is a DTensor split over a mesh dimension along which ranks do not ascend, {mesh}: "
                        "which part is whose is not certain with torch"
                    )
            # along a mesh dimension that splits it only this rank's coordinate has the same part, along others all
            along = [slice(None) if p.is_replicate() else c for p, c in zip(placements, coordinate, strict=True)]
            alike = ranks[tuple(along)]
            self._known[known] = _ascending(self._in_all_slices(ranks, alike))
        return DTensorPart(shape, tuple(offset), None, self._known[known])

    def _in_all_slices(self, mesh: I64, alike: I64) -> I64:
        """Ranks of one mesh, and those that stand where they stand in the other slices of the widest mesh around it."""
        around = [wide for wide in self._ranks.values() if wide.size > mesh.size and np.isin(mesh, wide).all()]
        if not around:
            return alike
        wide = max(around, key=np.size)
        at = np.argwhere(np.isin(wide, mesh))
        along = [d for d in range(wide.ndim) if len(np.unique(at[:, d])) > 1]
        if math.prod(wide.shape[d] for d in along) != mesh.size:
            return alike  # ranks of the wider mesh, but no slice of it
        slices: I64 = np.moveaxis(wide, along, range(len(along))).reshape(mesh.size, -1)
        return slices[np.isin(slices, alike).any(axis=1)]


NO_MESHES = Meshes([])


def _ascending(ranks: Any) -> tuple[int, ...]:
    """Ranks as a shard names its replicas: none when there is only this one."""
    unique: list[int] = np.unique(ranks).astype(int).tolist()
    return tuple(unique) if len(unique) > 1 else ()


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
    order = getattr(dtensor._spec, "shard_order", None) or ()
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
    """Which indices of a dimension are left to a rank, as maximal stretches: first index and one past the last.

    Args:
        size: Length of the dimension.
        splits: For each mesh dimension that splits it, in order: into how many chunks, which of them is the rank's, and
            into how many pieces it is cut before, of each of which the rank gets that chunk (``_StridedShard``).
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
    """One chunk of stretches that lie end to end, cut as ``torch.chunk`` cuts."""
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


# --- thousands at once, at every snapshot


def unwrap(values: Sequence[Any], classes: set[type]) -> list[Any]:
    """Values with the local tensors in the place of DTensors; ``classes`` are those of the DTensors among them."""
    tensors = [v._local_tensor if type(v) in classes else v for v in values]
    if any(hasattr(t, "wait") for t in set(map(type, tensors))):
        return list(map(local, values))
    return tensors


def versions(values: Sequence[Any], classes: set[type]) -> list[int]:
    """For each value torch's count of what was done to it as a DTensor: 0 for other values, and without a count."""
    try:
        return [v._version if type(v) in classes else 0 for v in values]
    except RuntimeError:  # tensors of the inference mode have none
        return [v._version if type(v) in classes and not v.is_inference() else 0 for v in values]


def specs(values: Sequence[Any], classes: set[type]) -> list[object]:
    """What tells a DTensor from others of the same local tensor, and keeps no tensor alive; None for other values."""
    found = [v._spec if type(v) in classes else None for v in values]
    return [*found, *(type(v) in classes and getattr(v, "_is_param", False) for v in values)]
