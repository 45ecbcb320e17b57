"""Arrays of torch, NumPy, CuPy and JAX as memory: their addresses, devices, shapes and strides.

This module imports none of the frameworks. An array of a framework exists only where the user has imported it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from datastates._base.loaded import loaded
from datastates.errors import ProviderError
from datastates.state import devices, dtensors, dtypes, jax_arrays, subclasses
from datastates.state.laziness import is_lazy_by_default
from datastates.state.parts import HeldPart
from datastates.state.shards import HOST, ArrayRef, Buffer, Shard
from datastates.state.strides import have_common_elements, is_dense, row_major, span


def kind_of(value: Any) -> str | None:
    """``"torch"``, ``"numpy"``, ``"cupy"`` or ``"jax"`` for an array that can be stored as plain memory, else None.

    A value with the result None is pickled. These are sparse, quantized, nested and meta tensors; subclasses of tensors
    and arrays; JAX's tracers and typed random keys; and arrays of element types that are not in
    :data:`datastates.state.dtypes.ALL`. Two kinds of subclass are ``"torch"``: DTensors, whose local tensor is stored,
    and subclasses of ``torch.nn.Parameter`` that torch pickles as parameters. A DTensor whose local tensor consists of
    others, as torchao's do, is pickled.
    """
    torch: Any = loaded("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return "torch" if _is_plain_tensor(torch, value) or _is_memory_of_dtensor(value) else None
    if type(value) in (np.ndarray, np.memmap):
        return "numpy" if _numpy_dtype(value.dtype) else None
    cupy: Any = loaded("cupy")
    if cupy is not None and type(value) is cupy.ndarray:
        return "cupy" if _numpy_dtype(value.dtype) else None
    return "jax" if jax_arrays.is_array(value) and _numpy_dtype(value.dtype) else None


def _is_memory_of_dtensor(value: Any) -> bool:
    return dtensors.is_dtensor(value) and not subclasses.is_composed(dtensors.local(value))


def _is_plain_tensor(torch: Any, value: Any) -> bool:
    return (
        subclasses.is_usual(type(value))
        and (value.is_cpu or devices.holds(value))
        and value.layout is torch.strided
        and not value.is_nested
        and _torch_dtype(value.dtype) is not None
    )


@functools.cache
def _torch_dtype(dtype: Any) -> dtypes.DType | None:
    name = str(dtype)[6:]
    return dtypes.BY_NAME[name] if name in dtypes.TORCH else None


def _numpy_dtype(dtype: Any) -> dtypes.DType | None:
    # the type strings of ml_dtypes' types, such as "<V2", do not identify them
    return dtypes.BY_NUMPY.get(dtype.str) or dtypes.BY_NUMPY.get(dtype.name)


def _dtype(array: Any) -> dtypes.DType | None:
    return _torch_dtype(array.dtype) if subclasses.is_tensor(array) else _numpy_dtype(array.dtype)


@dataclass(frozen=True, slots=True)
class _View:
    """An array as memory; a DTensor as its local tensor.

    ``pointer`` is the address of the first element. ``storage`` is the address of the torch storage, which several
    views may share; of other arrays, it is the same as ``pointer``. ``array`` keeps the memory alive.
    """

    kind: str
    dtype: dtypes.DType
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    pointer: int
    storage: int
    device: int
    array: Any

    @property
    def end(self) -> int:
        return self.pointer + span(self.shape, self.stride) * self.dtype.itemsize


def _view(array: Any) -> _View:
    whole, array = array, dtensors.local(array)
    kind = kind_of(array)
    if kind is None and array is whole:
        raise TypeError(f"not an array that can be stored as memory: {dtypes.described(array)}")
    if kind is None:
        advice = (
            "; describe each of its local_shards() by array_shard(key, shard, global_shape=..., offset=...) "
            "in a StateProvider of your own"
        )
        raise ProviderError(
            f"a DTensor whose local tensor cannot be stored as memory: {type(array).__name__} on {array.device}"
            f"{advice if hasattr(array, 'local_shards') else ''}"
        )
    if kind == "torch":
        if array.is_conj() or array.is_neg():
            array = array.detach().resolve_conj().resolve_neg()
        known = _torch_dtype(array.dtype)
        assert known is not None
        return _View(
            kind,
            known,
            tuple(array.shape),
            tuple(array.stride()),
            array.data_ptr(),
            array.untyped_storage().data_ptr(),
            HOST if array.is_cpu else devices.number(kind, array),
            array,
        )
    dtype = _numpy_dtype(array.dtype)
    assert dtype is not None
    if kind == "jax":
        return _view_of_jax(array, dtype)
    if any(s < 0 or s % dtype.itemsize for s in array.strides):
        array = array.copy(order="C")
    pointer = array.ctypes.data if kind == "numpy" else array.data.ptr
    device = HOST if kind == "numpy" else devices.number(kind, array)
    stride = tuple(s // dtype.itemsize for s in array.strides)
    return _View(kind, dtype, array.shape, stride, pointer, pointer, device, array)


def _view_of_jax(array: Any, dtype: dtypes.DType) -> _View:
    """View a JAX array on one device as memory, or else the first box of the array that this process holds."""
    owner, pointer, device = jax_arrays.memory(jax_arrays.held(array)[0][1])
    shape = tuple(owner.shape)
    stride = tuple(s // dtype.itemsize for s in owner.strides) if device == HOST else row_major(shape)
    return _View("jax", dtype, shape, stride, pointer, pointer, device, owner)


def _view_of(key: str, array: object) -> _View:
    try:
        return _view(array)
    except (TypeError, ProviderError) as error:
        raise type(error)(f"{key!r} is {error}") from None


def _compact(view: _View) -> _View:
    """Copy a view into contiguous memory, where most bytes of its span do not belong to it."""
    return _view(view.array.detach().contiguous() if view.kind == "torch" else view.array.copy(order="C"))


def shards_of(keys: Sequence[str], values: Sequence[object], lazy: Sequence[bool]) -> list[Shard]:
    """Describe whole arrays as shards; arrays that share memory share a buffer.

    Views of one storage share a buffer if together they use at least half of the bytes between the first and the last.
    Otherwise a view with many gaps is stored as a contiguous copy, without the gaps, unless views share elements.

    Args:
        keys: Keys of the arrays within the provider.
        values: The arrays. A DTensor is described as this rank's part of it. Other arrays in a list with DTensors are
            described as the same on all ranks of the DTensors' meshes. A sharded array of JAX gives a shard for each
            box of it that this process holds.
        lazy: For each array, whether it stays unchanged until the snapshot is captured.

    Raises:
        TypeError: A value is not a plain array; the message names its key.
        ProviderError: The local part of a DTensor cannot be described, or an array of JAX was donated; the message
            names its key.
    """
    rows = [row for given in zip(keys, values, lazy, strict=True) for row in _held(*given)]
    views = [_view_of(key, held) for key, _, _, held, _ in rows]
    groups: dict[tuple[int, int, int], list[int]] = {}
    for i, view in enumerate(views):
        groups.setdefault((view.device, view.storage, view.dtype.code), []).append(i)
    buffers: list[Buffer | None] = [None] * len(views)
    for members in groups.values():
        for cluster in _clusters(views, members):
            low = min(views[i].pointer for i in cluster)
            high = max(views[i].end for i in cluster)
            first = views[cluster[0]]
            owner = [views[i].array for i in cluster]
            stream = devices.current_stream(first.kind, first.device)
            buffer = Buffer(low, high - low, first.device, stream, owner)
            for i in cluster:
                buffers[i] = buffer
    meshes = dtensors.Meshes(values)
    return [
        _describe(key, view, array, buffer, part or meshes.part(key, array, view.shape), lazy=is_lazy)
        for (key, array, is_lazy, _, part), view, buffer in zip(rows, views, buffers, strict=True)
        if buffer is not None
    ]


def _held(key: str, array: Any, is_lazy: bool) -> list[tuple[str, Any, bool, Any, HeldPart | None]]:
    """The pieces of memory that this process holds of an array: key, array, whether it is lazy, piece, and part.

    The part is None if it depends on the meshes of all arrays; see :class:`datastates.state.dtensors.Meshes`.
    """
    if not jax_arrays.is_array(array):
        return [(key, array, is_lazy, array, None)]
    try:
        return [(key, array, is_lazy, data, part) for part, data in jax_arrays.held(array)]
    except ProviderError as error:
        raise ProviderError(f"{key!r} is {error}") from None


def _describe(
    key: str, view: _View, array: object, buffer: Buffer | None, part: HeldPart, *, lazy: bool = False
) -> Shard:
    return Shard(
        key=key,
        dtype=view.dtype.name,
        kind=view.kind,
        shape=view.shape,
        stride=view.stride,
        global_shape=part.global_shape,
        offset=part.offset,
        flat=part.flat,
        replicas=part.replicas,
        owner=part.owner,
        lazy=lazy,
        buffer=buffer,
        buffer_offset=0 if buffer is None else view.pointer - buffer.pointer,
        source=array,
    )


def _clusters(views: list[_View], members: list[int]) -> list[list[int]]:
    """Cut the views of one storage into groups that share a buffer; may replace views in ``views`` by copies."""
    if len(members) == 1 and is_dense(views[members[0]].shape, views[members[0]].stride):
        return [members]
    if _is_mostly_used([views[i] for i in members]):
        return [members]
    clusters: list[list[int]] = []
    end = -1
    for i in sorted(members, key=lambda i: views[i].pointer):
        if views[i].pointer < end:
            clusters[-1].append(i)
        else:
            clusters.append([i])
        end = max(end, views[i].end)
    result = []
    for cluster in clusters:
        held = [views[i] for i in cluster]
        places = [(v.pointer, v.shape, v.stride) for v in held]
        if _is_mostly_used(held) or have_common_elements(places, held[0].dtype.itemsize):
            result.append(cluster)
            continue
        for i in cluster:
            views[i] = _compact(views[i])
            result.append([i])
    return result


def _is_mostly_used(views: list[_View]) -> bool:
    used = sum(int(np.prod(v.shape, dtype=np.int64)) * v.dtype.itemsize for v in views)
    low, high = min(v.pointer for v in views), max(v.end for v in views)
    return 2 * used >= high - low


def array_shard(
    key: str,
    array: object,
    *,
    lazy: bool | None = None,
    global_shape: Sequence[int] | None = None,
    offset: Sequence[int] | None = None,
    flat: tuple[int, int] | None = None,
    replicas: Sequence[int] = (),
) -> Shard:
    """Describe an array as a shard: a whole logical tensor or, with ``global_shape``, this rank's part of one.

    Args:
        key: Key of the logical tensor within the provider.
        array: A torch, NumPy, CuPy or JAX array. A DTensor is described as this rank's part of it.
        lazy: Whether it stays unchanged until the snapshot is captured. By default only arrays of JAX, parameters, and
            tensors whose memory torch alone can write are lazy: not NumPy's or CuPy's, nor a tensor that shares its
            memory with these, with a file or with another process.
        global_shape: Shape in elements of the logical tensor, if the array is a part of one.
        offset: With ``global_shape``: the index in the logical tensor at which the array, a box, begins.
        flat: With ``global_shape``, instead of ``offset``: first and one past the last element of the flattened
            logical tensor that a one-dimensional array holds.
        replicas: The ranks that hold the same part with the same contents, this rank among them.

    Raises:
        TypeError: ``array`` is not an array that can be stored as plain memory.
        ValueError: The array is not such a part of the logical tensor.
        ProviderError: The local part of a DTensor cannot be described, or this process holds several boxes of an array
            of JAX.
    """
    shard, *more = shards_of([key], [array], [is_lazy_by_default(array) if lazy is None else lazy])
    if more:
        raise ProviderError(f"{key!r} is an array of JAX in {1 + len(more)} boxes: from_pytree takes such arrays")
    if global_shape is not None or offset is not None or flat is not None:
        begin = None if offset is None else tuple(offset)
        shard = replace(shard, global_shape=tuple(global_shape or ()), offset=begin, flat=flat)
        if (flaw := shard.part.flaw) is not None:
            raise ValueError(f"{key!r} {flaw}")
    return replace(shard, replicas=tuple(sorted(replicas))) if replicas else shard


def destination(key: str, array: Any, meshes: dtensors.Meshes | None = None) -> Shard:
    """Describe a live array to restore into, or this rank's part of a DTensor; the shard's buffer is no copy.

    The buffer is None where the array's elements do not fill their memory exactly. ``meshes`` are the device meshes of
    the array, if they are already collected.
    """
    view = _view_of(key, array)
    if view.kind == "jax":  # whole, however many boxes it has: it is only compared, and never written
        view = replace(view, shape=tuple(array.shape), stride=row_major(array.shape))
    part = (meshes or dtensors.Meshes([array])).part(key, array, view.shape)
    return _describe(key, view, array, _own_place(view, array), part)


def landing(key: str, part: HeldPart, memory: object) -> Shard:
    """Describe new contiguous memory that is to hold a part of a logical tensor."""
    view = _view_of(key, memory)
    return _describe(key, view, memory, _own_place(view, memory), part)


def _own_place(view: _View, array: object) -> Buffer | None:
    """An array's memory if its elements fill it exactly, else None."""
    if view.array is not dtensors.local(array) or not is_dense(view.shape, view.stride):
        return None
    stream = devices.current_stream(view.kind, view.device)
    return Buffer(view.pointer, view.end - view.pointer, view.device, stream, array)


def fits(ref: ArrayRef, array: Any) -> bool:
    """Whether a live array has the element type and shape of a stored one. For a DTensor the global shape counts."""
    dtype = _dtype(array)
    return dtype is not None and (dtype.name, tuple(array.shape)) == (ref.dtype, ref.shape)


def flaw(shard: Shard) -> str | None:
    """Say how a shard contradicts its live array, to follow the key in a message; None if it does not."""
    array: Any = dtensors.local(shard.source)
    if kind_of(array) is None:
        return f"is no array that can be restored in place: {type(array).__name__}"
    dtype = _dtype(array)
    if dtype is None or (dtype.name, tuple(array.shape)) != (shard.dtype, shard.shape):
        return f"is {shard.dtype} of {shard.shape}, but its source is {array.dtype} of {tuple(array.shape)}"
    return (shard.buffer and shard.buffer.flaw) or shard.part.flaw


def place(shard: Shard, stride: Sequence[int]) -> Buffer | None:
    """The memory of the shard's array, if bytes stored with these strides can be read straight into it; else None."""
    buffer = shard.buffer
    if buffer is not None and buffer.owner is shard.source and buffer.nbytes == shard.nbytes:  # it is the array's own
        return buffer if shard.stride == stride else None
    view = _view(shard.source)
    return _own_place(view, shard.source) if view.stride == stride else None


def memory(array: Any) -> Buffer:
    """Describe the memory of a new contiguous array: a torch tensor on any device, or a NumPy array."""
    if kind_of(array) != "torch":
        return Buffer(array.ctypes.data, array.nbytes, owner=array)
    device = HOST if array.is_cpu else devices.number("torch", array)
    return Buffer(array.data_ptr(), array.nbytes, device, devices.current_stream("torch", device), array)


def address(array: Any) -> int:
    """Address of an array's first element; of a DTensor, of its local tensor's."""
    return int(dtensors.local(array).data_ptr() if kind_of(array) == "torch" else _view(array).pointer)
