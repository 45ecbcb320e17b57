"""Reads the tensors and storages in a pickle. The caller supplies an object for each; no code of the pickle runs."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import MethodType
from typing import Any

from datastates.container import pickle_policy, pickle_torch
from datastates.container.pickle_machine import Machine
from datastates.container.unbuilt import Unbuilt
from datastates.errors import FormatError
from datastates.state import dtypes, subclasses
from datastates.state.shards import StoredArray
from datastates.state.strides import span


@dataclass(eq=False)
class Storage(Unbuilt):
    """A reference in a pickle to a storage in the file, from which a tensor is made.

    Attributes:
        record: The name of its record.
        kind: The name of its class in torch.
        numel: Number of the record's elements; of its bytes if its class has no element type.
        begin, count: First element and number of elements. A storage of an old torch could be a part of another one.
    """

    record: str
    kind: str
    numel: int
    begin: int
    count: int

    @property
    def is_part(self) -> bool:
        """Whether it is a part of another storage."""
        return self.count != self.numel

    @property
    def dtype(self) -> str | None:
        """The name of its element type; None if it has none, or its elements are quantized."""
        dtype = dtypes.BY_STORAGE.get(self.kind)
        return None if dtype is None else dtype.name

    @property
    def elements(self) -> tuple[str, int]:
        """Torch's name of its element type, and the bytes of an element; see :func:`elements_of`."""
        return elements_of(self.kind)


UNTYPED = "UntypedStorage"
"""The name of torch's class of storages without an element type."""


def elements_of(kind: str) -> tuple[str, int]:
    """Torch's name of a storage's element type, and the bytes of an element, given the name of the storage's class."""
    if kind in pickle_torch.QUANTIZED:
        return pickle_torch.QUANTIZED[kind][:2]
    dtype = dtypes.BY_STORAGE.get(kind, dtypes.BY_NAME["uint8"])
    return dtype.name, dtype.itemsize


# an array as this package writes it, after the opcode of its first global; other forms are read opcode by opcode
_INTEGER = rb"(?:K.|J.{4})"
_ARRAY = re.compile(
    rb"torch\._utils\n_rebuild_tensor_v2\n\(\(X\x07\0\0\0storagectorch\n(\w+)\nX(.)\0\0\0([0-9]{1,20})X\x03\0\0\0cpu"
    rb"(%b)tQ(%b)\((%b{0,64})t\((%b{0,64})t([\x88\x89])ccollections\nOrderedDict\n\)RtR" % ((_INTEGER,) * 4),
    re.DOTALL,
)


def _integers(opcodes: bytes) -> tuple[int, ...]:
    found, at = [], 0
    while at < len(opcodes):
        if opcodes[at : at + 1] == pickle.BININT1:
            found.append(opcodes[at + 1])
            at += 2
        else:
            found.append(int.from_bytes(opcodes[at + 1 : at + 5], "little", signed=True))
            at += 5
    return tuple(found)


REBUILDS = {
    "torch._utils._rebuild_tensor": "_rebuild_tensor",
    "torch._utils._rebuild_tensor_v2": "_rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3": "_rebuild_tensor_v3",
    "torch._utils._rebuild_qtensor": "_rebuild_qtensor",
    "torch._utils._rebuild_parameter": "_rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state": "_rebuild_parameter",
    "torch._utils._rebuild_wrapper_subclass": "_rebuild_wrapper_subclass",
    "torch._tensor._rebuild_from_type_v2": "_rebuild_from_type",
}


class TensorReader(Machine):
    """A pickle machine that reads tensors. Its subclasses decide which other functions may be called: ``_may_call``."""

    def __init__(
        self,
        data: bytes,
        resolve: Callable[[StoredArray], object],
        trust: Collection[str] | str,
        *,
        with_torch: bool,
    ) -> None:
        super().__init__(data)
        self._resolve = resolve
        self.trust = trust
        self._with_torch = with_torch
        self._rebuilds = [getattr(self, name) for name in REBUILDS.values()]
        self._foreign: dict[int, Any] = {}
        """By id: the objects of trusted names, and the results of calling them. Only these are unrestricted."""
        self._storages: dict[tuple[str, str, int, int], Any] = {}
        """By record, class, first element and number of elements: the storages that are values."""

    def _own(self, value: Any) -> Any:
        self._foreign[id(value)] = value
        return value

    def load_global(self) -> None:
        """Read a name, or an array that begins with it."""
        match = _ARRAY.match(self.data, self.at())
        if match is None or not self._load_array(match):
            super().load_global()

    def _load_array(self, match: re.Match[bytes]) -> bool:
        """Read a whole array at once; returns False if it has to be read opcode by opcode."""
        storage, length, record, numel, offset, shape, stride, grad = match.groups()
        dtype = dtypes.BY_STORAGE.get(storage.decode())
        (elements,) = _integers(numel)
        if dtype is None or length[0] != len(record) or elements < 0:
            return False
        (begin,) = _integers(offset)
        sizes, steps = _integers(shape), _integers(stride)
        self.seek(match.end())
        self.append(self._array(record.decode(), dtype.name, elements, begin, sizes, steps, grad == pickle.NEWTRUE))
        return True

    dispatch = {**Machine.dispatch, pickle.GLOBAL[0]: load_global}  # noqa: RUF012 - as the base class's

    def persistent_load(self, pid: Any) -> Any:
        """Read a reference to a storage. Gives a :class:`Storage` for a tensor, else a storage built by torch.

        Before torch 1.6, there are references to classes of modules, too, each with its source.
        """
        match pid:
            case ("module", kind, _, _):
                return kind
        stored = self._referred(pid)
        if self._is_of_tensor():
            return stored
        place = stored.record, stored.kind, stored.begin, stored.count
        if place not in self._storages:
            made = self._late("a storage", pickle_torch.storage, self._bytes(stored), stored.elements[0])
            self._storages[place] = made
        return self._storages[place]

    def _referred(self, pid: Any) -> Storage:
        match pid:
            case ("storage", pickle_policy.TorchName(name=kind), str(record), str(), int(numel), *part) if numel >= 0:
                pass
            case _:
                raise FormatError("not a storage id of torch")
        match part:
            case [] | [None]:
                return Storage(record, kind, numel, 0, numel)
            case [(str(), int(begin), int(count))] if 0 <= begin <= begin + count <= numel:
                return Storage(record, kind, numel, begin, count)
        raise FormatError("a part of a storage that does not lie within it")

    def _is_of_tensor(self) -> bool:
        """Whether the value being read is the first argument of a call that makes a tensor, perhaps of a subclass."""
        above = self.metastack[-1] if self.metastack else []
        return not self.stack and any(map(self._is_rebuild, above[-2:]))

    def _bytes(self, stored: Storage) -> object:
        """All elements of a storage as an array of bytes."""
        itemsize = stored.elements[1]
        whole, begin, nbytes = (n * itemsize for n in (stored.numel, stored.begin, stored.count))
        return self._array(stored.record, "uint8", whole, begin, (nbytes,), (1,), False)

    def _need_torch(self, what: str) -> None:
        if pickle_policy.torch_if(self._with_torch) is None:
            raise ImportError(f"{what} is built by torch only, which is not installed, or not wanted: framework='np'")

    def _late(self, name: str, make: Callable[..., Any], *arguments: Any) -> Any:
        """Let torch make an object from arrays that have been read. ``name`` is its name in messages."""
        self._need_torch(name)
        return make(*arguments)

    def _rebuild_tensor_v2(
        self, storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, *metadata: Any
    ) -> object:
        if id(storage) in self._foreign:
            return self._over_trusted("_rebuild_tensor_v2", storage, offset, shape, stride, grad, hooks, *metadata)
        if not isinstance(storage, Storage) or storage.dtype is None:
            raise FormatError("a tensor without a typed storage")
        if storage.is_part:
            sizes = all(map(pickle_policy.are_sizes, ((offset,), shape, stride))) and len(shape) == len(stride)
            if not sizes or offset + span(shape, stride) > storage.count:
                raise FormatError(f"a tensor reaches beyond its part of storage {storage.record!r}")
            offset += storage.begin
        made = self._array(storage.record, storage.dtype, storage.numel, offset, shape, stride, grad)
        return self._viewed(made, metadata)

    def _rebuild_tensor(self, storage: Any, offset: Any, shape: Any, stride: Any) -> object:
        """As torch wrote tensors before 0.4."""
        return self._rebuild_tensor_v2(storage, offset, shape, stride, False, None)

    def _viewed(self, made: Any, metadata: tuple[Any, ...]) -> Any:
        if not metadata or not metadata[0]:
            return made
        return self._late("a conjugate or negative view", pickle_torch.with_metadata, made, metadata[0])

    def _rebuild_qtensor(
        self, storage: Any, offset: Any, shape: Any, stride: Any, quantizer: Any, grad: Any, hooks: Any
    ) -> object:
        if id(storage) in self._foreign:
            return self._over_trusted("_rebuild_qtensor", storage, offset, shape, stride, quantizer, grad, hooks)
        if not isinstance(storage, Storage) or storage.kind not in pickle_torch.QUANTIZED or storage.is_part:
            raise FormatError("a quantized tensor without a storage of its own kind")
        form = storage.kind, offset, shape, stride, quantizer, grad
        return self._late("a quantized tensor", pickle_torch.quantized, self._bytes(storage), *form)

    def _over_trusted(self, rebuild: str, storage: Any, *arguments: Any) -> object:
        # a tensor that was pickled whole inside an object of another class: its storage came through trust
        if isinstance(storage, Unbuilt):
            return self._own(Unbuilt(storage, *arguments))
        import torch

        return self._own(getattr(torch._utils, rebuild)(storage, *arguments))

    def _rebuild_tensor_v3(
        self, storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *metadata: Any
    ) -> object:
        del hooks
        name = pickle_policy.name_in_torch(dtype)
        if not isinstance(storage, Storage) or storage.kind != UNTYPED or storage.is_part or name not in dtypes.TORCH:
            raise FormatError("a tensor without an untyped storage and a dtype")
        elements = storage.numel // dtypes.BY_NAME[name].itemsize
        return self._viewed(self._array(storage.record, name, elements, offset, shape, stride, grad), metadata)

    def _array(self, record: str, dtype: str, elements: int, offset: Any, shape: Any, stride: Any, grad: Any) -> object:
        if not all(map(pickle_policy.are_sizes, ((offset,), shape, stride))) or len(shape) != len(stride):
            raise FormatError(f"a tensor of record {record!r} has an impossible shape")
        return self._resolve(StoredArray(record, dtype, offset, shape, stride, elements, grad is True))

    def _rebuild_parameter(self, data: Any, requires_grad: Any, hooks: Any, attributes: Any = None) -> object:
        del hooks
        if subclasses.is_tensor(data):
            # with attributes it is an object of its own, apart from others over the same memory
            data = subclasses.as_parameter(data.detach() if attributes else data, requires_grad is True)
        elif (refer := getattr(data, "as_parameter", None)) is not None:  # an array that has not been read
            data = refer(requires_grad is True)
        return self._with_attributes(data, attributes)

    def _rebuild_from_type(self, function: Any, kind: Any, arguments: Any, state: Any) -> object:
        if type(arguments) is not tuple or not self._may_call(function, arguments):
            raise FormatError("a tensor is made by a function that may not be called")
        made = function(*arguments)
        if pickle_policy.name_in_torch(kind) == "Tensor":
            if state and subclasses.is_tensor(made):
                made = made.detach().requires_grad_(made.requires_grad)
            return self._with_attributes(made, state)
        if pickle_policy.name_in_torch(kind) == pickle_torch.JAGGED and type(state) is dict:
            # its own attributes follow from the arguments
            return self._with_attributes(made, {k: v for k, v in state.items() if k not in vars(made)})
        if id(kind) not in self._foreign:
            raise FormatError("a tensor of a class that is not a trusted tensor class")
        return self._own(self._of_class(kind, made, state))

    def _of_class(self, kind: Any, made: Any, state: Any) -> object:
        import torch

        return torch._tensor._rebuild_from_type_v2(lambda: made, kind, (), state)  # type: ignore[no-untyped-call]

    def _rebuild_wrapper_subclass(self, kind: Any, *arguments: Any) -> object:
        if id(kind) not in self._foreign:
            raise FormatError("a tensor of a class that is not a trusted tensor class")
        return self._own(self._wrapper(kind, arguments))

    def _wrapper(self, kind: Any, arguments: tuple[Any, ...]) -> object:
        import torch

        return torch._utils._rebuild_wrapper_subclass(kind, *arguments)  # type: ignore[no-untyped-call]

    def _with_attributes(self, made: Any, attributes: Any) -> Any:
        if not attributes:
            return made
        if type(attributes) is not dict or not all(type(name) is str for name in attributes):
            raise FormatError("the attributes of a tensor are no mapping of names")
        if subclasses.is_tensor(made):
            subclasses.set_attributes(made, attributes)
        return made

    def _is_rebuild(self, function: Any) -> bool:
        return isinstance(function, MethodType) and function in self._rebuilds
