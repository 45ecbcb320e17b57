"""Writes the dialect of ``data.pkl``, pickle protocol 2, without torch.

:mod:`datastates.container.pickle_reader` reads it.

Arrays are written the way ``torch.save`` of torch 2.13 writes them, so that ``torch.load`` finds tensors there. Each is
a call of ``torch._utils._rebuild_tensor_v2`` over a persistent storage id; types without a storage class use v3.
"""

from __future__ import annotations

import codecs
import copyreg
import functools
import io
import pickle
import pickletools
import struct
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

from datastates.container.pickle_tensors import UNTYPED, elements_of
from datastates.state import dtypes
from datastates.state.depth import deeper
from datastates.state.shards import ArrayLeaf, StoredArray

PROTOCOL = 2
_HEADER = pickle.PROTO + bytes([PROTOCOL])


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return pickle.BININT1 + bytes([value])
    if -(2**31) <= value < 2**31:
        return pickle.BININT + struct.pack("<i", value)
    data = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return pickle.LONG1 + bytes([len(data)]) + data


def text(value: str) -> bytes:
    """The opcodes of a string. As a key of a mapping, they stand before the opcodes of its value."""
    data = value.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data


def _integers(values: tuple[int, ...]) -> bytes:
    return pickle.MARK + b"".join(map(_integer, values)) + pickle.TUPLE


def _flag(value: bool) -> bytes:
    return pickle.NEWTRUE if value else pickle.NEWFALSE


_NO_HOOKS = b"ccollections\nOrderedDict\n)R"


def _storage_head(kind: str) -> bytes:
    """The opcodes before the record's name in a reference to a storage, given the name of the storage's class."""
    module = "torch.storage" if kind == UNTYPED else "torch"
    return pickle.MARK + text("storage") + f"c{module}\n{kind}\n".encode()


def _storage_tail(record: str, numel: int) -> bytes:
    return text(record) + text("cpu") + _integer(numel) + pickle.TUPLE + pickle.BINPERSID


def _encode_storage(stored: StoredArray, kind: str) -> bytes:
    """The opcodes that ``torch.save`` would write for a storage; ``stored`` are its bytes."""
    return _storage_head(kind) + _storage_tail(stored.record, stored.elements // elements_of(kind)[1])


@functools.cache
def array_frame(dtype: dtypes.DType) -> tuple[bytes, bytes]:
    """The opcodes of an array of this type before its record's name, and the opcodes after its ``requires_grad``."""
    dtype = dtypes.pickled(dtype)
    typed = dtype.storage is not None
    head = f"ctorch._utils\n_rebuild_tensor_v{2 if typed else 3}\n".encode() + pickle.MARK
    head += _storage_head(dtype.storage or UNTYPED)
    return head, _NO_HOOKS + (b"" if typed else f"ctorch\n{dtype.name}\n".encode()) + pickle.TUPLE + pickle.REDUCE


def encode_array(stored: StoredArray, *, parameter: bool = False) -> bytes:
    """The opcodes that ``torch.save`` would write for a tensor; they use no memo, so they can stand anywhere."""
    dtype = dtypes.pickled(dtypes.BY_NAME[stored.dtype])
    head, tail = array_frame(dtype)
    body = (
        head
        + _storage_tail(stored.record, stored.elements if dtype.storage else stored.elements * dtype.itemsize)
        + _integer(stored.offset)
        + _integers(stored.shape)
        + _integers(stored.stride)
        + _flag(stored.requires_grad and not parameter)
        + tail
    )
    if parameter:
        head = b"ctorch._utils\n_rebuild_parameter\n" + pickle.MARK
        body = head + body + _flag(stored.requires_grad) + _NO_HOOKS + pickle.TUPLE + pickle.REDUCE
    return body


_PurePython: Any = pickle._Pickler  # typeshed does not describe the pure Python classes, which are there to be extended


_whichmodule: Any = pickle.whichmodule  # type: ignore[attr-defined]


class _Writer(_PurePython):  # type: ignore[misc]
    """The pure Python pickler; it writes each :class:`ArrayLeaf` as the stored array that ``locate`` gives for it.

    The C pickler cannot write a reference to a global of a module that is not installed. This one writes its opcodes.
    """

    def __init__(
        self,
        file: io.BytesIO,
        locate: Callable[[ArrayLeaf], StoredArray] | None,
        names: set[str] | None,
        leaf_of: Callable[[object], ArrayLeaf | None],
    ) -> None:
        super().__init__(file, PROTOCOL)
        self._locate = locate
        self._names = names
        self._leaf_of = leaf_of

    def save_global(self, obj: Any, name: str | None = None) -> None:
        name = name or getattr(obj, "__qualname__", None) or obj.__name__
        module = _whichmodule(obj, name)
        if (module, name) in copyreg._extension_registry:  # type: ignore[attr-defined]
            raise pickle.PicklingError(
                f"{module}.{name} has a copyreg extension code, which other processes do not know"
            )
        if self._names is not None:
            self._names.add(f"{module}.{name.partition('.')[0]}")  # a nested name is reached through its outer class
        super().save_global(obj, name)

    dispatch = {**_PurePython.dispatch, FunctionType: save_global}  # noqa: RUF012 - the base class's own table

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if type(obj) is bytes and not obj:
            # torch's weights_only reader knows this form of empty bytes, not the one that Python prefers
            self.save_reduce(codecs.encode, ("", "latin1"), obj=obj)
            return
        if type(obj) is not ArrayLeaf:
            if (leaf := self._leaf_of(obj)) is None:
                super().save(obj, save_persistent_id)
                return
            obj = leaf
        known = self.memo.get(id(obj))
        if known is not None:
            self.write(self.get(known[0]))
            return
        if self._locate is None:
            raise pickle.PicklingError("an array leaf outside of a provider's tree")
        stored = self._locate(obj)
        if obj.storage is not None:
            self.write(_encode_storage(stored, obj.storage))
        elif obj.kind is None and not obj.attributes:
            self.write(encode_array(stored, parameter=obj.parameter))
        elif obj.parameter:
            self.write(b"ctorch._utils\n_rebuild_parameter_with_state\n" + pickle.MARK)
            self.write(encode_array(replace(stored, requires_grad=False)) + _flag(stored.requires_grad) + _NO_HOOKS)
            self.save(obj.attributes)
            self.write(pickle.TUPLE + pickle.REDUCE)
        else:
            # as encode_array() has them: the function that makes the array, its arguments, and the call
            function, mark, arguments = encode_array(stored)[: -len(pickle.REDUCE)].partition(pickle.MARK)
            self.write(b"ctorch._tensor\n_rebuild_from_type_v2\n" + pickle.MARK + function)
            if obj.kind is None:
                self.write(b"ctorch\nTensor\n")
            else:
                self.save(obj.kind)
            self.write(mark + arguments)
            self.save(obj.attributes)
            self.write(pickle.TUPLE + pickle.REDUCE)
        self.memoize(obj)


def dumps(
    value: object,
    locate: Callable[[ArrayLeaf], StoredArray] | None = None,
    names: set[str] | None = None,
    leaf_of: Callable[[object], ArrayLeaf | None] = lambda _: None,
) -> bytes:
    """Serialize a value as a pickle of protocol 2.

    Args:
        value: Anything that pickles; :class:`ArrayLeaf` objects in it stand for arrays.
        locate: Gives the place where an array leaf's elements are stored.
        names: A set to which the classes and functions that the pickle names are added, as ``module.qualname``.
        leaf_of: Gives the array leaf that is written in place of a value; None for a value that is written itself.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: The value does not pickle.
    """
    file = io.BytesIO()
    with deeper():
        _Writer(file, locate, names, leaf_of).dump(value)
    return file.getvalue()


def is_dialect(data: bytes) -> bool:
    """Whether bytes are one pickle of protocol 2, as :func:`dumps` writes it: other protocols cannot be spliced."""
    if not data.startswith(_HEADER):
        return False
    try:
        opcodes = [(code, position) for code, _, position in pickletools.genops(data)]
    except ValueError:
        return False
    return opcodes[-1][1] == len(data) - 1 and all(code.proto <= PROTOCOL for code, _ in opcodes)


def body(stream: bytes) -> bytes:
    """A pickle without its first and last opcode: it pushes one object and can be spliced into a larger pickle.

    Spliced bodies may use the same memo numbers, because each reads only numbers that it has written itself.
    """
    return stream[len(_HEADER) : -1]


def stream(spliced: bytes) -> bytes:
    """Make a whole pickle of a body; the inverse of :func:`body`."""
    return _HEADER + spliced + END


MAPPING_BEGIN = pickle.EMPTY_DICT + pickle.MARK
MAPPING_END = pickle.SETITEMS
END = pickle.STOP
