"""The memory that new arrays for a checkpoint need, and the refusal where less is free.

Processes of one host that ask at the same time each see the same free memory: the others' needs do not count. The
windows of a read, such as the host cache, do not count either.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from datastates._base import free_memory, log
from datastates.container.table import KINDS
from datastates.errors import OutOfMemoryError
from datastates.reading.tensors import TensorFile
from datastates.state import devices
from datastates.state.new_memory import Into
from datastates.storage.location import Location

LARGE = 512 << 20
"""Bytes of an array from which on the free memory is looked at before it is read."""


def refuse_too_large(path: Location, files: Sequence[TensorFile], into: Into) -> None:
    """Raise OutOfMemoryError if new arrays for all tensors of a checkpoint need more memory than is free.

    Args:
        path: The checkpoint, for messages.
        files: Its files.
        into: Library and device of the new arrays.
    """
    _refuse_new(path, *needed(files, into), into, "read single arrays by datastates.open()")


def refuse_large(path: Location, nbytes: int, kind: str, into: Into) -> None:
    """Raise OutOfMemoryError if one new array is large, and needs more memory than is free.

    Args:
        path: The checkpoint, for messages.
        nbytes: Bytes of the array.
        kind: The library that saved it.
        into: Library and device of the new array.
    """
    if nbytes <= LARGE:
        return
    on_device = into.device is not None and into.kind(kind) == "torch"
    _refuse_new(path, *((0, nbytes) if on_device else (nbytes, 0)), into, "free memory")


def needed(files: Sequence[TensorFile], into: Into) -> tuple[int, int]:
    """Bytes of the records with tensors: those that are read into host memory, and those that are read to a device."""
    every = of_torch = 0
    for file in files:
        table, nbytes = file.shards, file.record_nbytes
        rows = np.bincount(table.record, minlength=len(nbytes))
        rows_of_torch = np.bincount(table.record[table.kind == KINDS.index("torch")], minlength=len(nbytes))
        every += int(nbytes[rows > 0].sum())
        of_torch += int(nbytes[rows_of_torch > 0].sum())
    return (every, 0) if into.device is None else (every - of_torch, of_torch)


def _refuse_new(path: Location, on_host: int, on_device: int, into: Into, remedy: str) -> None:
    if on_host:
        _refuse(path, on_host, free_memory.host_memory(swap=True), "host memory", remedy)
    if on_device:
        free = devices.free_memory(into.device)
        _refuse(path, on_device, free, f"memory of {into.device}", "read it into host memory")


def _refuse(path: Location, nbytes: int, free: int, where: str, remedy: str) -> None:
    told = f"{path} needs {nbytes / 1e9:.3g} GB of {where}, {free / 1e9:.3g} GB are free"
    log.debug("%s", told)
    if nbytes > free:
        raise OutOfMemoryError(f"{told}: {remedy}, or give the process more memory", needed=nbytes, free=free)
