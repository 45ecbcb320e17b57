"""Objects of stores as files of the native core, whose threads ask for the bytes as they need them."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence

from datastates.errors import storage_errors
from datastates.storage.location import Location
from datastates.storage.objects import Store


class Handed:
    """An object of a store that the native core reads. Thread-safe.

    Attributes:
        name: Its location as bytes, for errors.
        best_piece: The most bytes that are asked for at once.
        failure: An error of the store, with the lines that raised it; None so far.
    """

    def __init__(self, store: Store, path: Location) -> None:
        """Describe the object at a location of a store."""
        self.name = os.fsencode(str(path))
        self.best_piece = store.traits.best_piece
        self.failure: BaseException | None = None
        self._store, self._path = store, path

    def read_into(self, spans: Sequence[tuple[int, memoryview]]) -> None:
        """As :meth:`Store.read_into`. The memory is valid until this returns or raises."""
        try:
            with storage_errors("read", str(self._path)):
                self._store.read_into(self._path, spans)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # what they hold of the memory
            self.failure = error
            raise
