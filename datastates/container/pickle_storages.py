"""Lists the storages that a pickle of torch refers to, without running code of it."""

from __future__ import annotations

from typing import Any

from datastates.container.pickle_reader import _read, _Surveyor
from datastates.container.pickle_tensors import Storage


class _Lister(_Surveyor):
    def __init__(self, data: bytes) -> None:
        super().__init__(data, lambda stored: stored, "all", with_torch=False)
        self.found: dict[str, Storage] = {}

    def _referred(self, pid: Any) -> Storage:
        storage = super()._referred(pid)
        self.found.setdefault(storage.record, storage)
        return storage


def storages_of(data: bytes) -> dict[str, Storage]:
    """Each storage as a pickle refers to it first, by the name of its record; raises FormatError if it is damaged."""
    lister = _Lister(data)
    _read(lister)
    return lister.found
