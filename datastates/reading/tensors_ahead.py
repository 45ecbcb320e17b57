"""Reads arrays ahead, before they are asked for, while a checkpoint's arrays are accessed in the order of the keys."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping

from datastates._base import log
from datastates._base.cached import cached_property
from datastates.executor.executor import Executor
from datastates.reading.new_tensors import Batch, FoundTensor, nbytes_of
from datastates.reading.tensors import Tensors
from datastates.state import devices
from datastates.state.new_memory import Into

MOST_NBYTES = 512 << 20
"""Most bytes of arrays that are read ahead. A larger array is not read ahead."""
FIRST_NBYTES = 8 << 20
"""Bytes that are read ahead once two arrays were accessed in order."""
_BATCHES = 4
"""Number of batches into which the window is divided. The next batch begins when there is room for it."""
_FIRST_KEYS, _MOST_KEYS = 8, 1024
"""Number of keys that are looked up together at first, and the most."""


class NextTensors:
    """The window of arrays that are read ahead. Not thread-safe.

    The window begins after two arrays were accessed one after the other, in the order of the keys. It has room for
    :data:`FIRST_NBYTES` bytes, or for one larger array, and grows by each array that is taken. So the bytes that are
    read and never taken exceed the bytes taken by at most that much. The window's arrays may be taken in any order.
    Nothing is read ahead as long as listing the keys would open files.
    """

    def __init__(self, stored: Tensors, into: Into) -> None:
        """Begin with an empty window. ``into``: library and device of the new arrays."""
        self._stored = stored
        self._into = into
        self._last: str | None = None
        self._expects_first = False
        self._window: dict[str, tuple[Batch, int]] = {}  # by key: the batch, and the bytes of the array
        self._nbytes = 0
        self._limit = 0
        self._stream = 0
        self._process = 0
        self._next = 0  # number of the first key that was not looked up yet
        self._asked = 0
        self._found: deque[tuple[str, FoundTensor]] = deque()
        self._failed = False

    def expect_first(self) -> None:
        """Treat an access of the first key, if it comes next, as an access in order."""
        self._expects_first = True

    def take(self, key: str) -> Batch | None:
        """Take an array out of the window; returns its batch, or None if it was not read ahead.

        Call :meth:`fill` afterwards.
        """
        if self._process != os.getpid() or self._stream != self._current_stream():
            self.close()  # torch would reuse the memory of the arrays without waiting for the stream they were made on
        batch, nbytes = self._window.pop(key, (None, 0))
        self._nbytes -= nbytes
        self._limit = min(MOST_NBYTES, self._limit + nbytes)
        if self._follows(key) and batch is None:
            self._begin(self._numbers[key] + 1)
        return batch

    def fill(self, executor: Callable[[], Executor]) -> None:
        """Begin to read as many arrays as there is room for in the window.

        An error ends reading ahead. It occurs again, and is raised, when its array is asked for.

        Args:
            executor: Returns the executor that reads.
        """
        try:
            while self._has_room() and (found := self._look_up()):
                batch = Batch(found, self._into, executor())
                for key, one in found.items():
                    self._window[key] = batch, nbytes_of(one)
                    self._nbytes += nbytes_of(one)
        except Exception as error:  # whatever a file, an allocation or a library raises
            log.info("%s: reading ahead ends: %s", self._stored.path, error)
            self._failed = True
            self.close()

    def close(self) -> None:
        """Stop the reads that still run, and empty the window."""
        if self._process == os.getpid():  # the threads that read do not survive a fork
            for batch in {id(batch): batch for batch, _ in self._window.values()}.values():
                batch.close()
        self._window.clear()
        self._found.clear()
        self._nbytes = self._limit = 0

    def _follows(self, key: str) -> bool:
        """Whether a key directly follows the last key that was asked for."""
        last, self._last = self._last, key
        expects_first, self._expects_first = self._expects_first, False
        if (last is None and not expects_first) or self._failed or not self._stored.is_listed:
            return False
        before = -1 if expects_first or last is None else self._numbers.get(last)
        return before is not None and self._numbers.get(key) == before + 1

    @cached_property
    def _keys(self) -> list[str]:
        return list(self._stored.keys)

    @cached_property
    def _numbers(self) -> Mapping[str, int]:
        return dict(zip(self._keys, range(len(self._keys)), strict=True))

    def _begin(self, number: int) -> None:
        """Begin a new window with the key number ``number``."""
        self.close()
        self._next, self._asked = number, _FIRST_KEYS
        self._limit, self._stream, self._process = FIRST_NBYTES, self._current_stream(), os.getpid()

    def _has_room(self) -> bool:
        room = self._limit - self._limit // _BATCHES
        return self._limit > 0 and self._nbytes <= room and self._stream == self._current_stream()

    def _look_up(self) -> dict[str, FoundTensor]:
        """Look up the arrays of the next batch; empty at the end of the keys."""
        some: dict[str, FoundTensor] = {}
        nbytes, enough = self._nbytes, self._nbytes + max(1, self._limit // _BATCHES)
        while nbytes < enough and len(some) < _MOST_KEYS:
            if not self._found:
                keys = self._keys[self._next : self._next + self._asked]
                if not keys:
                    break
                self._next, self._asked = self._next + len(keys), min(2 * self._asked, _MOST_KEYS)
                self._found.extend(zip(keys, self._stored.whole(keys), strict=True))
            key, found = self._found[0]
            nbytes += nbytes_of(found)
            if nbytes > (self._limit if self._window or some else MOST_NBYTES):
                break
            some[key] = found
            self._found.popleft()
        return some

    def _current_stream(self) -> int:
        device = self._into.device
        return 0 if device is None else devices.current_stream("torch", device.index)
