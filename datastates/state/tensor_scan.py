"""Addresses and layouts of many torch tensors, read in one native pass through DLPack."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from datastates import _native
from datastates._base.columns import I32, I64, U8, U64
from datastates._base.loaded import loaded
from datastates.state import dtensors, dtypes
from datastates.state.devices import number_in_dlpack

ITEMSIZES: U64 = np.array([dtype.itemsize for dtype in dtypes.ALL], np.uint64)
"""Bytes of an element, by the number of its element type (:attr:`datastates.state.dtypes.DType.code`)."""


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """The result of one pass over many tensors.

    Attributes:
        places: The tensors' types, addresses, devices, element types, shapes and strides, encoded. It is equal for two
            lists exactly if all of these are equal.
        addresses: Address of each tensor's first element.
        versions: torch's version counter of each tensor's changes in place; -1 for a tensor without a counter.
        memory: For each tensor, an object that keeps its memory alive, even if the tensor is given other memory. Empty
            if not asked for.
        specs: Properties of DTensors, as :func:`datastates.state.dtensors.specs` gives them; None without DTensors.
    """

    places: bytes
    addresses: I64
    versions: I64
    memory: list[object]
    specs: list[object] | None = None


def look(values: Sequence[object], *, known: bytes = b"", memory: bool = False) -> Look | None:
    """Read types, addresses, layouts and versions of torch tensors, in some hundred nanoseconds each.

    A look does not tell whether a tensor is conjugated.

    Args:
        values: The tensors.
        known: ``Look.places`` of an earlier look. If the places are the same, the result refers to this object.
        memory: Whether to fill in ``Look.memory``. Then a negated tensor is refused, as its memory is not its values.

    Returns:
        None if a value is no torch tensor, or cannot be exchanged by DLPack's C API.
    """
    torch = loaded("torch")
    if torch is None and values:
        return None
    keeper, is_neg = (torch.Tensor.untyped_storage, torch.Tensor.is_neg) if memory and values else (None, None)
    sharded: set[type] = set()
    seen = _native.look(list(values), known, keeper, is_neg, (torch.Tensor, torch.nn.Parameter) if values else ())
    if seen is None:  # a value is of another type than these two usual ones
        types = set(map(type, values))
        if not all(issubclass(t, torch.Tensor) for t in types):
            return None
        sharded = set(filter(dtensors.is_class, types))
        seen = _native.look(dtensors.unwrap(values, sharded), known, keeper, is_neg, ())
    if seen is None:
        return None
    places, addresses, versions, kept = seen
    counts = np.frombuffer(versions, np.int64)
    specs: list[object] | None = None
    if sharded:
        # an operation on a DTensor increments its own counter, not its local tensor's
        counts = counts + dtensors.versions(values, sharded)
        specs = dtensors.specs(values, sharded)
    return Look(places, np.frombuffer(addresses, np.int64), counts, kept, specs)


split = _native.split
"""Splits a nested value by the form of an earlier one, in some ten nanoseconds for each item."""


def module_tensors(module: object) -> tuple[list[Any], list[object]] | None:
    """What ``state_dict(keep_vars=True)`` of a torch module returns, in some ten nanoseconds for each tensor.

    Returns:
        The tensors in order, and a list of the classes, versions and names that keys and metadata follow from. None if
        the module cannot be read so: a hook or a method of one of its classes has a say in the state.
    """
    return _native.module_tensors(module, loaded("torch").nn.Module)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Memory layouts of many tensors, in columns as in a container's index.

    Attributes:
        address: Address of each tensor's first element.
        device: CUDA device number of each tensor, or :data:`~datastates.state.shards.HOST`.
        dtype: Number of each tensor's element type.
        ndim: Number of dimensions of each tensor.
        dims, strides: Shapes and strides in elements, of all tensors end to end.
    """

    address: U64
    device: I32
    dtype: U8
    ndim: U8
    dims: U64
    strides: U64


def layout(values: Sequence[Any]) -> Layout | None:
    """Read the layouts of torch tensors, in some hundred nanoseconds each.

    Returns:
        The layouts. None if a value is of another class than ``torch.Tensor`` and ``torch.nn.Parameter``, cannot be
        exchanged by DLPack's C API, is complex, and so perhaps conjugated, or is negated.
    """
    torch = loaded("torch")
    if torch is None or not set(map(type, values)) <= {torch.Tensor, torch.nn.Parameter}:
        return None
    seen = _native.layout(list(values), torch.Tensor.is_neg)
    if seen is None:
        return None
    address, devices, elements, ndim, dims, strides = seen
    dtype = _mapped(np.frombuffer(elements, np.int64), _exchanged_dtypes())
    device = _mapped(np.frombuffer(devices, np.int64), _exchanged_devices)
    if dtype is None or device is None:
        return None
    return Layout(
        np.frombuffer(address, np.uint64),
        device.astype(np.int32),
        dtype.astype(np.uint8),
        np.frombuffer(ndim, np.uint8),
        np.frombuffer(dims, np.uint64),
        np.frombuffer(strides, np.uint64),
    )


def _mapped(words: I64, meaning: Callable[[int], int | None]) -> I64 | None:
    """Translate each word by ``meaning``; None if ``meaning`` gives None for a word."""
    result = np.empty_like(words)
    for word in set(words.tolist()):
        if (known := meaning(word)) is None:
            return None
        result[words == word] = known
    return result


def _exchanged_devices(word: int) -> int | None:
    return number_in_dlpack(word >> 32, word & 0xFFFFFFFF)


@functools.cache
def _exchanged_dtypes() -> Callable[[int], int | None]:
    """A function from DLPack's word for an element type, as torch writes it, to the type's number."""
    torch = loaded("torch")
    codes: dict[int, int] = {}
    for dtype in dtypes.ALL:
        seen = None
        if dtype.in_torch and "complex" not in dtype.name:
            # a view, because in deterministic mode torch.empty() fills the tensor, which fails for some types
            empty = torch.empty(0, dtype=torch.uint8, device="cpu").view(getattr(torch, dtype.name))
            seen = _native.layout([empty], torch.Tensor.is_neg)
        if seen is not None:
            codes[int(np.frombuffer(seen[2], np.int64)[0])] = dtype.code
    return codes.get
