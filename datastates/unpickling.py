"""Reading ``data.pkl`` without running code from it: protocol 2 only, and nothing called that is not vetted.

Needs no torch. The mirror of :mod:`datastates.pickling`.
"""

from __future__ import annotations

import _compat_pickle
import collections
import importlib
import io
import pickle
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import MethodType
from typing import Any

from datastates import dtypes, vetted
from datastates.errors import FormatError, TrustError
from datastates.pickling import StoredArray


@dataclass(frozen=True, slots=True)
class _Storage:
    record: str
    dtype: str | None
    numel: int


# an array as this package writes it, behind the opcode of its first global; anything else is read opcode by opcode
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


_REBUILDS = ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")
# fmt: off
_OPCODES = (
    "PROTO", "STOP", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1",
    "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST",
    "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "GLOBAL", "REDUCE", "BUILD", "NEWOBJ", "BINPERSID",
    "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT",
)
# fmt: on


_PurePython: Any = (
    pickle._Unpickler
)  # typeshed does not describe the pure Python classes, which are there to be extended


class _Reader(_PurePython):  # type: ignore[misc]
    # The C unpickler allocates by numbers that the file gives (memo indexes, lengths); this one only as it reads.
    dispatch = {  # noqa: RUF012 - the base class's own table, narrowed
        getattr(pickle, name)[0]: _PurePython.dispatch[getattr(pickle, name)[0]] for name in _OPCODES
    }

    def __init__(self, data: bytes, resolve: Callable[[StoredArray], object], trust: Collection[str] | str) -> None:
        self._data = data
        self._file = io.BytesIO(data)
        super().__init__(self._file)
        self._resolve = resolve
        self.trust = trust
        self._rebuilds = [getattr(self, name) for name in _REBUILDS]
        self._foreign: dict[int, Any] = {}
        """By id: what a trusted name stands for, and what calls of those have made. Only these may do as they like."""

    def _own(self, value: Any) -> Any:
        self._foreign[id(value)] = value
        return value

    def load_global(self) -> None:
        match = _ARRAY.match(self._data, self._file.tell())
        if match is None or not self._load_array(match):
            super().load_global()

    def _load_array(self, match: re.Match[bytes]) -> bool:
        """Read a whole array at once; False when that is no array that torch has a storage class for."""
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
        function, args = self.stack[-2:]
        if type(args) is not tuple:
            raise FormatError("a call without a tuple of arguments")
        if args and isinstance(args[0], type) and issubclass(args[0], Unbuilt):
            function = self.stack[-2] = args[0]  # a subclass of arrays, say, that is to stay unbuilt
        foreign = id(function) in self._foreign
        rebuilds = isinstance(function, MethodType) and function in self._rebuilds
        if not (foreign or rebuilds or vetted.may_call(function, args)):
            raise FormatError("a call of what may not be called, or with arguments that its own pickles do not hold")
        super().load_reduce()
        if foreign:
            self._own(self.stack[-1])

    def load_newobj(self) -> None:
        if id(self.stack[-2]) not in self._foreign:
            raise FormatError("an object of a class that makes its objects otherwise")
        super().load_newobj()
        self._own(self.stack[-1])

    def load_build(self) -> None:
        target, state = self.stack[-2:]
        kind = type(target)
        if kind is collections.OrderedDict and type(state) is dict:
            super().load_build()
        elif any(c.__module__ == "numpy" and c.__name__ == "ndarray" for c in kind.__mro__):
            vetted.set_numpy_array(target, self.stack.pop())
        elif any(c.__module__ == "numpy" and c.__name__ == "dtype" for c in kind.__mro__):
            vetted.set_numpy_dtype(target, self.stack.pop())
        elif id(target) in self._foreign and not isinstance(target, type):
            super().load_build()
        else:
            raise FormatError(f"a state for a {kind.__name__}, which has none")

    def _check_target(self, target: Any, kind: type) -> None:
        if not isinstance(target, kind) and (id(target) not in self._foreign or isinstance(target, type)):
            raise FormatError(f"items for a {type(target).__name__}, which takes none")

    def load_append(self) -> None:
        self._check_target(self.stack[-2], list)
        super().load_append()

    def load_appends(self) -> None:
        self._check_target(self.metastack[-1][-1], list)
        super().load_appends()

    def load_setitem(self) -> None:
        self._check_target(self.stack[-3], dict)
        vetted.check_key(self.stack[-2])
        super().load_setitem()

    def load_setitems(self) -> None:
        self._check_target(self.metastack[-1][-1], dict)
        for key in self.stack[::2]:
            vetted.check_key(key)
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
        if full in vetted.SAFE:
            return vetted.SAFE[full]()
        if module == "torch._utils" and name in _REBUILDS:
            return getattr(self, name)
        if module == "torch" and (name in dtypes.BY_STORAGE or name in dtypes.BY_NAME):
            return vetted.torch_global(name) if name in dtypes.BY_NAME else vetted.TorchName(name)
        if full in ("torch.storage.UntypedStorage", "torch.Size", "torch.device"):
            return vetted.TorchName("UntypedStorage") if name == "UntypedStorage" else vetted.torch_global(name)
        if full in vetted.BUILT_LATE or self.trust == "all" or full in self.trust:
            return self._other_class(module, name)
        raise TrustError(full)

    def _other_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in vetted.BUILT_LATE:
            return vetted.BUILT_LATE[full]
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise FormatError(f"{full} is trusted but cannot be imported: {error}") from error
        return self._own(found)

    def persistent_load(self, pid: Any) -> _Storage:
        match pid:
            case ("storage", vetted.TorchName(name=storage), str(record), str(), int(numel)) if numel >= 0:
                dtype = dtypes.BY_STORAGE.get(storage)
                return _Storage(record, dtype.name if dtype else None, numel)
        raise FormatError("not a storage id of torch")

    def _rebuild_tensor_v2(
        self, storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, *metadata: Any
    ) -> object:
        if id(storage) in self._foreign:
            return self._tensor_over_trusted(storage, offset, shape, stride, grad, hooks, *metadata)
        if not isinstance(storage, _Storage) or storage.dtype is None:
            raise FormatError("a tensor without a typed storage")
        return self._array(storage.record, storage.dtype, storage.numel, offset, shape, stride, grad)

    def _tensor_over_trusted(self, storage: Any, *arguments: Any) -> object:
        # a tensor that was pickled whole, inside an object of another class: its storage came through trust
        if isinstance(storage, Unbuilt):
            return self._own(Unbuilt(storage, *arguments))
        import torch

        rebuild: Any = torch._utils._rebuild_tensor_v2
        return self._own(rebuild(storage, *arguments))

    def _rebuild_tensor_v3(
        self, storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *metadata: Any
    ) -> object:
        del hooks, metadata
        if not isinstance(dtype, vetted.TorchName) and type(dtype).__module__ != "torch":
            raise FormatError("a tensor without a dtype")
        name = dtype.name if isinstance(dtype, vetted.TorchName) else str(dtype).removeprefix("torch.")
        if not isinstance(storage, _Storage) or storage.dtype is not None or name not in dtypes.BY_NAME:
            raise FormatError("a tensor without an untyped storage and a dtype")
        elements = storage.numel // dtypes.BY_NAME[name].itemsize
        return self._array(storage.record, name, elements, offset, shape, stride, grad)

    def _array(self, record: str, dtype: str, elements: int, offset: Any, shape: Any, stride: Any, grad: Any) -> object:
        if not all(map(vetted.are_sizes, ((offset,), shape, stride))) or len(shape) != len(stride):
            raise FormatError(f"a tensor of record {record!r} has an impossible shape")
        return self._resolve(StoredArray(record, dtype, offset, shape, stride, elements, grad is True))

    def _rebuild_parameter(self, data: Any, requires_grad: Any, hooks: Any) -> object:
        del hooks
        if type(data).__module__ == "torch" and type(data).__name__ == "Tensor":
            import torch

            return torch.nn.Parameter(data, requires_grad is True)
        return data


class Unbuilt:
    """Stands in a structure for an object of another class: what it would be built from, and none of its code run.

    Attributes:
        arguments: What its class would be called with; the items of a named tuple.
    """

    arguments: tuple[Any, ...]

    def __new__(cls, *arguments: Any) -> Unbuilt:
        """Keep the arguments, for a class that is called and for one that is only made."""
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *arguments: Any) -> None:
        del arguments

    def _ignore(self, *state: Any) -> None:
        del state

    append = extend = __setitem__ = __setstate__ = _ignore


class _Surveyor(_Reader):
    """Reads containers and plain values, and leaves everything else unbuilt."""

    complete = True

    def _other_class(self, module: str, name: str) -> Any:
        self.complete = False
        return self._own(type(name, (Unbuilt,), {"__module__": module}))


def _no_arrays(stored: StoredArray) -> object:
    raise FormatError(f"an array (record {stored.record!r}) where none can be")


def loads(
    data: bytes,
    resolve: Callable[[StoredArray], object] = _no_arrays,
    *,
    trust: Collection[str] | str = (),
) -> Any:
    """Read a pickle back without running code from it.

    Args:
        data: A whole pickle stream.
        resolve: Supplies the object that stands for each stored array.
        trust: ``"all"``, or the classes and functions, as ``module.qualname``, that may be used beside the safe ones.

    Raises:
        TrustError: It needs a class that is not trusted.
        FormatError: It is not a pickle of this dialect.
        ImportError: ``resolve`` raised it.
        TypeError: ``trust`` is neither.
    """
    return _read(_Reader(data, resolve, trust))


def structure(data: bytes, resolve: Callable[[StoredArray], object], *, trust: Collection[str] | str = ()) -> Any:
    """Read a pickle as :func:`loads` does, but build no object of another class: :class:`Unbuilt` stands for each.

    Nothing in it depends on the arrays' elements, so that it can be read before them. Raises as :func:`loads` does.
    """
    return survey(data, resolve, trust=trust)[0]


def survey(
    data: bytes, resolve: Callable[[StoredArray], object], *, trust: Collection[str] | str = ()
) -> tuple[Any, bool]:
    """What :func:`structure` gives, and whether it is complete: nothing had to be left unbuilt."""
    reader = _Surveyor(data, resolve, trust)
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
