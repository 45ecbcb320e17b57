"""Builds torch's objects for an untrusted pickle. All functions raise FormatError for arguments torch does not write.

They need torch, or the elements of arrays: they are called only once the arrays have been read.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

from datastates._base.loaded import loaded
from datastates.container import pickle_policy
from datastates.errors import FormatError
from datastates.state.strides import span

QUANTIZED = {
    "QInt8Storage": ("qint8", 1, 1),
    "QUInt8Storage": ("quint8", 1, 1),
    "QInt32Storage": ("qint32", 4, 1),
    "QUInt4x2Storage": ("quint4x2", 1, 2),
    "QUInt2x4Storage": ("quint2x4", 1, 4),
}
"""The element type of each quantized storage, the bytes of an element, and how many elements of a tensor it holds."""
_BY_TENSOR = "per_tensor_affine"
_BY_CHANNEL = ("per_channel_affine", "per_channel_affine_float_qparams")
VALUES = (
    *(_BY_TENSOR, "per_tensor_symmetric", *_BY_CHANNEL, "per_channel_symmetric"),
    *(dtype for dtype, *_ in QUANTIZED.values()),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
)
"""Quantization schemes, and the element types of tensors that are no plain memory."""
JAGGED = "nested._internal.nested_tensor.NestedTensor"
"""The class of nested tensors with the layout ``torch.jagged``, within torch."""

_LAYOUTS = [f"torch.{n}" for n in ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")]


def layout(name: Any) -> Any:
    """Torch's layout with this name, such as ``torch.sparse_coo``."""
    if name not in _LAYOUTS:
        raise FormatError("not a layout of torch")
    import torch

    return getattr(torch, name.removeprefix("torch."))


def _are_tensors(values: Any) -> bool:
    return all(type(v).__module__ == "torch" and type(v).__name__ == "Tensor" for v in values)


def sparse(layout: Any, parts: Any) -> Any:
    """Make a sparse tensor of a layout from its four parts, with checked indices."""
    # torch's own rebuild function does not check the indices, but indices from a file must be checked
    import torch

    if not isinstance(parts, tuple) or len(parts) != 4:
        raise FormatError("a sparse tensor is not made of four parts")
    if layout is torch.sparse_coo:
        indices, values, size, coalesced = parts
        if not (_are_tensors((indices, values)) and pickle_policy.are_sizes(size) and type(coalesced) is bool):
            raise FormatError("a sparse tensor is not made of tensors and sizes")
        return torch.sparse_coo_tensor(
            indices, values, size, device=values.device, check_invariants=True, is_coalesced=coalesced
        )
    outer, inner, values, size = parts
    if not (_are_tensors((outer, inner, values)) and pickle_policy.are_sizes(size)):
        raise FormatError("a sparse tensor is not made of tensors and sizes")
    return torch.sparse_compressed_tensor(
        outer, inner, values, size, layout=layout, device=values.device, check_invariants=True
    )


def nested(buffer: Any, *parts: Any) -> Any:
    """Make a nested tensor over a buffer, from the sizes, strides and offsets of its tensors."""
    import torch

    if len(parts) != 3 or not _are_tensors((buffer, *parts)):
        raise FormatError("a nested tensor is not made of four tensors")
    parts = tuple(part.cpu() for part in parts)
    sizes, strides, offsets = (part.tolist() for part in parts)
    whole = buffer.dim() == 1 and buffer.is_contiguous() and all(part.dtype is torch.int64 for part in parts)
    if not whole or [part.dim() for part in parts] != [2, 2, 1] or not len(sizes) == len(strides) == len(offsets):
        raise FormatError("a nested tensor is made of tensors of other types or shapes than torch writes")
    for size, stride, offset in zip(sizes, strides, offsets, strict=True):
        all_sizes = all(map(pickle_policy.are_sizes, ((offset,), tuple(size), tuple(stride))))
        if not all_sizes or len(size) != len(stride) or offset + span(size, stride) > buffer.numel():
            raise FormatError("a nested tensor reaches beyond its buffer")
    return torch._nested_view_from_buffer(buffer, *parts)


def jagged(arguments: Any) -> Any:
    """Make a nested tensor with the layout ``torch.jagged`` from its parts, by their names."""
    from torch.nested._internal.nested_tensor import NestedTensor

    match arguments:
        case {
            "values": values,
            "offsets": offsets,
            "lengths": lengths,
            "_ragged_idx": int(dim),
            "_metadata_cache": dict() as known,
            "requires_grad": bool(),
        } if len(arguments) == 6:
            pass
        case _:
            raise FormatError("a jagged tensor is not made of the parts that torch writes")
    if not _are_tensors((values, offsets, *([] if lengths is None else [lengths]), *known.values())):
        raise FormatError("a jagged tensor is not made of tensors")
    begins, counts = offsets.tolist(), None if lengths is None else lengths.tolist()
    if offsets.dim() != 1 or offsets.is_floating_point() or len(begins) < 2 or not 0 < dim <= values.dim():
        raise FormatError("a jagged tensor has offsets of another type or shape than torch writes")
    counts = [b - a for a, b in itertools.pairwise(begins)] if counts is None else counts
    ends = [begin + count for begin, count in zip(begins, counts, strict=False)]
    if len(ends) != len(begins) - 1 or begins[0] < 0 or min(counts) < 0 or max(ends) > values.shape[dim - 1]:
        raise FormatError("a jagged tensor reaches beyond its values")
    extremes = {"min_seqlen": min(counts), "max_seqlen": max(counts)}
    if any(value.shape != (extremes.get(name), 0) for name, value in known.items()):
        raise FormatError("a jagged tensor states lengths that it does not have")
    return NestedTensor(**arguments)


def meta(dtype: Any, size: Any, stride: Any, requires_grad: Any) -> Any:
    """Make a tensor without elements, on the device ``meta``."""
    import torch

    if not (
        pickle_policy.are_sizes(size)
        and pickle_policy.are_sizes(stride)
        and isinstance(dtype, torch.dtype)
        and type(requires_grad) is bool
    ):
        raise FormatError("a meta tensor is not made of sizes")
    return torch.empty_strided(size, stride, dtype=dtype, device="meta", requires_grad=requires_grad)


def generator(device: Any) -> Any:
    """Make a random number generator for a device."""
    import torch

    if type(device) is not torch.device:
        raise FormatError("a random number generator is not for a device")
    return torch.Generator(device)


def declared() -> dict[str, Any]:
    """The classes and functions that ``torch.serialization.add_safe_globals`` was given, by their names in a pickle."""
    serialization = loaded("torch.serialization")
    entries = () if serialization is None else serialization.get_safe_globals()
    pairs = (e if isinstance(e, tuple) else (e, f"{e.__module__}.{e.__qualname__}") for e in entries)
    return {name: item for item, name in pairs}


def is_generator(value: object) -> bool:
    """Whether a value is a random number generator of torch."""
    torch = loaded("torch")
    return torch is not None and isinstance(value, torch.Generator)


def set_generator(generator: Any, state: Any) -> None:
    """Set a generator's state; torch checks the state's contents."""
    match state:
        case (int(), None | int(), tensor) if _are_tensors((tensor,)):
            generator.__setstate__(state)
        case _:
            raise FormatError("a random number generator has a state that torch does not write")


def quantized(data: Any, kind: str, offset: Any, shape: Any, stride: Any, quantizer: Any, requires_grad: Any) -> Any:
    """Make a quantized tensor over the bytes of its storage, which is of the class ``kind``."""
    import torch

    dtype, itemsize, packed = QUANTIZED[kind]
    sizes = all(map(pickle_policy.are_sizes, ((offset,), shape, stride))) and len(shape) == len(stride)
    if not sizes or not _are_tensors((data,)) or (offset + span(shape, stride)) * itemsize > data.numel() * packed:
        raise FormatError("a quantized tensor reaches beyond its storage")
    like = {"dtype": getattr(torch, dtype), "device": data.device}
    empty: Any
    scheme = pickle_policy.name_in_torch(quantizer[0]) if isinstance(quantizer, tuple) and quantizer else ""
    match quantizer:
        case (_, float(scale), int(point)) if scheme == _BY_TENSOR:
            empty = torch._empty_affine_quantized(shape, scale=scale, zero_point=point, **like)
        case (_, scales, points, int(axis)) if scheme in _BY_CHANNEL:
            if not _are_tensors((scales, points)) or not 0 <= axis < len(shape):
                raise FormatError("a quantized tensor has scales that are no tensors")
            if not scales.shape == points.shape == (shape[axis],):
                raise FormatError("a quantized tensor has another number of scales than of channels")
            form = {"scales": scales, "zero_points": points, "axis": axis}
            empty = torch._empty_per_channel_affine_quantized(shape, **form, **like)
        case _:
            raise FormatError("a quantized tensor is made from arguments that torch does not write")
    return empty.set_(data.untyped_storage(), offset, shape, stride).requires_grad_(requires_grad is True)


def with_metadata(tensor: Any, metadata: Any) -> Any:
    """Mark a tensor as the conjugate or the negative of its stored elements; returns it."""
    import torch

    if not _are_tensors((tensor,)) or type(metadata) is not dict or not metadata.keys() <= {"conj", "neg"}:
        raise FormatError("a tensor has metadata that torch does not write")
    torch._C._set_tensor_metadata(tensor, {name: flag is True for name, flag in metadata.items()})  # type: ignore[attr-defined]
    return tensor


def storage(data: Any, dtype: str) -> Any:
    """The storage of a tensor of bytes as ``torch.load`` gives it: with an element type, even if saved without one."""
    import torch

    if not _are_tensors((data,)):
        raise FormatError("a storage is built by torch only")
    kind: Any = torch.storage.TypedStorage
    memory: Any = data.untyped_storage()
    if data.numel() != memory.nbytes():  # a part of another storage
        memory = memory[data.storage_offset() : data.storage_offset() + data.numel()]
    return kind(wrap_storage=memory, dtype=getattr(torch, dtype), _internal=True)


def uninitialized(kind: str, *arguments: Any) -> Any:
    """Make a parameter or buffer of a lazy module that has seen no input yet."""
    import torch

    match arguments:
        case (bool(requires_grad),):
            return getattr(torch.nn.parameter, kind)(requires_grad)
        case _:
            raise FormatError("an uninitialized tensor is made from arguments that torch does not write")


BUILT_LATE = {
    "torch._utils._rebuild_sparse_tensor": sparse,
    "torch._utils._rebuild_meta_tensor_no_storage": meta,
    "torch.serialization._get_layout": layout,
    "torch._C.Generator": generator,
    "torch._utils._rebuild_nested_tensor": nested,
    "torch.nested._internal.nested_tensor._rebuild_njt": jagged,
    **{
        f"torch.nn.parameter.{kind}": partial(uninitialized, kind)
        for kind in ("UninitializedParameter", "UninitializedBuffer")
    },
}
"""Functions by their names in a pickle."""
