"""Reads ``data.pkl`` without running code from it: protocol 2 only, and only vetted calls.

Needs no torch. :mod:`datastates.container.pickle_writer` writes what it reads.
"""

from __future__ import annotations

import _compat_pickle
import collections
import datetime
import importlib
import io
import pickle
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np

from datastates.container import own_classes, pickle_policy
from datastates.errors import FormatError, TrustError
from datastates.state import dressed, dtypes
from datastates.state.shards import StoredArray


@dataclass(frozen=True, slots=True)
class _Storage:
    record: str
    dtype: str | None
    numel: int


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


_REBUILDS = {
    "torch._utils._rebuild_tensor_v2": "_rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3": "_rebuild_tensor_v3",
    "torch._utils._rebuild_parameter": "_rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state": "_rebuild_parameter",
    "torch._utils._rebuild_wrapper_subclass": "_rebuild_wrapper_subclass",
    "torch._tensor._rebuild_from_type_v2": "_rebuild_from_type",
}
_TIMES: tuple[Any, ...] = (datetime.datetime, datetime.time)
"""Classes that take a time zone as their last argument."""
_OF_TORCH = ("torch.storage.UntypedStorage", "torch.Tensor", "torch.Size", "torch.device")
# fmt: off
_OPCODES = (
    "PROTO", "STOP", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2",
    "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2",
    "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "GLOBAL", "REDUCE", "BUILD",
    "NEWOBJ", "BINPERSID", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT",
)
# fmt: on


_BYTES_EACH = 3
"""A pickler writes at least so many bytes for each container, those that put it into the memo included."""
_SLACK = 4096


_PurePython: Any = pickle._Unpickler  # typeshed does not describe the pure Python classes, made to be extended


class _Reader(_PurePython):  # type: ignore[misc]
    # The C unpickler allocates by numbers from the file (memo indexes, lengths); this one allocates only as it reads.
    dispatch = {  # noqa: RUF012 - the base class's own table, narrowed
        getattr(pickle, name)[0]: _PurePython.dispatch[getattr(pickle, name)[0]] for name in _OPCODES
    }

    def __init__(
        self, data: bytes, resolve: Callable[[StoredArray], object], trust: Collection[str] | str, *, with_torch: bool
    ) -> None:
        self._data = data
        self._file = io.BytesIO(data)
        super().__init__(self._file)
        self._resolve = resolve
        self.trust = trust
        self._with_torch = with_torch
        self._rebuilds = [getattr(self, name) for name in _REBUILDS.values()]
        self._foreign: dict[int, Any] = {}
        """By id: what trusted names stand for, and what calls of these have made. Only these are unrestricted."""
        self._made = 0

    def _charge(self, containers: int) -> None:
        """Refuse a stream of more containers than a pickler writes: one byte would cost a hundred bytes of memory."""
        self._made += containers
        if self._made > _SLACK and self._made * _BYTES_EACH > self._file.tell() + _SLACK * _BYTES_EACH:
            raise FormatError("more containers than a pickle of this length can hold")

    def _own(self, value: Any) -> Any:
        self._foreign[id(value)] = value
        return value

    def load_global(self) -> None:
        match = _ARRAY.match(self._data, self._file.tell())
        if match is None or not self._load_array(match):
            super().load_global()

    def _load_array(self, match: re.Match[bytes]) -> bool:
        """Read a whole array at once; False when it has to be read opcode by opcode."""
        storage, length, record, numel, offset, shape, stride, grad = match.groups()
        dtype = dtypes.BY_STORAGE.get(storage.decode())
        (elements,) = _integers(numel)
        if dtype is None or length[0] != len(record) or elements < 0:
            return False
        (begin,) = _integers(offset)
        sizes, steps = _integers(shape), _integers(stride)
        self._file.seek(match.end())
        self.append(self._array(record.decode(), dtype.name, elements, begin, sizes, steps, grad == pickle.NEWTRUE))
        return True

    def load_reduce(self) -> None:
        self._charge(2)
        function, args = self.stack[-2:]
        if type(args) is not tuple:
            raise FormatError("a call without a tuple of arguments")
        if args and isinstance(args[0], type) and issubclass(args[0], Unbuilt):
            function = self.stack[-2] = args[0]  # for example an array subclass, which stays unbuilt
        elif function in _TIMES and isinstance(args[-1], Unbuilt):
            function = self.stack[-2] = type(args[-1])
        foreign = id(function) in self._foreign
        if not self._may_call(function, args):
            raise FormatError("a call of a function that may not be called, or not with these arguments")
        super().load_reduce()
        if foreign:
            self._own(self.stack[-1])

    def load_newobj(self) -> None:
        kind, arguments = self.stack[-2:]
        foreign = id(kind) in self._foreign
        if not foreign and not (isinstance(kind, type) and own_classes.is_by_field(kind) and arguments == ()):
            raise FormatError("an object of an untrusted class that is not a plain dataclass made without arguments")
        super().load_newobj()
        if foreign:
            self._own(self.stack[-1])

    def load_build(self) -> None:
        target, state = self.stack[-2:]
        kind = type(target)
        if kind is collections.OrderedDict and type(state) is dict:
            super().load_build()
        elif issubclass(kind, np.ndarray):
            pickle_policy.set_numpy_array(target, self.stack.pop())
        elif issubclass(kind, np.dtype):
            pickle_policy.set_numpy_dtype(target, self.stack.pop())
        elif pickle_policy.is_generator(target):
            pickle_policy.set_generator(target, self.stack.pop())
        elif id(target) in self._foreign and not isinstance(target, type):
            super().load_build()
        elif own_classes.is_by_field(kind):
            own_classes.set_fields(target, self.stack.pop())
        else:
            raise FormatError(f"a state for a {kind.__name__}, which has none")

    def _check_target(self, target: Any, kind: type | tuple[type, ...]) -> None:
        if not isinstance(target, kind) and (id(target) not in self._foreign or isinstance(target, type)):
            raise FormatError(f"items for a {type(target).__name__}, which takes none")

    def load_append(self) -> None:
        self._check_target(self.stack[-2], (list, collections.deque))
        super().load_append()

    def load_appends(self) -> None:
        self._check_target(self.metastack[-1][-1], (list, collections.deque))
        super().load_appends()

    def load_setitem(self) -> None:
        self._check_target(self.stack[-3], dict)
        pickle_policy.check_key(self.stack[-2])
        super().load_setitem()

    def load_setitems(self) -> None:
        self._check_target(self.metastack[-1][-1], dict)
        for key in self.stack[::2]:
            pickle_policy.check_key(key)
        super().load_setitems()

    dispatch.update(  # a dispatch table holds functions, not names
        {
            pickle.GLOBAL[0]: load_global,
            pickle.REDUCE[0]: load_reduce,
            pickle.NEWOBJ[0]: load_newobj,
            pickle.BUILD[0]: load_build,
            pickle.APPEND[0]: load_append,
            pickle.APPENDS[0]: load_appends,
            pickle.SETITEM[0]: load_setitem,
            pickle.SETITEMS[0]: load_setitems,
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        module, name = _compat_pickle.NAME_MAPPING.get(
            (module, name), (_compat_pickle.IMPORT_MAPPING.get(module, module), name)
        )
        full = f"{module}.{name}"
        if full in pickle_policy.SAFE:
            return pickle_policy.SAFE[full]()
        if full in _REBUILDS:
            return getattr(self, _REBUILDS[full])
        if module == "torch" and (name in dtypes.BY_STORAGE or name in dtypes.TORCH):
            only_name = name not in dtypes.TORCH or self._is_type_of_array()
            return pickle_policy.TorchName(name) if only_name else self._of_torch(name)
        if full in _OF_TORCH:
            return self._of_torch(name) if name in ("Size", "device") else pickle_policy.TorchName(name)
        if full in pickle_policy.BUILT_LATE or self.trust == "all" or full in self.trust:
            return self._other_class(module, name)
        own = own_classes.find(module, name)
        if own is not None:
            return self._own_class(own)
        raise TrustError(full)

    def _is_type_of_array(self) -> bool:
        """Whether an element type that is looked up now is an array's, and nothing else refers to it.

        It is then the last argument, and is not put into the memo.
        """
        at = self._file.tell()
        above = self.metastack[-1] if self.metastack else ()
        return self._data[at : at + 1] == pickle.TUPLE and above[-1:] == [self._rebuild_tensor_v3]

    def _of_torch(self, name: str) -> Any:
        """A type, a shape's class or the class of devices, or what stands for it without torch."""
        if (torch := pickle_policy.torch_if(self._with_torch)) is not None:
            return getattr(torch, name)
        if name == "device":
            return self._other_class("torch", name)
        return pickle_policy.size if name == "Size" else pickle_policy.TorchName(name)

    def _own_class(self, kind: type) -> type:
        return kind

    def _other_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if module.partition(".")[0] == "torch" and pickle_policy.torch_if(self._with_torch) is None:
            raise ImportError(f"{full} is built by torch only, which is not installed, or not wanted: framework='np'")
        if full in pickle_policy.BUILT_LATE:
            return pickle_policy.BUILT_LATE[full]
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise FormatError(f"{full} is trusted but cannot be imported: {error}") from error
        return self._own(found)

    def persistent_load(self, pid: Any) -> _Storage:
        match pid:
            case ("storage", pickle_policy.TorchName(name=storage), str(record), str(), int(numel)) if numel >= 0:
                dtype = dtypes.BY_STORAGE.get(storage)
                return _Storage(record, dtype.name if dtype else None, numel)
        raise FormatError("not a storage id of torch")

    def _rebuild_tensor_v2(
        self, storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, *metadata: Any
    ) -> object:
        if id(storage) in self._foreign:
            return self._tensor_over_trusted(storage, offset, shape, stride, grad, hooks, *metadata)
        if metadata and metadata[0]:  # torch writes {"conj": True} or {"neg": True}
            raise FormatError("a conjugate or negative view of a tensor, whose bytes are not its elements")
        if not isinstance(storage, _Storage) or storage.dtype is None:
            raise FormatError("a tensor without a typed storage")
        return self._array(storage.record, storage.dtype, storage.numel, offset, shape, stride, grad)

    def _tensor_over_trusted(self, storage: Any, *arguments: Any) -> object:
        # a tensor that was pickled whole inside an object of another class: its storage came through trust
        if isinstance(storage, Unbuilt):
            return self._own(Unbuilt(storage, *arguments))
        import torch

        rebuild: Any = torch._utils._rebuild_tensor_v2
        return self._own(rebuild(storage, *arguments))

    def _rebuild_tensor_v3(
        self, storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *metadata: Any
    ) -> object:
        del hooks, metadata
        if not isinstance(dtype, pickle_policy.TorchName) and type(dtype).__module__ != "torch":
            raise FormatError("a tensor without a dtype")
        name = dtype.name if isinstance(dtype, pickle_policy.TorchName) else str(dtype).removeprefix("torch.")
        if not isinstance(storage, _Storage) or storage.dtype is not None or name not in dtypes.TORCH:
            raise FormatError("a tensor without an untyped storage and a dtype")
        elements = storage.numel // dtypes.BY_NAME[name].itemsize
        return self._array(storage.record, name, elements, offset, shape, stride, grad)

    def _array(self, record: str, dtype: str, elements: int, offset: Any, shape: Any, stride: Any, grad: Any) -> object:
        if not all(map(pickle_policy.are_sizes, ((offset,), shape, stride))) or len(shape) != len(stride):
            raise FormatError(f"a tensor of record {record!r} has an impossible shape")
        return self._resolve(StoredArray(record, dtype, offset, shape, stride, elements, grad is True))

    def _rebuild_parameter(self, data: Any, requires_grad: Any, hooks: Any, attributes: Any = None) -> object:
        del hooks
        if dressed.is_tensor(data):
            # with attributes it is an object of its own, apart from others over the same memory
            data = dressed.as_parameter(data.detach() if attributes else data, requires_grad is True)
        elif (refer := getattr(data, "as_parameter", None)) is not None:  # an array that has not been read
            data = refer(requires_grad is True)
        return self._with_attributes(data, attributes)

    def _rebuild_from_type(self, function: Any, kind: Any, arguments: Any, state: Any) -> object:
        if type(arguments) is not tuple or not self._may_call(function, arguments):
            raise FormatError("a tensor is made by a function that may not be called")
        made = function(*arguments)
        if isinstance(kind, pickle_policy.TorchName) and kind.name == "Tensor":
            if state and dressed.is_tensor(made):
                made = made.detach().requires_grad_(made.requires_grad)
            return self._with_attributes(made, state)
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
        if dressed.is_tensor(made):
            dressed.set_attributes(made, attributes)
        return made

    def _may_call(self, function: Any, arguments: tuple[Any, ...]) -> bool:
        rebuilds = isinstance(function, MethodType) and function in self._rebuilds
        if rebuilds or id(function) in self._foreign or pickle_policy.may_call(function, arguments):
            return True
        if isinstance(function, type) and own_classes.may_call(function, arguments):
            return True
        if not arguments or id(arguments[-1]) not in self._foreign:
            return False
        # the last argument came through trust
        if function in _TIMES:
            return len(arguments) == 2 and pickle_policy.may_call(function, arguments[:1])
        return function is collections.defaultdict and len(arguments) == 1


def _charged(load: Callable[[_Reader], None]) -> Callable[[_Reader], None]:
    """The function for an opcode that makes a container: it charges the reader for it first."""

    def charged(reader: _Reader) -> None:
        reader._charge(1)
        load(reader)

    return charged


for _opcode in (pickle.MARK, pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3):
    _Reader.dispatch[_opcode[0]] = _charged(_Reader.dispatch[_opcode[0]])


def needs_trust(names: Collection[str]) -> list[str]:
    """The names, given as ``module.qualname``, that a reader in a process like this one refuses without ``trust``."""
    known = {*pickle_policy.SAFE, *pickle_policy.BUILT_LATE, *_REBUILDS, *_OF_TORCH}
    others = (n for n in names if n not in known and n.removeprefix("torch.") not in dtypes.TORCH)
    return sorted(name for name in others if own_classes.find(*name.rpartition(".")[::2]) is None)


class Unbuilt:
    """Stands in a structure for an object of another class, whose code is not run.

    Attributes:
        arguments: What the class would be called with; for a named tuple, its items.
    """

    arguments: tuple[Any, ...]

    def __new__(cls, *arguments: Any) -> Unbuilt:
        """Keep the arguments, whether the pickle calls the class or makes an object by ``__new__`` alone."""
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *arguments: Any) -> None:
        del arguments

    def __call__(self, *arguments: Any) -> Unbuilt:
        """Stand for the result of a call: this may itself stand for a nested class, which a function has looked up."""
        return type(self)(*arguments)

    def _ignore(self, *state: Any) -> None:
        del state

    append = extend = __setitem__ = __setstate__ = _ignore


class _Surveyor(_Reader):
    """Reads containers and plain values, and leaves objects of other classes unbuilt."""

    complete = True

    def _other_class(self, module: str, name: str) -> Any:
        self.complete = False
        return self._own(type(name, (Unbuilt,), {"__module__": module}))

    def _own_class(self, kind: type) -> Any:
        if own_classes.has_plain_values(kind):
            return kind
        self.complete = False  # a dataclass may hold something that is still to be built
        return kind if own_classes.is_by_field(kind) else self._other_class(kind.__module__, kind.__qualname__)

    def load_newobj(self) -> None:
        if isinstance(self.stack[-2], Unbuilt):  # it stands for a nested class, which a function has looked up
            self.load_reduce()
        else:
            super().load_newobj()

    dispatch = {**_Reader.dispatch, pickle.NEWOBJ[0]: load_newobj}  # noqa: RUF012 - as the base class's

    def _of_class(self, kind: Any, made: Any, state: Any) -> object:
        return kind(made, state)

    def _wrapper(self, kind: Any, arguments: tuple[Any, ...]) -> object:
        return kind(*arguments)

    def _with_attributes(self, made: Any, attributes: Any) -> Any:
        self.complete = self.complete and not attributes  # they may hold something to be built
        return super()._with_attributes(made, None)


def _no_arrays(stored: StoredArray) -> object:
    raise FormatError(f"an array (record {stored.record!r}) where none can be")


def loads(
    data: bytes,
    resolve: Callable[[StoredArray], object] = _no_arrays,
    *,
    trust: Collection[str] | str = (),
    with_torch: bool = True,
) -> Any:
    """Read a pickle back without running code from it.

    Args:
        data: A whole pickle stream.
        resolve: Supplies the object that stands for each stored array.
        trust: ``"all"``, or the classes and functions, as ``module.qualname``, that may be used beside the safe ones.
        with_torch: Whether to import torch where it is installed, to build what is of torch. Without it, a shape is a
            tuple, and a :class:`~datastates.container.pickle_policy.TorchName` stands for an element type.

    Raises:
        TrustError: It needs a class that is not trusted.
        FormatError: It is not a pickle of this dialect.
        ImportError: ``resolve`` raised it, or an object is of torch, which is not installed or not wanted.
        TypeError: ``trust`` is neither ``"all"`` nor a list of names.
    """
    return _read(_Reader(data, resolve, trust, with_torch=with_torch))


def survey(
    data: bytes,
    resolve: Callable[[StoredArray], object],
    *,
    trust: Collection[str] | str = (),
    with_torch: bool = True,
) -> tuple[Any, bool]:
    """Read a pickle as :func:`loads` does, but build no object of another class: :class:`Unbuilt` stands for each.

    Nothing in it depends on the arrays' elements, so it can be read before them. Raises as :func:`loads` does.

    Returns:
        The value, and whether it is complete, so that nothing is left to be built.
    """
    reader = _Surveyor(data, resolve, trust, with_torch=with_torch)
    return _read(reader), reader.complete


def check_trust(trust: Collection[str] | str) -> None:
    """Raise TypeError for what is neither ``"all"`` nor a list of names."""
    if trust != "all" and (isinstance(trust, str) or not all(isinstance(name, str) for name in trust)):
        raise TypeError(f'trust: "all" or a list of names such as "module.Class", not {trust!r}')


def _read(reader: _Reader) -> Any:
    check_trust(reader.trust)
    try:
        return reader.load()
    except (FormatError, ImportError):
        raise
    except Exception as error:
        # a damaged pickle can fail anywhere, also inside a trusted class
        raise FormatError(f"objects cannot be decoded: {type(error).__name__}: {error}") from error
