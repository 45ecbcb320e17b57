"""Reads a safetensors file. The library checks the header, which tells the place of each tensor."""

from __future__ import annotations

import json
from typing import Any

from safetensors import SafetensorError, safe_open

from datastates.container.safetensors_header import TYPES
from datastates.errors import FormatError, storage_errors
from datastates.formats.foreign import Foreign
from datastates.formats.foreign_file import ForeignFile, tensor
from datastates.formats.record_file import Record
from datastates.state.shards import Shard
from datastates.storage import store_of
from datastates.storage.location import Location
from datastates.storage.stores import reader

NAME = "a safetensors file"
SUFFIX = ".safetensors"
READ = {name: dtype for dtype, name in TYPES.items()}
"""Torch's names of element types by the format's."""
_METADATA = "__metadata__"
_LENGTH = 8
"""Bytes of the number at the beginning of a file, which is the length of the header."""


def recognises(path: Location) -> bool:
    """Whether a file begins like a header, or its name ends in ``.safetensors``: then it is a damaged file."""
    if not store_of(path).is_file(path):
        return False
    head = store_of(path).head(path, _LENGTH + 1)
    return (head[4:] == b"\0\0\0\0{") or path.suffix == SUFFIX


def open(path: Location) -> Foreign:
    """Open a safetensors file as a checkpoint.

    Raises:
        FormatError: It is damaged; the message names it.
        StorageError: It cannot be read.
    """
    return Foreign(NAME, path, [open_file(path)])


def open_file(path: Location) -> ForeignFile:
    """Open a safetensors file, a whole checkpoint or a shard; raises as :func:`open` does."""
    nbytes, read = store_of(path).length(path), reader(path)
    try:
        with (
            storage_errors("open", path),
            safe_open(path, "np"),
        ):  # checks that all ranges follow each other, and end where the file ends
            pass
    except SafetensorError as error:
        raise FormatError(f"{path}: {error}") from error
    size = int.from_bytes(read(0, _LENGTH), "little")
    text = read(_LENGTH, size)
    header: dict[str, Any] = json.loads(text, object_pairs_hook=lambda pairs: _unique(path, pairs))
    begin = _LENGTH + size
    records: list[Record] = []
    tensors: list[tuple[int, Shard]] = []
    for name, entry in header.items():
        if name == _METADATA:
            continue
        if entry["dtype"] not in READ:
            raise FormatError(f"{path}: {name!r} is of type {entry['dtype']}, which cannot be read")
        first, last = entry["data_offsets"]
        tensors.append((len(records), tensor(name, READ[entry["dtype"]], entry["shape"])))
        records.append(Record(begin + first, last - first, None))
    return ForeignFile(path, nbytes, records, tensors)


def _unique(path: Location, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of pairs in the header. Raises FormatError for a repeated name: readers differ in which they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise FormatError(f"{path}: {next(n for n in names if names.count(n) > 1)!r} is in its header twice")
    return found
