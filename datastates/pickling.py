"""The dialect of ``data.pkl``, pickle protocol 2: a writer that needs no torch, a reader that runs no code.

Arrays inside an object are written the way ``torch.save`` writes them, as a call of
``torch._utils._rebuild_tensor_v2`` over a persistent storage id, so that ``torch.load`` finds tensors there (layout
read off torch 2.13's own files). The reader takes the same stream to pieces without torch, admits the opcodes of
protocol 2 only, and finds nothing but the globals listed here and those that the caller trusts.
"""

from __future__ import annotations

import _compat_pickle
import builtins
import codecs
import collections
import importlib
import io
import pickle
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from datastates import dtypes
from datastates.errors import FormatError, TrustError

PROTOCOL = 2
_HEADER = pickle.PROTO + bytes([PROTOCOL])


@dataclass(frozen=True, slots=True, eq=False)
class ArrayLeaf:
    """An array inside an object that is being written.

    Attributes:
        key: The key, within the provider, of the array shard that holds it.
        requires_grad: torch's flag.
        parameter: Whether it is a ``torch.nn.Parameter``.
    """

    key: str
    requires_grad: bool = False
    parameter: bool = False


@dataclass(frozen=True, slots=True)
class StoredArray:
    """Where the elements of an array are in the container, as ``data.pkl`` says it.

    Attributes:
        record: Name of the storage record (the part after ``data/``).
        dtype: Element type.
        offset: Elements from the record's begin.
        shape: Elements along each dimension.
        stride: Elements to step along each dimension.
        elements: Elements of that type in the whole record.
        requires_grad: torch's flag.
    """

    record: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    elements: int
    requires_grad: bool = False


# --- writing ---------------------------------------------------------------------------------------------------------


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return pickle.BININT1 + bytes([value])
    if -(2**31) <= value < 2**31:
        return pickle.BININT + struct.pack("<i", value)
    data = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return pickle.LONG1 + bytes([len(data)]) + data


def _text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data


def _integers(values: tuple[int, ...]) -> bytes:
    return pickle.MARK + b"".join(map(_integer, values)) + pickle.TUPLE


def _flag(value: bool) -> bytes:
    return pickle.NEWTRUE if value else pickle.NEWFALSE


_NO_HOOKS = b"ccollections\nOrderedDict\n)R"


def encode_array(stored: StoredArray, *, parameter: bool = False) -> bytes:
    """The opcodes that ``torch.save`` would write for a tensor; they touch no memo, so they can stand anywhere."""
    dtype = dtypes.BY_NAME[stored.dtype]
    typed = dtype.storage is not None
    numel = stored.elements if typed else stored.elements * dtype.itemsize
    storage = f"ctorch\n{dtype.storage}\n" if typed else "ctorch.storage\nUntypedStorage\n"
    persistent = (
        pickle.MARK
        + _text("storage")
        + storage.encode()
        + _text(stored.record)
        + _text("cpu")
        + _integer(numel)
        + pickle.TUPLE
        + pickle.BINPERSID
    )
    body = (
        f"ctorch._utils\n_rebuild_tensor_v{2 if typed else 3}\n".encode()
        + pickle.MARK
        + persistent
        + _integer(stored.offset)
        + _integers(stored.shape)
        + _integers(stored.stride)
        + _flag(stored.requires_grad and not parameter)
        + _NO_HOOKS
        + (b"" if typed else f"ctorch\n{stored.dtype}\n".encode())
        + pickle.TUPLE
        + pickle.REDUCE
    )
    if parameter:
        head = b"ctorch._utils\n_rebuild_parameter\n" + pickle.MARK
        body = head + body + _flag(stored.requires_grad) + _NO_HOOKS + pickle.TUPLE + pickle.REDUCE
    return body


class _Writer(pickle._Pickler):
    """The pure Python pickler, with :class:`ArrayLeaf` written as what ``locate`` says of it.

    The C pickler cannot write a reference to a global of a module that is not installed; this one is told the bytes.
    """

    def __init__(self, file: io.BytesIO, locate: Callable[[ArrayLeaf], StoredArray] | None) -> None:
        super().__init__(file, PROTOCOL)
        self._locate = locate

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if type(obj) is bytes and not obj:
            # torch's weights_only reader knows this form, not the one that Python prefers for no bytes at all
            self.save_reduce(codecs.encode, ("", "latin1"), obj=obj)  # type: ignore[attr-defined]
            return
        if type(obj) is not ArrayLeaf:
            super().save(obj, save_persistent_id)  # type: ignore[misc]
            return
        known = self.memo.get(id(obj))  # type: ignore[attr-defined]
        if known is not None:
            self.write(self.get(known[0]))  # type: ignore[attr-defined]
            return
        if self._locate is None:
            raise pickle.PicklingError("an array leaf outside of a provider's tree")
        self.write(encode_array(self._locate(obj), parameter=obj.parameter))  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]


def dumps(value: object, locate: Callable[[ArrayLeaf], StoredArray] | None = None) -> bytes:
    """Serialize a value as a pickle of protocol 2.

    Args:
        value: Anything that pickles; :class:`ArrayLeaf` objects in it stand for arrays.
        locate: Says where an array leaf's elements are stored.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: The value does not pickle.
    """
    file = io.BytesIO()
    _Writer(file, locate).dump(value)
    return file.getvalue()


def body(stream: bytes) -> bytes:
    """A pickle without its first and last opcode: what pushes one object, to be spliced into a larger pickle.

    A spliced body may reuse memo numbers of its neighbours: it reads only what it has put there itself.
    """
    return stream[len(_HEADER) : -1]


def stream(spliced: bytes) -> bytes:
    """The mirror of :func:`body`."""
    return _HEADER + spliced + pickle.STOP


def mapping_frame(key: str) -> bytes:
    """The opcodes that stand before a value in a spliced mapping: its key."""
    return _text(key)


MAPPING_BEGIN = pickle.EMPTY_DICT + pickle.MARK
MAPPING_END = pickle.SETITEMS


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Storage:
    record: str
    dtype: str | None
    numel: int


class _Global:
    """A reference to a torch global that the reader understands without torch."""

    def __init__(self, name: str) -> None:
        self.name = name


def _rebuild_numpy(subtype: object, shape: object, kind: object) -> Any:
    # NumPy itself only ever writes an empty array here and fills it by __setstate__; a file that says more wants memory
    import numpy as np

    if subtype is not np.ndarray or shape != (0,) or kind not in (b"b", "b"):
        raise FormatError("a NumPy array is rebuilt with arguments that NumPy does not write")
    return np.ndarray((0,), "b")


def _numpy_dtype(*args: Any) -> Any:
    import numpy as np

    return np.dtype(*args)


def _numpy_scalar(dtype: Any, data: Any) -> Any:
    import numpy as np

    if dtype.hasobject or not isinstance(data, bytes) or len(data) != dtype.itemsize:
        raise FormatError("a NumPy scalar does not fit its type")
    return np.frombuffer(data, dtype)[0]


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise FormatError(f"bytes are encoded as {encoding!r}, not latin1")
    return text.encode("latin1")


def _bytearray(*args: Any) -> bytearray:
    if args and not isinstance(args[0], (bytes, str)):
        raise FormatError("a bytearray is built from something else than bytes")
    return bytearray(*args)


def _sparse(layout: Any, parts: Any) -> Any:
    # torch rebuilds without looking at the indices; from a file they must be looked at
    import torch

    if layout is torch.sparse_coo:
        indices, values, size, coalesced = parts
        return torch.sparse_coo_tensor(indices, values, size, check_invariants=True, is_coalesced=coalesced)
    outer, inner, values, size = parts
    return torch.sparse_compressed_tensor(outer, inner, values, size, layout=layout, check_invariants=True)


def _meta(dtype: Any, size: Any, stride: Any, requires_grad: Any) -> Any:
    import torch

    return torch.empty_strided(size, stride, dtype=dtype, device="meta", requires_grad=requires_grad)


def _ndarray() -> Any:
    import numpy as np

    return np.ndarray


_BUILTINS: tuple[type, ...] = (set, frozenset, complex, slice, range)
_SAFE: dict[str, Callable[[], Any]] = {
    **{f"builtins.{c.__name__}": partial(getattr, builtins, c.__name__) for c in _BUILTINS},
    "builtins.bytearray": lambda: _bytearray,
    "collections.OrderedDict": lambda: collections.OrderedDict,
    "collections.Counter": lambda: collections.Counter,
    "_codecs.encode": lambda: _encode,
    "numpy.ndarray": _ndarray,
    "numpy.dtype": lambda: _numpy_dtype,
    **{f"numpy.{m}.multiarray._reconstruct": lambda: _rebuild_numpy for m in ("core", "_core")},
    **{f"numpy.{m}.multiarray.scalar": lambda: _numpy_scalar for m in ("core", "_core")},
}
_BUILT_LATE = {
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch.serialization._get_layout": lambda name: _torch_global(str(name).removeprefix("torch.")),
}
"""Needs its arrays' elements, or torch: only built when these have been read."""
_REBUILDS = ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")
# fmt: off
_OPCODES = (
    "PROTO", "STOP", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1",
    "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST",
    "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "GLOBAL", "REDUCE", "BUILD", "NEWOBJ", "BINPERSID",
    "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT",
)
# fmt: on


class _Reader(pickle._Unpickler):
    # The C unpickler allocates by numbers that the file gives (memo indexes, lengths); this one only as it reads.
    dispatch = {  # noqa: RUF012 - the base class's own table, narrowed
        getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _OPCODES
    }

    def __init__(
        self, file: io.BytesIO, resolve: Callable[[StoredArray], object], trust: Collection[str] | str
    ) -> None:
        super().__init__(file)
        self._resolve = resolve
        self._trust = trust

    def find_class(self, module: str, name: str) -> Any:
        module, name = _compat_pickle.NAME_MAPPING.get(
            (module, name), (_compat_pickle.IMPORT_MAPPING.get(module, module), name)
        )
        full = f"{module}.{name}"
        if full in _SAFE:
            return _SAFE[full]()
        if module == "torch._utils" and name in _REBUILDS:
            return getattr(self, name)
        if module == "torch" and (name in dtypes.BY_STORAGE or name in dtypes.BY_NAME):
            return _torch_global(name) if name in dtypes.BY_NAME else _Global(name)
        if full in ("torch.storage.UntypedStorage", "torch.Size", "torch.device"):
            return _Global("UntypedStorage") if name == "UntypedStorage" else _torch_global(name)
        if full in _BUILT_LATE or self._trust == "all" or full in self._trust:
            return self._other_class(module, name)
        raise TrustError(full)

    def _other_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in _BUILT_LATE:
            return _BUILT_LATE[f"{module}.{name}"]
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found

    def persistent_load(self, pid: Any) -> _Storage:
        match pid:
            case ("storage", _Global(name=storage), str(record), str(), int(numel)) if numel >= 0:
                dtype = dtypes.BY_STORAGE.get(storage)
                return _Storage(record, dtype.name if dtype else None, numel)
        raise FormatError(f"not a storage id of torch: {pid!r:.200}")

    def _rebuild_tensor_v2(
        self, storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, *metadata: Any
    ) -> object:
        del hooks, metadata
        if not isinstance(storage, _Storage) or storage.dtype is None:
            raise FormatError("a tensor without a typed storage")
        return self._array(storage, storage.dtype, storage.numel, offset, shape, stride, grad)

    def _rebuild_tensor_v3(
        self, storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *metadata: Any
    ) -> object:
        del hooks, metadata
        name = dtype.name if isinstance(dtype, _Global) else str(dtype).removeprefix("torch.")
        if not isinstance(storage, _Storage) or storage.dtype is not None or name not in dtypes.BY_NAME:
            raise FormatError("a tensor without an untyped storage and a dtype")
        elements = storage.numel // dtypes.BY_NAME[name].itemsize
        return self._array(storage, name, elements, offset, shape, stride, grad)

    def _array(
        self, storage: _Storage, dtype: str, elements: int, offset: Any, shape: Any, stride: Any, grad: Any
    ) -> object:
        shape, stride = tuple(shape), tuple(stride)
        numbers = (offset, *shape, *stride)
        if len(shape) != len(stride) or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
            raise FormatError(f"a tensor of record {storage.record!r} has an impossible shape")
        return self._resolve(StoredArray(storage.record, dtype, offset, shape, stride, elements, grad is True))

    @staticmethod
    def _rebuild_parameter(data: Any, requires_grad: Any, hooks: Any) -> object:
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

    def _other_class(self, module: str, name: str) -> Any:
        return type(name, (Unbuilt,), {"__module__": module})


def _torch_global(name: str) -> Any:
    try:
        import torch
    except ImportError:
        return _Global(name)
    return getattr(torch, name)


def loads(
    data: bytes,
    resolve: Callable[[StoredArray], object] | None = None,
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
    """
    return _read(_Reader, data, resolve or _no_arrays, trust)


def structure(data: bytes, resolve: Callable[[StoredArray], object], *, trust: Collection[str] | str = ()) -> Any:
    """Read a pickle as :func:`loads` does, but build no object of another class: :class:`Unbuilt` stands for each.

    Nothing in it depends on the arrays' elements, so that it can be read before them. Raises as :func:`loads` does.
    """
    return _read(_Surveyor, data, resolve, trust)


def _read(
    reader: type[_Reader], data: bytes, resolve: Callable[[StoredArray], object], trust: Collection[str] | str
) -> Any:
    try:
        return reader(io.BytesIO(data), resolve, trust).load()
    except FormatError:
        raise
    except ImportError as error:
        raise FormatError(f"a trusted class cannot be imported: {error}") from error
    except Exception as error:
        # a damaged pickle can fail anywhere, also inside a trusted class
        raise FormatError(f"objects cannot be decoded: {type(error).__name__}: {error}") from error


def _no_arrays(stored: StoredArray) -> object:
    raise FormatError(f"an array (record {stored.record!r}) where none can be")
