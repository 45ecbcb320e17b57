"""torch's tests of ``torch.distributed.checkpoint``, with the writer, the reader, or both of this package."""

from __future__ import annotations

import importlib
from typing import Any

VARIANTS = (
    "stock writer, stock reader",
    "our writer, stock reader",
    "stock writer, our reader",
    "our writer, our reader",
)
TESTS = (".",)
OPTIONS = ("-n", "2")
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
MODULE = "torch.distributed.checkpoint"
# settings of the stock classes that say how they write, and have no meaning here
_HOW = ("single_file_per_rank", "sync_files", "thread_count", "per_thread_copy_ahead", "cache_staged_state_dict")


def change(module: Any, variant: str) -> None:
    """Put the classes in the place of the stock ones, wherever these are looked up."""
    importlib.import_module(f"{MODULE}._fsspec_filesystem")  # its classes stay subclasses of the stock ones
    ours = importlib.import_module("datastates.adapters.dcp")
    places: tuple[Any, ...] = (module, importlib.import_module(f"{MODULE}.filesystem"))
    if "our writer" in variant:
        for place in places:
            place.FileSystemWriter = _taking_options_of_stock(ours.DataStatesStorageWriter)
    if "our reader" in variant:
        for place in places:
            place.FileSystemReader = _taking_options_of_stock(ours.DataStatesStorageReader)


def _taking_options_of_stock(ours: Any) -> Any:
    def __init__(self: Any, *words: Any, **options: Any) -> None:
        ours.__init__(self, *words[:1], **{name: value for name, value in options.items() if name not in _HOW})

    return type(ours.__name__, (ours,), {"__init__": __init__})
