"""Reads a safetensors file. Its header, which tells the place of each tensor, is refused where the library refuses it.

The library itself reads only files of a file system.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from datastates.container.safetensors_header import MOST_HEADER
from datastates.container.table import MAX_NDIM
from datastates.errors import FormatError, naming
from datastates.formats.foreign import Foreign
from datastates.formats.foreign_file import ForeignFile, tensor
from datastates.formats.record_file import Record
from datastates.formats.seen import Seen
from datastates.state.dtypes import BY_NAME, SAFETENSORS
from datastates.state.shards import Shard
from datastates.storage import store_of
from datastates.storage.location import Location
from datastates.storage.stores import reader

NAME = "a safetensors file"
SUFFIX = ".safetensors"
READ = {name: dtype for dtype, name in SAFETENSORS.items()}
"""Torch's names of element types by the format's."""
_LENGTH = 8
"""Bytes of the number at the beginning of a file, which is the length of the header."""


def recognises(seen: Seen) -> bool:
    """Whether a file begins like a header, or its name ends in ``.safetensors``: then it is a damaged file."""
    return seen.is_file and (seen.beginning[4 : _LENGTH + 1] == b"\0\0\0\0{" or seen.path.suffix == SUFFIX)


def open(path: Location) -> Foreign:
    """Open a safetensors file as a checkpoint.

    Raises:
        FormatError: It is damaged; the message names it.
        StorageError: It cannot be read.
    """
    return Foreign(NAME, path, [open_file(path)])


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    dtype: str
    shape: Annotated[list[int], Field(max_length=MAX_NDIM)]
    data_offsets: Annotated[list[int], Field(min_length=2, max_length=2)]


class _Header(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    metadata: dict[str, str] | None = Field(None, alias="__metadata__")
    __pydantic_extra__: dict[str, _Entry]


def open_file(path: Location) -> ForeignFile:
    """Open a safetensors file, a whole checkpoint or a shard; raises as :func:`open` does."""
    nbytes = store_of(path).length(path)
    with naming(str(path)):
        header, begin, metadata = _header(reader(path), nbytes)
        records: list[Record] = []
        tensors: list[tuple[int, Shard]] = []
        for name, entry in header.items():
            if entry.dtype not in READ:
                raise FormatError(f"{name!r} is of type {entry.dtype}, which cannot be read")
            first, last = entry.data_offsets
            tensors.append((len(records), tensor(name, READ[entry.dtype], entry.shape)))
            records.append(Record(begin + first, last - first, None))
            if math.prod(entry.shape) * BY_NAME[READ[entry.dtype]].itemsize != last - first:
                raise FormatError(f"{name!r} has another length than its shape")
        if begin + sum(record.nbytes for record in records) != nbytes:
            raise FormatError("its tensors overlap, or are not all that follows its header")
    file = ForeignFile(path, nbytes, records, tensors)
    file.metadata = metadata
    return file


def _header(read: Callable[[int, int], bytes], nbytes: int) -> tuple[dict[str, _Entry], int, dict[str, str]]:
    """The header's entry of each tensor by its name, the header's end, and the metadata in it."""
    end = _LENGTH + int.from_bytes(read(0, min(nbytes, _LENGTH)), "little")
    if nbytes < _LENGTH or end > min(nbytes, _LENGTH + MOST_HEADER):
        raise FormatError("its header is cut short, or too long")
    text = read(_LENGTH, end - _LENGTH)
    try:
        header = _Header.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f", {part!r}" for part in first["loc"])
        raise FormatError(f"its header{place}: {first['msg']}") from None
    json.loads(text, object_pairs_hook=_refuse_twice, parse_int=_refuse_negative)
    return header.__pydantic_extra__, end, header.metadata or {}


def _refuse_twice(pairs: list[tuple[str, Any]]) -> None:
    """Raise FormatError for a repeated name in the header: readers differ in which they take."""
    if len(dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        raise FormatError(f"{next(n for n in names if names.count(n) > 1)!r} is in its header twice")


def _refuse_negative(digits: str) -> None:
    if digits.startswith("-"):
        raise FormatError(f"its header has a negative number, {digits}")
