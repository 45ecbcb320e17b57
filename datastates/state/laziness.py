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


def is_updated_in_backward(parameter: Any) -> bool:
    """Whether hooks take a parameter's gradient: they may update it during ``backward()``, without a ``step()``.

    Hooks of torch and DeepSpeed send gradients to other ranks. If they update, they do so by a ``step()``.
    """
    hooks = parameter._post_accumulate_grad_hooks, parameter._backward_hooks
    return any(map(_is_of_user, (hook for some in hooks if some for hook in some.values())))


def _is_of_user(hook: Any) -> bool:
    return str(getattr(hook, "func", hook).__module__).partition(".")[0] not in ("torch", "deepspeed")


def changes_outside_of_steps(parameter: Any) -> bool:
    """Whether it is known of a parameter that more than an optimizer's ``step()`` in this process may change it."""
    if is_updated_in_backward(parameter):
        return True
    tensor = dtensors.local(parameter)
    return bool(tensor.is_cpu and tensor.layout is loaded("torch").strided and tensor.untyped_storage().is_shared())


def is_lazy_by_default(array: object) -> bool:
    """Whether an array is lazy unless the user or the provider says otherwise.

    - JAX's arrays on accelerators are lazy: they never change. JAX's arrays on the CPU are not: they may share memory
      with NumPy or torch, because ``jax.device_put`` and DLPack do not copy there.
    - Parameters are lazy: an optimizer's ``step()`` changes them, which waits for the gate. Those with hooks on their
      gradients are not, nor those in memory that is shared with other processes or a file.
    - Other tensors are lazy if torch alone can write their memory. torch counts such writes, so a snapshot that they
      tear fails.
    - All other arrays may change unseen, so they are not lazy.
    """
    if not subclasses.is_tensor(array):
        return jax_arrays.is_array(array) and not jax_arrays.is_on_host(array)
    if is_parameter(array):
        return not changes_outside_of_steps(array)
    return not _is_shared(dtensors.local(array))


def are_lazy_by_default(tensors: Sequence[Any], storages: Sequence[Any]) -> list[bool]:
    """The same for torch's strided tensors, whose storages are known, in some ten nanoseconds each."""
    torch: Any = loaded("torch")
    if torch is not None and set(map(type, tensors)) <= {torch.Tensor, torch.nn.Parameter}:
        on_host = [storage for tensor, storage in zip(tensors, storages, strict=True) if tensor.is_cpu]
        kind = torch.UntypedStorage
        if all(map(kind.resizable, storages)) and not any(map(kind.is_shared, on_host)):
            return [type(tensor) is torch.Tensor or not is_updated_in_backward(tensor) for tensor in tensors]
    return list(map(is_lazy_by_default, tensors))


def _is_shared(tensor: Any) -> bool:
    """Whether NumPy, CuPy, a file or another process can write a tensor's memory, besides torch in this process."""
    torch: Any = loaded("torch")
    if tensor.layout is not torch.strided:
        return False
    storage = tensor.untyped_storage()
    # torch cannot resize memory that it shares with others through from_numpy(), numpy() or from_dlpack()
    return not storage.resizable() or (tensor.is_cpu and storage.is_shared())
