"""JAX's arrays as memory: the boxes of them that this process holds. JAX is used only where the user has imported it.

A JAX array never changes. Its memory goes away when it is donated to a computation or deleted. In host memory, a view
by NumPy is a reference that XLA respects: a computation that the array is donated to then gets a copy. On a GPU, no
such reference is held, because it may make the computation fail: :func:`is_gone` tells afterwards.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from datastates._base.loaded import loaded
from datastates.errors import ProviderError
from datastates.state.devices import number_in_jax
from datastates.state.parts import HeldPart, replicas
from datastates.state.shards import HOST

Box = tuple[slice, ...]
XLA_ALIGNMENT = 64
"""Alignment in bytes that memory needs to serve XLA's CPU client as an array without a copy."""


def is_array(value: object) -> bool:
    """Whether a value is an array of JAX with contents: no tracer, and no array of random keys."""
    jax: Any = loaded("jax")
    if jax is None or not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return False
    return not is_key(value)


def is_key(value: Any) -> bool:
    """Whether a value is an array of typed random keys, as ``jax.random.key`` makes them, or a description of one."""
    jax: Any = loaded("jax")
    if jax is None or not isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return False
    return bool(jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key))


def processes() -> tuple[int, ...]:
    """The numbers of all of JAX's processes; empty if there is only this one. Does not start JAX's devices."""
    distributed: Any = loaded("jax._src.distributed")
    return () if distributed is None else replicas(range(distributed.global_state.num_processes))


def held(array: Any) -> list[tuple[HeldPart, Any]]:
    """The boxes of an array that this process holds, each once, in ascending order of where they begin.

    In a program of several processes, an array on the devices of this one alone must be the same in all.

    Returns:
        For each box, which part of the array it is, and the box as an array on one device.

    Raises:
        ProviderError: The array was donated or deleted, or lies on the devices of one other process.
    """
    if array.is_deleted():
        raise ProviderError("an array of JAX that was donated to a computation, or deleted")
    shape = tuple(array.shape)
    alike = processes() if array.is_fully_addressable else ()
    if 0 in shape:  # its boxes may all begin at one index
        every = replicas(device.process_index for device in array.sharding.device_set)
        return [(HeldPart(shape, (0,) * len(shape), None, alike or every), np.empty(shape, array.dtype))]
    owners, shards = holders(array.sharding, shape), array.addressable_shards
    if not shards:  # processes outside of the array's mesh hold an empty vector
        if len(where := {device.process_index for device in array.sharding.device_set}) == 1:
            raise ProviderError(
                f"an array of JAX on the devices of process {where.pop()} alone, which takes it to be the same in all: "
                "put it on devices of several processes"
            )
        return [(HeldPart(shape, None, (0, 0)), np.empty(0, array.dtype))]
    begins = ((number, origin(shards[number].index)) for number in boxes(array))
    return [(HeldPart(shape, begin, None, alike or owners[begin]), shards[n].data) for n, begin in begins]


def boxes(array: Any) -> list[int]:
    """Numbers of the addressable shards that hold an array's boxes: one for each box, in the order of their begins.

    The numbers depend on the array's sharding and shape alone.
    """
    first: dict[tuple[int, ...], int] = {}
    for number, shard in enumerate(array.addressable_shards):
        first.setdefault(origin(shard.index), number)
    return [first[begin] for begin in sorted(first)]


def origin(box: Box) -> tuple[int, ...]:
    """The index of an array at which a box begins, along each dimension."""
    return tuple(part.start or 0 for part in box)


@functools.lru_cache(maxsize=4096)  # the arrays of a state have few shardings and shapes
def holders(sharding: Any, shape: tuple[int, ...]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """For each box of an array, by the index at which it begins, the processes that hold it; empty if only one does."""
    found: dict[tuple[int, ...], set[int]] = {}
    for device, box in sharding.devices_indices_map(shape).items():
        found.setdefault(origin(box), set()).add(device.process_index)
    return {begin: replicas(ranks) for begin, ranks in found.items()}


def memory(data: Any) -> tuple[Any, int, int]:
    """Look up the memory of an array on one device, once it is computed.

    The array is copied to host memory if it is on a device other than the CPU and CUDA's GPUs, or if its elements are
    packed or in another order than NumPy's.

    Returns:
        An object that keeps the memory alive, with the array's shape, and with its strides if it is in host memory; the
        address; the CUDA device number or :data:`HOST`.
    """
    number = number_in_jax(next(iter(data.devices())))
    if number is not None and _is_plain(data):
        data.block_until_ready()
        return data, int(data.unsafe_buffer_pointer()), number
    host = np.asarray(data)
    return host, host.ctypes.data, HOST


def _is_plain(data: Any) -> bool:
    """Whether an array lies in its device's own memory, in row-major order and with whole bytes for each element."""
    if data.sharding.memory_kind not in (None, "device"):
        return False
    order = data.format.layout.major_to_minor
    is_packed = data.dtype.itemsize == 1 and data.dtype.name.endswith(("int2", "int4", "float4_e2m1fn"))
    return order == tuple(range(data.ndim)) and not is_packed


def is_on_host(array: Any) -> bool:
    """Whether an array of JAX lies on its CPU backend."""
    return _is_of_host(array.sharding)


@functools.lru_cache(maxsize=4096)
def _is_of_host(sharding: Any) -> bool:
    return any(device.platform == "cpu" for device in sharding.device_set)


def is_gone(array: Any) -> bool:
    """Whether an array was donated to a computation, or deleted."""
    return bool(array.is_deleted())


def why_not_placed(like: Any) -> str | None:
    """Say why the devices for a new array like another one are unknown, for a message; None if they are known.

    Under ``jax.set_mesh``, the sharding of a ``jax.ShapeDtypeStruct`` may name the axes of a mesh only.
    """
    try:
        sharding = placed(like).sharding
    except TypeError:  # a PartitionSpec, while there is no mesh
        return "described by a PartitionSpec, while no mesh is set: use jax.set_mesh"
    if not _is_abstract(sharding):
        return None
    return f"described by a sharding over {sharding.mesh}, while no such mesh is set: use jax.set_mesh"


def placed(like: Any) -> Any:
    """Complete a description of an array: if its sharding names only axes, take the devices of the mesh that is set."""
    jax: Any = loaded("jax")
    if not isinstance(like, jax.ShapeDtypeStruct) or not _is_abstract(like.sharding):
        return like
    mesh = jax.sharding.get_mesh()
    if mesh.empty or mesh.abstract_mesh != like.sharding.mesh:
        return like
    return like.update(sharding=jax.sharding.NamedSharding(mesh, like.sharding.spec))


def _is_abstract(sharding: Any) -> bool:
    jax: Any = loaded("jax")
    return isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)


def landings(like: Any) -> list[tuple[HeldPart, Any]]:
    """New host memory for each box that this process must hold of an array like another one.

    Args:
        like: An array, or a ``jax.ShapeDtypeStruct``.

    Returns:
        Each box with memory for it, in ascending order of where the boxes begin. The contents are undefined.
    """
    shape = tuple(like.shape)
    if like.sharding is None or 0 in shape:
        return [(HeldPart(shape, (0,) * len(shape)), _empty(shape, like.dtype))]
    begins = _boxes(like.sharding, shape)
    if not begins:
        return [(HeldPart(shape, None, (0, 0)), np.empty(0, like.dtype))]
    return [(HeldPart(shape, begin), _empty(begins[begin], like.dtype)) for begin in sorted(begins)]


def _empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """Allocate host memory that XLA's CPU client takes over without a copy; its contents are undefined."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    block = np.empty(nbytes + XLA_ALIGNMENT, np.uint8)
    begin = -block.ctypes.data % XLA_ALIGNMENT
    return block[begin : begin + nbytes].view(dtype).reshape(shape)


@functools.lru_cache(maxsize=4096)
def _boxes(sharding: Any, shape: tuple[int, ...]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The shape of each box that this process holds of an array, by the index at which the box begins."""
    found = {}
    for box in sharding.addressable_devices_indices_map(shape).values():
        found[origin(box)] = tuple(len(range(*part.indices(n))) for part, n in zip(box, shape, strict=True))
    return found


def assemble(like: Any, filled: Sequence[tuple[HeldPart, Any]]) -> Any:
    """Make an array like another one from the memory of :func:`landings`, which must not be used afterwards.

    The new array's type is weak if the other array's is: a compiled function has another trace for weak types.
    """
    made = _assembled(like, filled)
    return _weak(made) if getattr(like, "weak_type", False) else made


def _weak(array: Any) -> Any:
    """The array with a weak type, over the same memory."""
    boxes = [shard.data for shard in array.addressable_shards]
    # unpickling sets the attribute `weak_type` only: a compiled function would still take the type for a strong one
    return type(array)(array.aval.update(weak_type=True), array.sharding, boxes, committed=array.committed)


def _assembled(like: Any, filled: Sequence[tuple[HeldPart, Any]]) -> Any:
    jax: Any = loaded("jax")
    if like.sharding is None or not getattr(like, "committed", True):
        ((_, host),) = filled
        return jax.device_put(host)
    shape = tuple(like.shape)
    if 0 in shape:
        ((_, host),) = filled
        return jax.make_array_from_callback(shape, like.sharding, lambda box: host[box])
    boxes = {part.offset: host for part, host in filled}
    placed = like.sharding.addressable_devices_indices_map(shape)
    memory_kind = like.sharding.memory_kind
    single = [
        jax.device_put(boxes[origin(box)], jax.sharding.SingleDeviceSharding(device, memory_kind=memory_kind))
        for device, box in placed.items()
    ]
    return jax.make_array_from_single_device_arrays(shape, like.sharding, single, dtype=like.dtype)


def made_type(like: Any) -> Any:
    """The element type of a new array like another one. Types of 64 bits are halved unless JAX is told to keep them."""
    jax: Any = loaded("jax")
    return jax.dtypes.canonicalize_dtype(like.dtype)


def key_data(keys: Any) -> Any:
    """The array of numbers under typed random keys. For a description of keys, a description of that array."""
    jax: Any = loaded("jax")
    if isinstance(keys, jax.Array):
        return jax.random.key_data(keys)
    plain = jax.eval_shape(jax.random.key_data, keys)
    return jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=keys.sharding)


def key_name(keys: Any) -> str:
    """Name of the generator, such as ``threefry2x32``, of typed random keys or of a description of keys."""
    jax: Any = loaded("jax")
    found: list[str] = []

    def note(traced: Any) -> Any:
        found.append(str(jax.random.key_impl(traced)))
        return traced

    jax.eval_shape(note, keys)  # key_impl() itself takes no description of keys
    return found[0]


def as_keys(data: Any, name: str) -> Any:
    """Make typed random keys for the generator ``name`` from the array of numbers that :func:`key_data` gives."""
    jax: Any = loaded("jax")
    return jax.random.wrap_key_data(data, impl=name)
