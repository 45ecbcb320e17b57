"""Many tensors of torch looked at in one native pass, by way of DLPack: where they lie, and how they are laid out."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from datastates import _native
from datastates._base.columns import I32, I64, U8, U64
from datastates.state import dtensors, dtypes
from datastates.state.shards import HOST

ITEMSIZES: U64 = np.array([dtype.itemsize for dtype in dtypes.ALL], np.uint64)
"""Bytes an element, by the number of its type."""


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """What one pass over many tensors saw.

    Attributes:
        places: Where they lie and how they are laid out: types, addresses, devices, element types, shapes, strides.
        addresses: For each, where its first element is.
        versions: For each, torch's count of its changes in place, the free witness of D7; -1 without one.
        memory: For each, what keeps its memory alive, whatever other memory it is given; empty where not asked for.
        specs: Which parts DTensors are; None where there are none.
    """

    places: bytes
    addresses: I64
    versions: I64
    memory: list[object]
    specs: list[object] | None = None


def look(values: Sequence[object], *, memory: bool = False) -> Look | None:
    """Look at torch tensors, in some hundred nanoseconds each; None for other arrays, and for torch before 2.10.

    It does not see whether a tensor is conjugated or negated. ``memory``: ask for what keeps their memory alive, too.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None and values:
        return None
    keeper = torch.Tensor.untyped_storage if memory and values else None
    sharded: set[type] = set()
    seen = _native.look(list(values), keeper, (torch.Tensor, torch.nn.Parameter) if values else ())
    if seen is None:  # one is of another type: these, the usual ones, need not be sorted out
        types = set(map(type, values))
        if not all(issubclass(t, torch.Tensor) for t in types):
            return None
        sharded = set(filter(dtensors.is_class, types))
        seen = _native.look(dtensors.unwrap(values, sharded), keeper, ())
    if seen is None:
        return None
    places, addresses, versions, kept = seen
    counts = np.frombuffer(versions, np.int64)
    specs: list[object] | None = None
    if sharded:
        # what is done to a DTensor counts as a change of it, and not of its local tensor
        counts = counts + dtensors.versions(values, sharded)
        specs = dtensors.specs(values, sharded)
    return Look(places, np.frombuffer(addresses, np.int64), counts, kept, specs)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """How many tensors lie in memory, in columns like those of an index.

    Attributes:
        address: Where the first element is.
        device: CUDA device number, or :data:`~datastates.state.shards.HOST`.
        dtype: Number of the element type.
        ndim: Number of dimensions.
        dims, strides: Shapes and strides in elements, tensors end to end.
    """

    address: U64
    device: I32
    dtype: U8
    ndim: U8
    dims: U64
    strides: U64


def layout(values: Sequence[Any]) -> Layout | None:
    """How torch tensors are laid out, in some hundred nanoseconds each; None for all that :func:`look` cannot see.

    None, too, when one is of complex numbers, which may be conjugated, or stands for the negative of its memory.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not set(map(type, values)) <= {torch.Tensor, torch.nn.Parameter}:
        return None
    seen = _native.layout(list(values))
    if seen is None or any_negated(values):
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
    """What each word means; None when one has no meaning."""
    known = list(map(meaning, words.tolist()))
    return None if None in known else np.array(known, np.int64)


def _exchanged_devices(word: int) -> int | None:
    kind, number = word >> 32, word & 0xFFFFFFFF
    return {1: HOST, 2: number}.get(kind)  # DLPack's kDLCPU and kDLCUDA


@functools.cache
def _exchanged_dtypes() -> Callable[[int], int | None]:
    """DLPack's words for the element types, as torch writes them, to our numbers."""
    torch: Any = sys.modules.get("torch")
    codes: dict[int, int] = {}
    for dtype in dtypes.ALL:
        seen = None
        if hasattr(torch, dtype.name) and "complex" not in dtype.name:
            # a view: in deterministic mode torch fills what is made empty, and cannot for every type
            seen = _native.layout([torch.empty(0, dtype=torch.uint8, device="cpu").view(getattr(torch, dtype.name))])
        if seen is not None:
            codes[int(np.frombuffer(seen[2], np.int64)[0])] = dtype.code
    return codes.get


def contiguous(ndim: U8, dims: U64, strides: U64) -> tuple[I64, np.ndarray[Any, np.dtype[np.bool_]]]:
    """For each of many shapes, laid end to end, its number of elements, and whether they lie one after the other."""
    starts = np.cumsum(ndim, dtype=np.int64) - ndim
    count, result = np.ones(len(ndim), np.int64), np.ones(len(ndim), bool)
    for n in set(ndim.tolist()) - {0}:
        rows = np.flatnonzero(ndim == n)
        entries = starts[rows][:, None] + np.arange(n)
        sizes, steps = dims[entries].astype(np.int64), strides[entries].astype(np.int64)
        beyond = np.cumprod(sizes[:, ::-1], axis=1)[:, ::-1]
        count[rows] = beyond[:, 0]
        expected = np.append(beyond[:, 1:], np.ones((len(rows), 1), np.int64), axis=1)
        result[rows] = ((steps == expected) | (sizes == 1)).all(axis=1)
    return count, result


def any_negated(tensors: Sequence[object]) -> bool:
    """Whether one of torch's tensors stands for the negative of what its memory says."""
    torch: Any = sys.modules.get("torch")
    sharded = set(filter(dtensors.is_class, set(map(type, tensors))))
    found = dtensors.unwrap(tensors, sharded) if sharded else tensors
    return any(map(torch.Tensor.is_neg, found)) if found else False
