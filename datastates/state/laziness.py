"""Which arrays are lazy by default: every change of them waits for the gate, or is counted by torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from datastates._base.loaded import loaded
from datastates.state import dtensors, jax_arrays, subclasses


def is_parameter(array: object) -> bool:
    """Whether an array is a ``torch.nn.Parameter``."""
    torch: Any = loaded("torch")
    if dtensors.is_dtensor(array):
        return dtensors.is_parameter(array)
    return torch is not None and issubclass(type(array), torch.nn.Parameter)


def is_lazy_by_default(array: object) -> bool:
    """Whether an array is lazy unless the user or the provider says otherwise.

    - JAX's arrays on accelerators are lazy: they never change. JAX's arrays on the CPU are not: they may share memory
      with NumPy or torch, because ``jax.device_put`` and DLPack do not copy there.
    - Parameters are lazy: an optimizer's ``step()`` changes them, which waits for the gate.
    - Other tensors are lazy if torch alone can write their memory. torch counts such writes, so a snapshot that they
      tear fails.
    - All other arrays may change unseen, so they are not lazy.
    """
    if not subclasses.is_tensor(array):
        return jax_arrays.is_array(array) and not jax_arrays.is_on_host(array)
    return is_parameter(array) or not _is_shared(dtensors.local(array))


def are_lazy_by_default(tensors: Sequence[Any], storages: Sequence[Any]) -> list[bool]:
    """The same for torch's strided tensors, whose storages are known, in some ten nanoseconds each."""
    torch: Any = loaded("torch")
    if torch is not None and set(map(type, tensors)) <= {torch.Tensor, torch.nn.Parameter}:
        on_host = [storage for tensor, storage in zip(tensors, storages, strict=True) if tensor.is_cpu]
        kind = torch.UntypedStorage
        if all(map(kind.resizable, storages)) and not any(map(kind.is_shared, on_host)):
            return [True] * len(tensors)
    return list(map(is_lazy_by_default, tensors))


def _is_shared(tensor: Any) -> bool:
    """Whether NumPy, CuPy, a file or another process can write a tensor's memory, besides torch in this process."""
    torch: Any = loaded("torch")
    if tensor.layout is not torch.strided:
        return False
    storage = tensor.untyped_storage()
    # torch cannot resize memory that it shares with others through from_numpy(), numpy() or from_dlpack()
    return not storage.resizable() or (tensor.is_cpu and storage.is_shared())
