"""A store of objects in memory that can be made older."""

from __future__ import annotations

from memory_store import MemoryStore


class AgedStore(MemoryStore):
    """All its objects become older at a word."""

    def age(self, seconds: float) -> None:
        """Let time pass."""
        with self._lock:
            old = int(seconds * 10**9)
            self._objects = {name: (data, made - old) for name, (data, made) in self._objects.items()}
