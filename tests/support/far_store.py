"""A store of objects in memory that a test breaks, holds up and mends."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from typing import Any

from aged_store import AgedStore
from typing_extensions import Buffer

from datastates.errors import StorageError
from datastates.storage import Traits
from datastates.storage.location import Location
from datastates.storage.objects import Entry


class FarStore(AgedStore):
    """Fails while it is ``dead``, and calls ``before`` with each request: its name and the location."""

    traits = Traits(best_piece=1 << 20)

    def __init__(self) -> None:
        super().__init__()
        self.dead = False
        self.before: Callable[[str, Location], object] = lambda request, path: None
        self.asked: list[tuple[str, str]] = []

    def _ask(self, request: str, path: Location) -> None:
        if self.dead:
            raise StorageError(errno.ETIMEDOUT, request, str(path), f"{request} {path}: the server does not answer")
        self.asked.append((request, path.name))
        self.before(request, path)

    def look(self, path: Location) -> Entry | None:
        self._ask("look", path)
        return super().look(path)

    def entries(self, folder: Location, *, deep: bool = False) -> dict[str, Entry]:
        self._ask("list", folder)
        return super().entries(folder, deep=deep)

    def read(self, path: Location, offset: int, nbytes: int) -> bytes:
        self._ask("read", path)
        return super().read(path, offset, nbytes)

    def create(self, path: Location, data: bytes) -> None:
        self._ask("create", path)
        super().create(path, data)

    def upload(self, path: Location, pieces: Iterator[Buffer], nbytes: int) -> None:
        self._ask("upload", path)

        def taken() -> Iterator[Buffer]:
            for piece in pieces:
                self._ask("piece", path)
                yield piece

        data = b"".join(taken())
        with self._lock:
            last = max((made for _, made in self._objects.values()), default=0)
            self._objects[str(path)] = data, last + 1

    def discard(self, paths: Any) -> None:
        for path in paths:
            self._ask("remove", path)
        super().discard(paths)

    def requests(self, request: str) -> list[str]:
        """The names of the objects that a request was for, in order."""
        return [name for kind, name in self.asked if kind == request]


class Held:
    """Holds requests up until it is let go; use it as ``before``."""

    def __init__(self, request: str, name: str = "") -> None:
        self._wanted, self._name = request, name
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, request: str, path: Location) -> None:
        if request == self._wanted and path.name.startswith(self._name):
            self.reached.set()
            assert self.go.wait(60)
