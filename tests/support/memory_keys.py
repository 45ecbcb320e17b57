"""Keys in the memory of this process, for threads that act as ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from datastates.errors import UnreachableError


class Memory:
    """What all ranks share: the values and the marks of keys."""

    links: Any = None
    """A ``torch.distributed.Store`` for links between ranks, if they have any."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.marks: dict[str, int] = {}
        self.lock = threading.Lock()

    def num_keys(self) -> int:
        return len(self.values) + len(self.marks)


class MemoryKeys:
    """:class:`~datastates.ranks.keys.Keys` of one rank."""

    def __init__(self, memory: Memory, rank: int) -> None:
        self.rank = rank
        self._memory = memory
        self._open = True

    def _reach(self) -> Memory:
        if not self._open:
            raise UnreachableError(f"rank {self.rank} has left the memory")
        return self._memory

    def set(self, key: str, data: bytes) -> None:
        self._reach().values[key] = data

    def first(self, key: str, text: str) -> str:
        return self._reach().values.setdefault(key, text.encode()).decode()

    def found(self, keys: Iterable[str]) -> dict[str, bytes]:
        values = self._reach().values
        return {key: values[key] for key in keys if key in values}

    def mark(self, key: str) -> None:
        memory = self._reach()
        with memory.lock:
            memory.marks[key] = memory.marks.get(key, 0) + 1

    def marks(self, key: str) -> int:
        return self._reach().marks.get(key, 0)

    def delete(self, key: str) -> None:
        memory = self._reach()
        memory.values.pop(key, None)
        memory.marks.pop(key, None)

    def close(self) -> None:
        self._open = False
