"""Makes the next items of an iterator while the last one is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from typing import TypeVar

from datastates._base.tasks import Task
from datastates._base.workers import Workers

_T = TypeVar("_T")


def ahead(items: Iterable[_T], most: int) -> Iterator[_T]:
    """Yield the items of an iterable, which a thread makes: at most ``most`` more than were used.

    The thread ends with the iterator, also where that is closed early; then one more item may be made.

    Raises:
        ThreadStartError: There is no thread.
        BaseException: What the iterable raises, once the items before are used.
    """
    made: SimpleQueue[list[_T]] = SimpleQueue()
    wanted: SimpleQueue[bool] = SimpleQueue()

    def make() -> None:
        try:
            for item in items:
                made.put([item])
                if not wanted.get():
                    return
        finally:
            made.put([])

    thread, task = Workers("datastates-ahead", 1), Task(make)
    thread.put(task)
    thread.stop()
    for _ in range(most):
        wanted.put(True)
    try:
        while item := made.get():
            yield item.pop()
            wanted.put(True)
        task.result()
    finally:
        wanted.put(False)
