"""The memory that reading a checkpoint needs, and the refusal where less is free."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from datastates._base import free_memory
from datastates.container.table import KINDS
from datastates.errors import OutOfMemoryError
from datastates.reading.tensors import TensorFile
from datastates.state import devices
from datastates.state.new_memory import Into
from datastates.storage.location import Location

_log = logging.getLogger("datastates")


def refuse_too_large(path: Location, files: Sequence[TensorFile], into: Into) -> None:
    """Raise OutOfMemoryError if new arrays for all tensors of a checkpoint need more memory than is free.

    Args:
        path: The checkpoint, for messages.
        files: Its files.
        into: Library and device of the new arrays.
    """
    on_host, on_device = needed(files, into)
    refuse_on_host(path, on_host, "read single arrays by datastates.open()")
    if into.device is not None:
        free = devices.free_memory(into.device)
        _refuse(path, on_device, free, f"memory of {into.device}", "load it without device=")


def refuse_on_host(path: Location, nbytes: int, remedy: str) -> None:
    """Raise OutOfMemoryError if ``nbytes`` of host memory are more than is free.

    The need is logged for debugging. Ranks of one host that ask at the same time each see the same free memory: the
    other ranks' needs do not count.

    Args:
        path: The checkpoint that needs the memory, for messages.
        nbytes: The need in bytes.
        remedy: The way to need less, for the message.
    """
    if nbytes:
        _refuse(path, nbytes, free_memory.host_memory(swap=True), "host memory", remedy)


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


def _refuse(path: Location, nbytes: int, free: int, where: str, remedy: str) -> None:
    told = f"{path} needs {nbytes / 1e9:.3g} GB of {where}, {free / 1e9:.3g} GB are free"
    _log.debug("%s", told)
    if nbytes > free:
        raise OutOfMemoryError(f"{told}: {remedy}, or give the process more memory", needed=nbytes, free=free)
