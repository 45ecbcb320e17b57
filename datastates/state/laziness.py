"""Which arrays are lazy by default: those that change unseen by nothing but what waits for the gate."""

from __future__ import annotations

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
    """Whether an array is lazy unless somebody says otherwise.

    Arrays of JAX on accelerators are, as they never change. Those on the CPU may be views of memory of NumPy or torch:
    ``jax.device_put`` and DLPack do not copy there, and nothing tells which are copies. Parameters are, as a torch
    optimizer's ``step()`` changes them, which waits for the gate. Other tensors are if torch alone can write their
    memory: torch counts such changes, so a snapshot that they tear fails. All other arrays may change unseen.
    """
    if not subclasses.is_tensor(array):
        return jax_arrays.is_array(array) and not jax_arrays.is_on_host(array)
    return is_parameter(array) or not _is_shared(dtensors.local(array))


def _is_shared(tensor: Any) -> bool:
    """Whether others than torch in this process can write a tensor's memory: NumPy, CuPy, a file, another process."""
    torch: Any = loaded("torch")
    if tensor.layout is not torch.strided:
        return False
    storage = tensor.untyped_storage()
    # torch fixes the size of memory that it was handed or has handed out, as by from_numpy(), numpy() and from_dlpack()
    return not storage.resizable() or (tensor.is_cpu and storage.is_shared())
