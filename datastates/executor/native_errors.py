"""The native core's errors as those of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from datastates import _native
from datastates.errors import ClosedError, CorruptError, DatastatesError, DeviceError, FormatError, StorageError

_T = TypeVar("_T")


def _translate(error: _native.NativeError, name_record: Callable[[int], str] | None = None) -> DatastatesError:
    message = str(error.args[0]) if error.args else str(error)
    match error.code:
        case "cuda":
            return DeviceError(message)
        case "corrupt" if error.record >= 0 and name_record is not None:
            key = name_record(error.record)
            return CorruptError(f"{key!r} in {error.path} does not match its checksum", key=key, path=error.path)
        case "corrupt":
            return FormatError(message)
        case "closed" | "cancelled":
            return ClosedError(message)
        case "invalid":
            return DatastatesError(message)
    return StorageError(error.errno, error.op, error.path, message)


def native_call(call: Callable[[], _T], name_record: Callable[[int], str] | None = None) -> _T:
    """Make a call of the native core, and raise its error as one of this package's."""
    try:
        return call()
    except _native.NativeError as error:
        raise _translate(error, name_record) from None
