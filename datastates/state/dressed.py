"""Tensors that are more than their elements: of a subclass, or with attributes of their own."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any


def is_tensor(value: object) -> bool:
    """Whether a value is a tensor of torch, of whatever class."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


@functools.cache
def _is_usual(kind: Any) -> bool:
    """Whether torch pickles a class of tensors as plain ones or as parameters: it keeps no subclass of those."""
    torch: Any = sys.modules["torch"]
    parameter = torch.nn.Parameter
    return kind is torch.Tensor or (issubclass(kind, parameter) and kind.__reduce_ex__ is parameter.__reduce_ex__)


is_usual: Callable[[Any], bool] = _is_usual


def attributes_of(values: Sequence[Any]) -> list[dict[str, Any]] | None:
    """What plain tensors and parameters have beside their elements, live; None where no one has anything."""
    found: list[Any] = [getattr(value, "__dict__", None) for value in values]
    if not any(found):
        return None
    own = [own if own and is_tensor(v) and is_usual(type(v)) else {} for v, own in zip(values, found, strict=True)]
    return own if any(own) else None


def as_parameter(tensor: Any, requires_grad: bool) -> Any:
    """A parameter over a tensor's memory; one that is a parameter, as it is."""
    torch: Any = sys.modules["torch"]
    parameter = torch.nn.Parameter
    return tensor if isinstance(tensor, parameter) else parameter(tensor.detach(), requires_grad)


def set_attributes(array: object, attributes: dict[str, Any]) -> None:
    """Give a tensor attributes; they are noted only, and no code of the tensor's runs."""
    vars(array).update(attributes)


def take_attributes(live: object, restored: object) -> None:
    """Give a live tensor what a restored one has beside its elements."""
    if live is not restored and is_tensor(live) and is_tensor(restored):
        set_attributes(live, *(attributes_of([restored]) or [{}]))


def memory(parts: tuple[Any, ...]) -> Any:
    """The plain tensor over the memory of a subclass, of which torch says how to pickle it; None for others."""
    torch: Any = sys.modules["torch"]
    if parts[0] is not torch._tensor._rebuild_from_type_v2:
        return None
    function, _, arguments, _ = parts[1]
    if function not in (torch._utils._rebuild_tensor_v2, torch._utils._rebuild_tensor_v3):
        return None
    storage, *rest = arguments
    if isinstance(storage, torch.UntypedStorage):  # which torch itself only rebuilds with a typed one around it
        storage = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True)
    return function(storage, *rest)


def is_uninitialized(tensor: object) -> bool:
    """Whether a tensor is one of a lazy module that has seen no input yet."""
    torch: Any = sys.modules["torch"]
    return bool(torch.nn.parameter.is_lazy(tensor))
