"""A store for tests: its system calls fail, or stop the process, where a test asks for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from datastates._base import faults
from datastates.errors import storage_errors
from datastates.storage.local import LocalStore
from datastates.storage.location import Location


class FaultyStore(LocalStore):
    """A :class:`LocalStore` that passes the fault point ``STAGE.OPERATION`` before each system call."""

    def __init__(self, stage: str) -> None:
        """Make a store; ``stage`` begins the names of its fault points."""
        self._stage = stage

    @contextlib.contextmanager
    def _call(self, operation: str, path: Location, point: str = "") -> Iterator[None]:
        with storage_errors(operation, path):
            faults.hit(f"{self._stage}.{point or operation}", str(path))
            yield
