"""What objects are made of, down to the bits, so that two of them can be compared."""

from __future__ import annotations

import functools
import struct
import types
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Portrait = dict[str, object]
"""By the path to a part: what that part is."""


@dataclass(frozen=True)
class Bits:
    """One tensor of plain elements.

    Attributes:
        head: Its class, element type, shape, strides, device and flags.
        memory: Where its elements lie: the path of the first tensor in the same storage, and the offset there.
        data: Its elements, in the order of its indices.
    """

    head: tuple[object, ...]
    memory: tuple[str, int]
    data: bytes

    def __str__(self) -> str:
        start = [*struct.unpack(f"{min(len(self.data), 16) // 4}f", self.data[: min(len(self.data), 16) // 4 * 4])]
        return f"{self.head} in {self.memory}, as floats {start}..."


def portrait(objects: Mapping[str, object]) -> Portrait:
    """The parts of some objects: tensors, attributes, items of containers. What is shared between them is told."""
    walk = _Walk()
    for name, value in objects.items():
        walk.on(name, value)
    return walk.found


def differences(ours: Portrait, stock: Portrait) -> list[str]:
    """What differs between two portraits: a line for each part."""
    lines = []
    for path in {**stock, **ours}:
        found, wanted = ours.get(path, "nothing"), stock.get(path, "nothing")
        if found != wanted:
            lines.append(f"{path}: {found}, with stock {wanted}"[:400])
    return lines


_ATOMS = (type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, type(...))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodWrapperType, type)
# what belongs to the process, not to the state
_OUTSIDE = (types.ModuleType, weakref.ref, torch.utils.hooks.RemovableHandle)


class _Walk:
    def __init__(self) -> None:
        self.found: Portrait = {}
        self._seen: dict[int, str] = {}
        self._storages: dict[int, str] = {}
        self._kept: list[object] = []  # an object that is gone gives its id to another

    def on(self, path: str, value: Any) -> None:
        if isinstance(value, _ATOMS):
            self.found[path] = value if type(value) is not bool else repr(value)
        elif isinstance(value, (float, complex)):
            self.found[path] = (type(value).__name__, float(value.real).hex(), float(value.imag).hex())
        elif isinstance(value, _FUNCTIONS):
            self.found[path] = getattr(value, "__qualname__", type(value).__name__)
        elif isinstance(value, _OUTSIDE):
            self.found[path] = type(value).__name__
        elif id(value) in self._seen:
            self.found[path] = f"the same as {self._seen[id(value)]}"
        else:
            if not isinstance(value, tuple):  # whether two that cannot change are one is no matter
                self._seen[id(value)] = path
            self._kept.append(value)
            self._open(path, value)

    def _open(self, path: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(path, value)
            return
        if isinstance(value, (torch.TypedStorage, torch.UntypedStorage)):
            plain = getattr(value, "_untyped_storage", value)
            self.found[path] = (type(value).__qualname__, getattr(value, "dtype", None), bytes(plain.tolist()))
            return
        self.found[path] = type(value).__qualname__
        if isinstance(value, np.ndarray):
            self.found[path] = (str(value.dtype), value.shape, value.tobytes())
        elif isinstance(value, np.generic):
            self.found[path] = (str(value.dtype), value.tobytes())
        elif isinstance(value, torch.Generator):
            self.on(f"{path}.state", value.get_state())
        elif isinstance(value, torch.ScriptObject):
            self.on(f"{path}.state", value.__getstate__())
        elif isinstance(value, functools.partial):
            self._items(path, [value.func, value.args, value.keywords])
        elif isinstance(value, Mapping):
            for i, (key, item) in enumerate(value.items()):
                self.on(f"{path}[{self._key(f'{path}.keys[{i}]', key)}]", item)
        elif isinstance(value, (list, tuple, deque)):
            self._items(path, value)
        elif isinstance(value, (set, frozenset)):
            self.found[path] = (type(value).__qualname__, sorted(map(repr, value)))
        self._attributes(path, value)

    def _items(self, path: str, items: Any) -> None:
        self.found[f"{path}.length"] = len(items)
        for i, item in enumerate(items):
            self.on(f"{path}[{i}]", item)

    def _key(self, path: str, key: Any) -> str:
        """The name of a mapping's key; tensors, by which optimizers keep states, have that of their place."""
        if not isinstance(key, torch.Tensor):
            return repr(key)
        self.on(path, key)
        return self._seen[id(key)]

    def _attributes(self, path: str, value: Any) -> None:
        own = dict(getattr(value, "__dict__", {}))
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name != "__weakref__" and hasattr(value, name):
                    own[name] = getattr(value, name)
        if isinstance(value, torch.optim.Optimizer):  # names the parameters, by which states are kept
            self.on(f"{path}.param_groups", own["param_groups"])
            del own["param_groups"]
        for name, item in own.items():
            if _is_state(name):
                self.on(f"{path}.{name}", item)

    def _tensor(self, path: str, tensor: torch.Tensor) -> None:
        kind = type(tensor).__qualname__
        attributes = dict(vars(tensor))
        if torch.nn.parameter.is_lazy(tensor):
            self.found[path] = (kind, "uninitialized", tensor.dtype, tensor.requires_grad)
            return
        shape = None if tensor.is_nested else tuple(tensor.shape)
        flags = (kind, tensor.dtype, shape, str(tensor.device), tensor.layout, tensor.requires_grad)
        if tensor.is_nested:
            self.found[path] = flags
            attributes = {name: value for name, value in attributes.items() if name not in ("_size", "_strides")}
            attributes["parts"] = [part.detach() for part in tensor.unbind()]
        elif hasattr(tensor, "__tensor_flatten__"):
            names, context = tensor.__tensor_flatten__()
            self.found[path] = (*flags, repr(context))
            attributes |= {name: getattr(tensor, name) for name in names}
        elif tensor.is_sparse:
            whole = tensor.detach().coalesce()
            self.found[path] = (*flags, tensor.is_coalesced())
            attributes |= {"indices": whole.indices(), "values": whole.values()}
        elif tensor.layout is not torch.strided or tensor.is_meta:
            self.found[path] = (*flags, repr(tensor))
        elif tensor.is_quantized:
            self.found[path] = (*flags, tensor.qscheme())
            attributes |= {"elements": tensor.int_repr(), **_scales(tensor)}
        else:
            self.found[path] = self._bits(path, tensor.detach().as_subclass(torch.Tensor), flags)
        for name, item in attributes.items():
            if _is_state(name):
                self.on(f"{path}.{name}", item)

    def _bits(self, path: str, plain: torch.Tensor, flags: tuple[object, ...]) -> Bits:
        place = plain.untyped_storage().data_ptr()
        shared = self._storages.setdefault(place, path) if place else path
        self._kept.append(plain)
        # a copy, as memory that NumPy has seen can no longer be resized
        copy = plain.resolve_conj().resolve_neg().clone().contiguous().flatten()
        data = copy.view(torch.uint8).numpy().tobytes()
        return Bits((*flags, plain.stride()), (shared, plain.storage_offset()), data)


def _is_state(name: str) -> bool:
    """Whether an attribute is neither hooks nor what the compiler notes."""
    return "hook" not in name and "dynamo" not in name


def _scales(tensor: torch.Tensor) -> dict[str, object]:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return {"scale": tensor.q_scale(), "zero": tensor.q_zero_point()}
    return {"scales": tensor.q_per_channel_scales(), "zeros": tensor.q_per_channel_zero_points()}
