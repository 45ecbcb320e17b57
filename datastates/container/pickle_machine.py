"""Executes the opcodes that picklers write, of protocols 1 to 5, and limits the memory that a stream may ask for.

:mod:`datastates.container.pickle_reader` decides which functions a stream may call, and which names it may look up.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from typing import Any

from datastates.errors import FormatError

# fmt: off
_OPCODES = (
    "PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1",
    "BININT2", "LONG", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "SHORT_BINSTRING",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_SET", "ADDITEMS", "FROZENSET",
    "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "NEWOBJ", "NEWOBJ_EX", "BINPERSID", "BINGET", "LONG_BINGET", "BINPUT",
    "LONG_BINPUT", "MEMOIZE",
)
# fmt: on
_CONTAINERS = (*("MARK", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"), *("TUPLE1", "TUPLE2", "TUPLE3"))
_BYTES_EACH = 3
"""A pickler writes at least so many bytes for each container, including the bytes that put it into the memo."""
_BYTES_EACH_MEMOIZED = 2
"""As ``_BYTES_EACH``, from protocol 4 on, where one byte puts a container into the memo."""
_MEMOIZES = 4
_SLACK = 4096


_PurePython: Any = pickle._Unpickler  # typeshed does not describe the pure Python classes, made to be extended


def _charged(load: Callable[[Any], None]) -> Callable[[Machine], None]:
    """Wrap the function of an opcode that makes a container, so that it charges the machine for the container first."""

    def charged(machine: Machine) -> None:
        machine.charge(1)
        load(machine)

    return charged


class Machine(_PurePython):  # type: ignore[misc]
    """A pickle machine that allocates only as it reads.

    The C unpickler, and some opcodes of the pure Python one, allocate by numbers from the file: memo indexes, lengths.

    Attributes:
        data: The stream.
    """

    def __init__(self, data: bytes) -> None:
        """Prepare to read a stream from its beginning."""
        self.data = data
        self._file = io.BytesIO(data)
        super().__init__(self._file, encoding="utf-8")  # of texts by Python 2: as torch.load reads them
        self._made = 0

    def at(self) -> int:
        """The number of bytes that have been read."""
        return self._file.tell()

    def seek(self, at: int) -> None:
        """Continue at the byte with this offset."""
        self._file.seek(at)

    def charge(self, containers: int) -> None:
        """Refuse a stream of more containers than a pickler writes: one byte would cost a hundred bytes of memory."""
        self._made += containers
        each = _BYTES_EACH if self.proto < _MEMOIZES else _BYTES_EACH_MEMOIZED
        if self._made > _SLACK and self._made * each > self.at() + _SLACK * each:
            raise FormatError("more containers than a pickle of this length can hold")

    def _left(self, field: str) -> int:
        """Read a length from the stream; raises FormatError if the rest of the stream is shorter."""
        (length,) = struct.unpack(field, self.read(struct.calcsize(field)))
        if length > len(self.data) - self.at():
            raise FormatError("a pickle that ends within a value")
        return int(length)

    def load_frame(self) -> None:
        """Pass over the header of a frame: only readers of a file in pieces need it."""
        self._left("<Q")

    def load_bytearray8(self) -> None:
        """Read a bytearray, whose length the stream states."""
        self.append(bytearray(self.read(self._left("<Q"))))

    def load_memoize(self) -> None:
        """Put the top into the memo; an entry costs a hundred times as much memory as its opcode."""
        if len(self.memo) > _SLACK + self.at() // _BYTES_EACH_MEMOIZED:
            raise FormatError("more objects in the memo than a pickle of this length can hold")
        super().load_memoize()

    dispatch = {  # noqa: RUF012 - the base class's own table, narrowed
        **{getattr(pickle, name)[0]: _PurePython.dispatch[getattr(pickle, name)[0]] for name in _OPCODES},
        **{getattr(pickle, name)[0]: _charged(_PurePython.dispatch[getattr(pickle, name)[0]]) for name in _CONTAINERS},
        pickle.FRAME[0]: load_frame,
        pickle.BYTEARRAY8[0]: load_bytearray8,
        pickle.MEMOIZE[0]: load_memoize,
    }
