"""Loads files of this package for frameworks. A ``map_location`` chooses the devices of tensors, as in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from datastates.config import IoSettings
from datastates.container.pickle_reader import Trust
from datastates.executor.make import make_executor
from datastates.reading import whole_checkpoint
from datastates.reading.needed_memory import refuse_too_large
from datastates.reading.stored import Stored
from datastates.saving import gate
from datastates.state.new_memory import AS_SAVED
from datastates.storage import Location
from datastates.storage.location import PathLike


def load(path: PathLike, settings: IoSettings, map_location: Any, trust: Trust) -> Any:
    """Read a file of this package, and verify it.

    Args:
        path: The file.
        settings: The settings for reading.
        map_location: The devices for tensors; see :func:`placed`.
        trust: Classes that may be loaded.

    Raises:
        FormatError: The file is damaged.
        CorruptError: A tensor does not match its checksum; the message names it.
        TrustError: The file needs a class that is not trusted.
        OutOfMemoryError: The tensors are for the CPU, and need more memory than is free. Nothing was read.
    """
    gate.pass_all()  # loaded tensors are about to be copied over the training state
    stored = Stored.of_file(Location(path))
    sources, place = stored.every(), placed(map_location)
    if place is None:
        refuse_too_large(stored.path, sources, AS_SAVED)
    return whole_checkpoint.load(
        stored, sources, lambda nbytes: make_executor(settings, nbytes), trust=trust, place=place
    )


def placed(map_location: Any) -> Callable[[Any], Any] | None:
    """A function that moves an array of bytes from the CPU to the device that ``map_location`` chooses.

    It is None where the device is the CPU.

    Args:
        map_location: As for ``torch.load``: a device, its name, a dict of names or a callable. None: the CPU.

    Raises:
        TypeError: ``map_location`` is something else.
    """
    import torch

    if isinstance(map_location, dict):
        map_location = map_location.get("cpu", "cpu")
    if map_location is None:
        return None
    if isinstance(map_location, (str, torch.device)):
        device = torch.device(map_location)
        return None if device.type == "cpu" else lambda block: torch.empty_like(block, device=device)
    if callable(map_location):
        return lambda block: _moved(block, map_location(block.untyped_storage(), "cpu"))
    raise TypeError(f"map_location: a device, its name, a dict or a callable is wanted, not {map_location!r:.80}")


def _moved(block: Any, storage: Any) -> Any:
    if storage is None:  # as in torch: the callable leaves the storage where it is
        return block
    import torch

    untyped = getattr(storage, "_untyped_storage", storage)
    return torch.empty(0, dtype=torch.uint8, device=untyped.device).set_(untyped)
