"""New arrays for stored ones. Arrays that shared memory when they were saved share the new memory in the same way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from datastates._base.sizes import SMALL
from datastates.state import arrays, devices, dtensors, dtypes, memory, storages, subclasses
from datastates.state.provider import Saved
from datastates.state.shards import ArrayRef
from datastates.state.strides import span


def fresh(
    saved: Saved,
    keys: Iterable[str],
    like: Mapping[str, Any] | None = None,
    device: Any = None,
    *,
    of_optimizer: bool = False,
) -> dict[str, Any]:
    """Allocate an array for each of some stored arrays, to give them to a live object; their contents are undefined.

    Args:
        saved: The stored arrays.
        keys: The keys of the wanted arrays.
        like: The live arrays that the new ones replace, by key; see :func:`datastates.state.memory.fresh`.
        device: The device where there is no live tensor. A device that is not CUDA's means host memory.
        of_optimizer: Whether they are the states of an optimizer, whose numbers are :func:`counts <_without_counts>`.
    """
    like, known, keys = like or {}, saved.arrays(), dict.fromkeys(keys)
    views = shared(saved, keys, like, device, of_optimizer=of_optimizer)
    return {key: views[key] if key in views else memory.fresh(known[key], like.get(key), device) for key in keys}


def shared(
    saved: Saved, keys: Collection[str], like: Mapping[str, Any], device: Any = None, *, of_optimizer: bool = False
) -> dict[str, Any]:
    """As :func:`fresh`, but only the arrays that share memory with others of the wanted ones."""
    known, made = saved.arrays(), dict[str, Any]()
    for group in saved.sharing([key for key in keys if not dtensors.is_dtensor(like.get(key))]):
        on: dict[Any, dict[str, int]] = {}
        for key, offset in (_without_counts(group, known) if of_optimizer else group).items():
            on.setdefault(_accelerator(like.get(key), device), {})[key] = offset
        for place, offsets in on.items():
            made.update(_views({key: known[key] for key in offsets}, offsets, place))
    return made


def _without_counts(group: Mapping[str, int], known: Mapping[str, ArrayRef]) -> Mapping[str, int]:
    """Leave out the numbers that are one number in the checkpoint.

    An optimizer over flat vectors saves one count of steps for many parameters. Where each parameter has its own, the
    count of one must not count for another.
    """
    times = Counter(group.values())
    return {key: offset for key, offset in group.items() if times[offset] == 1 or known[key].shape}


def _accelerator(like: Any, usual: Any) -> Any:
    """The accelerator for a new array; None for host memory."""
    device = like.device if subclasses.is_tensor(like) else usual
    return device if devices.is_accelerator(device) else None


def _views(refs: Mapping[str, ArrayRef], offsets: Mapping[str, int], device: Any) -> dict[str, Any]:
    """Allocate memory for arrays that begin at these offsets of one record, in bytes, and view it as the arrays."""
    begin = min(offsets.values()) // SMALL * SMALL
    end = max(offsets[key] + memory.nbytes_of(ref) for key, ref in refs.items())
    kinds = {ref.kind for ref in refs.values()}
    block = memory.allocate("torch" if "torch" in kinds else kinds.pop(), end - begin, device)
    views = {key: memory.view(block, ref, offsets[key] - begin) for key, ref in refs.items()}
    return {key: memory.with_grad(view, refs[key].requires_grad) for key, view in views.items()}


def in_place(saved: Saved, live: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the states of a live optimizer that share memory with each other as the stored ones do.

    These can be restored in place.

    Args:
        saved: The stored arrays.
        live: The live states, by the keys of stored ones. DTensors are always chosen.
    """
    known = saved.arrays()
    plain = {key: array for key, array in live.items() if not dtensors.is_dtensor(array)}
    unlike: set[str] = set()
    group_of: dict[str, int] = {}
    for number, group in enumerate(saved.sharing([key for key in known if key not in live or key in plain])):
        group = _without_counts(group, known)
        origins = {_origin(key, plain.get(key), known[key], offset) for key, offset in group.items()}
        if len(origins) > 1 or None in origins:
            unlike.update(group)
        group_of.update(dict.fromkeys(group, number))
    in_storage: dict[int, list[str]] = {}
    for key, array in plain.items():
        if arrays.kind_of(array) == "torch":
            in_storage.setdefault(storages.address(array), []).append(key)
    for keys in in_storage.values():
        if len(keys) > 1:
            unlike.update(_overlapping({key: plain[key] for key in keys}, group_of))
    return {key: array for key, array in live.items() if key not in unlike}


def _origin(key: str, array: Any, ref: ArrayRef, offset: int) -> tuple[int, int] | None:
    """Where the record of a stored array would begin in live memory: device and address. None if it has no place there.

    Equal for arrays that are the same views of memory as the stored arrays are of their record.
    """
    if arrays.kind_of(array) not in ("torch", "numpy") or not arrays.fits(ref, array):
        return None
    shard = arrays.destination(key, array)
    if shard.stride != ref.stride or shard.buffer is None:
        return None
    return shard.buffer.device, arrays.address(array) - offset


def _overlapping(live: Mapping[str, Any], group_of: Mapping[str, int]) -> set[str]:
    """The keys of tensors of one storage that overlap there, although they lie in different records."""
    placed = []
    for key, array in live.items():
        shard, begin = arrays.destination(key, array), arrays.address(array)
        nbytes = span(shard.shape, shard.stride) * dtypes.BY_NAME[shard.dtype or ""].itemsize
        placed.append((begin, begin + nbytes, key))
    found: set[str] = set()
    furthest = (0, 0, "")
    for one in sorted(placed):
        group = group_of.get(one[2])
        if one[0] < furthest[1] and (group is None or group != group_of.get(furthest[2])):
            found.update((one[2], furthest[2]))
        furthest = max(furthest, one, key=lambda at: at[1])
    return found
