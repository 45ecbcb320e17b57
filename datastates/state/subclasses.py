"""Tensors that are more than their elements: instances of a subclass, and tensors with attributes set on them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from datastates._base.loaded import loaded
from datastates.state import dtensors


def is_tensor(value: object) -> bool:
    """Whether a value is a torch tensor of any class."""
    torch = loaded("torch")
    return torch is not None and isinstance(value, torch.Tensor)


@functools.cache
def _is_usual(kind: Any) -> bool:
    """Whether torch pickles tensors of a class as plain tensors or parameters, without the subclass."""
    torch = loaded("torch")
    parameter = torch.nn.Parameter
    return kind is torch.Tensor or (issubclass(kind, parameter) and kind.__reduce_ex__ is parameter.__reduce_ex__)


is_usual: Callable[[Any], bool] = _is_usual


def attributes_of(values: Sequence[Any]) -> list[dict[str, Any]] | None:
    """The live ``__dict__`` of each plain tensor or parameter, ``{}`` for other values; None if all are empty."""
    found: list[Any] = [getattr(value, "__dict__", None) for value in values]
    if not any(found):
        return None
    own = [own if own and is_tensor(v) and is_usual(type(v)) else {} for v, own in zip(values, found, strict=True)]
    return own if any(own) else None


def as_parameter(tensor: Any, requires_grad: bool) -> Any:
    """Make a ``torch.nn.Parameter`` over a tensor's memory; a parameter is returned as it is."""
    torch = loaded("torch")
    parameter = torch.nn.Parameter
    return tensor if isinstance(tensor, parameter) else parameter(tensor.detach(), requires_grad)


def set_attributes(array: object, attributes: dict[str, Any]) -> None:
    """Put attributes into a tensor's ``__dict__``; no code of the tensor runs."""
    vars(array).update(attributes)


def take_attributes(live: object, restored: object) -> None:
    """Copy the attributes of a restored tensor to a live one."""
    if live is not restored and is_tensor(live) and is_tensor(restored):
        set_attributes(live, *(attributes_of([restored]) or [{}]))


def beside(live: Any, restored: Any) -> Any:
    """Move a restored tensor to the device of the live tensor that it replaces; return other values as they are.

    A tensor that consists of others and replaces a DTensor is this rank's part of it, and becomes a DTensor.

    Raises:
        ProviderError: The part has another shape than this rank's part of the live DTensor.
    """
    if dtensors.is_dtensor(live) and is_composed(restored) and not dtensors.is_dtensor(restored):
        return dtensors.around(live, beside(dtensors.local(live), restored))
    if not (is_tensor(live) and is_tensor(restored)) or is_uninitialized(restored) or _is_on(restored, live.device):
        return restored
    parameter = loaded("torch").nn.Parameter
    moved = changed(restored.detach(), lambda part: part.to(live.device))
    if isinstance(restored, parameter):
        moved = parameter(moved, restored.requires_grad)
    elif restored.requires_grad:
        moved.requires_grad_()
    # a tensor that consists of other tensors has set some attributes itself
    set_attributes(moved, {name: value for name, value in vars(restored).items() if name not in vars(moved)})
    return moved


def _is_on(tensor: Any, device: Any) -> bool:
    """Whether a tensor is on a device, and with it all tensors that it consists of.

    A tensor that was just built may name another device than its inner tensors are on.
    """
    names = tensor.__tensor_flatten__()[0] if is_composed(tensor) else ()
    parts = (getattr(tensor, name) for name in names)
    return tensor.device == device and all(_is_on(part, device) for part in parts if is_tensor(part))


def is_composed(value: object) -> bool:
    """Whether a tensor consists of other tensors and tells them by ``__tensor_flatten__``, as torchao's do."""
    return hasattr(value, "__tensor_flatten__")


def changed(tensor: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function, such as a copy to another device, to a tensor; to one that consists of others, by its parts.

    Such a tensor is made anew from the results, because not every such class has ``to()`` or ``clone()``. Other values,
    such as a DTensor's mesh, are returned as they are.
    """
    if not is_tensor(tensor):
        return tensor
    if not is_composed(tensor):
        return change(tensor)
    names, context = tensor.__tensor_flatten__()
    parts = {name: changed(getattr(tensor, name), change) for name in names}
    return type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())


def memory(parts: tuple[Any, ...]) -> Any:
    """View the memory of a subclass's tensor as a plain tensor; None if torch does not pickle it as a plain tensor.

    Args:
        parts: The result of the tensor's ``__reduce_ex__``.
    """
    torch = loaded("torch")
    if parts[0] is not torch._tensor._rebuild_from_type_v2:
        return None
    function, _, arguments, _ = parts[1]
    if function not in (torch._utils._rebuild_tensor_v2, torch._utils._rebuild_tensor_v3):
        return None
    storage, *rest = arguments
    if isinstance(storage, torch.UntypedStorage):  # the rebuild functions need a typed storage
        storage = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True)
    return function(storage, *rest)


def attributes_in(parts: tuple[Any, ...]) -> Any:
    """The attributes, last among the arguments of the function that torch pickles a subclass's tensor by; else None.

    Args:
        parts: The result of the tensor's ``__reduce_ex__``.
    """
    return parts[1][-1] if parts[0] is loaded("torch")._tensor._rebuild_from_type_v2 else None


def is_uninitialized(tensor: object) -> bool:
    """Whether a tensor has no shape yet, because it belongs to a lazy module that has seen no input."""
    torch = loaded("torch")
    return bool(torch.nn.parameter.is_lazy(tensor))
