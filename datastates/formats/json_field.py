"""Reads fields of a JSON file that another tool wrote."""

from __future__ import annotations

import json
from typing import Any

from datastates.errors import FormatError
from datastates.storage import store_of
from datastates.storage.location import Location


def read_field(path: Location, field: str, what: str, *, most: int) -> Any:
    """The value of a field of the outermost object in a JSON file; arguments and errors as for :func:`read_object`."""
    return read_object(path, field, what, most=most)[field]


def read_object(path: Location, field: str, what: str, *, most: int) -> dict[str, Any]:
    """The outermost object in a JSON file.

    Args:
        path: The file.
        field: The name of a field that it must have.
        what: The name of this kind of file, for messages.
        most: Longest file in bytes that is accepted.

    Raises:
        FormatError: The file is longer, is no JSON, or has no such field; the message names it.
        StorageError: It cannot be read.
    """
    store = store_of(path)
    if (nbytes := store.length(path)) > most:
        raise FormatError(f"{path} is no {what}: it has {nbytes} bytes, too many")
    try:
        found: dict[str, Any] = json.loads(store.read(path, 0, nbytes))
        found[field]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"{path} is no {what}: {type(error).__name__}: {error}") from error
    return found
