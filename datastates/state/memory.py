"""Allocating memory for arrays, viewing memory as arrays, and assigning arrays to each other."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from datastates._base.loaded import loaded
from datastates.state import devices, dtensors, dtypes, subclasses
from datastates.state.arrays import _view, kind_of
from datastates.state.shards import ArrayRef, Shard
from datastates.state.strides import overlap, span


def allocate(kind: str, nbytes: int, device: Any = None) -> Any:
    """Allocate memory as an array of bytes: a torch tensor if ``kind`` is ``"torch"`` and torch is installed.

    Otherwise it is a NumPy array. A tensor is in host memory, or on the CUDA device ``device``.
    """
    if kind == "torch":
        with contextlib.suppress(ImportError):
            import torch

            return torch.empty(nbytes, dtype=torch.uint8, device=device or "cpu")
    return np.empty(nbytes, np.uint8)


def reserve(nbytes: int, device: Any) -> None:
    """Let torch take memory of a CUDA device from the driver at once, to divide it later: each call costs 0.3 ms.

    Nothing is reserved where the device has not so much in one piece.
    """
    import torch

    with contextlib.suppress(torch.OutOfMemoryError):
        torch.empty(nbytes, dtype=torch.uint8, device=device)


def view(block: Any, ref: ArrayRef, offset: int) -> Any:
    """View allocated bytes as an array.

    Args:
        block: Memory from :func:`allocate`.
        ref: The array's type, shape and strides.
        offset: Where the array begins in the block, in bytes.

    Raises:
        ImportError: The element type needs torch or ml_dtypes and neither is installed, or the library lacks it.
    """
    itemsize = dtypes.BY_NAME[ref.dtype].itemsize
    if ref.kind == "torch" and kind_of(block) == "torch":
        import torch

        made = torch.empty(0, dtype=_torch_dtype(torch, ref), device=block.device)
        return made.set_(block.untyped_storage(), offset // itemsize, ref.shape, ref.stride)
    if kind_of(block) == "torch":
        block = block.numpy()
    dtype = _host_dtype(ref)
    elements = block[offset : offset + span(ref.shape, ref.stride) * itemsize].view(dtype)
    strides = tuple(s * itemsize for s in ref.stride)
    return strided(elements, ref.shape, strides) if ref.shape else elements.reshape(())


def strided(array: Any, shape: Sequence[int], strides: Sequence[int]) -> Any:
    """Do as NumPy's ``as_strided``, also for the types of ml_dtypes, which NumPy does not know; strides in bytes."""
    plain = array.view(np.dtype(f"V{array.itemsize}"))
    return np.lib.stride_tricks.as_strided(plain, shape, strides).view(array.dtype)


def region(array: Any, begin: Sequence[int], size: Sequence[int]) -> Any:
    """A box of an array, or of a DTensor's local tensor, as a view that can be copied into."""
    array = dtensors.local(array)
    if kind_of(array) == "torch":
        array = array.detach()
    # the dots make a view of a 0-d array, too
    return array[(*(slice(b, b + n) for b, n in zip(begin, size, strict=True)), ...)]


def with_grad(array: Any, requires_grad: bool) -> Any:
    """Make a torch tensor require a gradient if asked and if its type allows it; other arrays are returned as is."""
    if requires_grad and kind_of(array) == "torch" and (array.is_floating_point() or array.is_complex()):
        return array.detach().requires_grad_()
    return array


def nbytes_of(ref: ArrayRef) -> int:
    """Bytes from the first to the last element of a stored array."""
    return span(ref.shape, ref.stride) * dtypes.BY_NAME[ref.dtype].itemsize


def empty(ref: ArrayRef, device: Any = None) -> Any:
    """Allocate an array like a stored one, in host memory or on the CUDA device ``device``; its contents are undefined.

    Raises:
        ImportError: The element type needs torch or ml_dtypes and neither is installed.
    """
    block = allocate(ref.kind, nbytes_of(ref), device)
    return with_grad(view(block, ref, 0), ref.requires_grad)


def fresh(ref: ArrayRef, like: Any = None, device: Any = None) -> Any:
    """Allocate an array like a stored one, to give it to a live object; its contents are undefined.

    Args:
        ref: The stored array.
        like: The live array that the new one replaces. If it is a DTensor of the same shape, the result is a DTensor
            like it. If it is another tensor, the result is on its device.
        device: The device if there is no live tensor. A device that is not CUDA's means host memory.
    """
    if dtensors.is_dtensor(like):
        if ref.shape == tuple(like.shape):
            import torch

            return torch.empty_like(like, dtype=_torch_dtype(torch, ref), requires_grad=False)
    elif subclasses.is_tensor(like):
        device = like.device
    return empty(ref, device if devices.is_accelerator(device) else None)


def _torch_dtype(torch: Any, ref: ArrayRef) -> Any:
    # torch has names for types that it has no arrays of, such as int4
    if not dtypes.BY_NAME[ref.dtype].in_torch:
        raise ImportError(f"{ref.key!r} is of type {ref.dtype}, which torch {torch.__version__} lacks")
    return getattr(torch, ref.dtype)


def _host_dtype(ref: ArrayRef) -> Any:
    dtype = dtypes.BY_NAME[ref.dtype]
    name = dtype.numpy
    if name is None:
        hint = "install torch" if ref.kind == "torch" else "it is read as an array of torch only"
        raise ImportError(f"{ref.key!r} is of type {ref.dtype}, which NumPy lacks: {hint}")
    if name != ref.dtype:
        return np.dtype(name)
    try:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    except (ImportError, AttributeError):
        wanted = "torch or ml_dtypes" if dtype.in_torch else "a newer ml_dtypes"
        raise ImportError(f"{ref.key!r} is of type {ref.dtype}, which NumPy lacks: install {wanted}") from None


def assign(destination: Any, source: Any) -> None:
    """Copy one array into another of the same shape and dtype; libraries and strides may differ."""
    destination, source = dtensors.local(destination), dtensors.local(source)
    if kind_of(source) == "cupy" and kind_of(destination) != "cupy":
        source = source.get()
    # copy an element that a stride of 0 repeats only once: the libraries do not write through such strides
    # (the dots make a view of a 0-d array, too)
    once = (*(slice(0, 1) if s == 0 else slice(None) for s in _view(destination).stride), ...)
    if _view(source).stride == _view(destination).stride:
        destination, source = destination[once], source[once]
    torch: Any = loaded("torch")
    if torch is not None and isinstance(destination, torch.Tensor):
        with torch.inference_mode() if destination.is_inference() else torch.no_grad():
            destination.copy_(source if isinstance(source, torch.Tensor) else torch.from_numpy(source))
        return
    if torch is not None and isinstance(source, torch.Tensor):
        source = source.detach().numpy()
    if isinstance(destination, np.ndarray):
        np.copyto(destination, source)
    else:
        destination.set(source)


def convert(destination: Any, source: Any) -> None:
    """Copy an array in host memory into one of the same shape and another floating-point type, on any device."""
    if subclasses.is_tensor(destination):
        assign(destination, source)  # torch converts while it copies
    elif isinstance(destination, np.ndarray):
        np.copyto(destination, source, casting="unsafe")
    else:
        destination.set(source.astype(destination.dtype))


def note_rewritten(values: Sequence[object]) -> None:
    """Increment the version counters of the torch tensors among the values, after a write that torch did not see."""
    torch: Any = loaded("torch")
    for value in values:
        if torch is not None and isinstance(value, torch.Tensor) and not value.is_inference():
            torch.autograd.graph.increment_version(dtensors.local(value))


def why_not_writable(shard: Shard, stride: Sequence[int] | None = None) -> str | None:
    """Say why a live array cannot be restored in place, for a message; None if it can.

    Args:
        shard: The live array.
        stride: Strides of the stored array. Elements of the live array may share memory if the same elements of the
            stored array do.
    """
    array: Any = shard.source
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        return "the live array is read-only"
    if kind_of(array) == "jax":
        return "the live array is of JAX, which from_pytree alone replaces"
    if shard.stride != stride and overlap(shard.shape, shard.stride):
        return "elements of the live array share memory, and those in the checkpoint do not"
    return None
