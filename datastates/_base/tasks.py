"""Work in the background whose result somebody waits for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from datastates._base.waiting import Flag
from datastates._base.workers import Work, Workers
from datastates.errors import ThreadStartError

_Given = TypeVar("_Given")
_Result = TypeVar("_Result")


class Task(Work, Generic[_Result]):
    """A call with a result. Thread-safe. Like a ``Future``, but an interrupted wait leaves it intact."""

    def __init__(self, call: Callable[[], _Result]) -> None:
        """Wrap a call; whoever takes the task makes it."""
        super().__init__(self._make)
        self._to_make = [call]
        self._results: list[_Result] = []
        self._error: BaseException | None = None
        self._ended = Flag()

    def _make(self) -> None:
        try:
            self._results.append(self._to_make.pop()())
        except BaseException as error:  # whoever waits gets it
            self._error = error
        self._ended.set()

    def done(self) -> bool:
        """Whether the call has ended."""
        return self._ended.is_set()

    def exception(self) -> BaseException | None:
        """Wait for the end of the call; returns what it raised."""
        self._ended.wait()
        return self._error

    def result(self, timeout: float | None = None) -> _Result:
        """Wait for the end of the call; returns its result, or raises what it raised.

        Raises:
            TimeoutError: The call has not ended after ``timeout`` seconds.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._results[0]


def each(call: Callable[[_Given], _Result], of: Sequence[_Given], most: int) -> list[_Result]:
    """The results of a call for each of several things, in their order. At most ``most`` calls are under way at once.

    Raises:
        BaseException: What the first of these calls raises that fails. No call is under way then.
    """
    tasks: list[Task[Any]] = [Task(partial(call, one)) for one in of]
    helpers = Workers("datastates-each", min(most, len(tasks)) - 1)
    try:
        with contextlib.suppress(ThreadStartError):  # then this thread makes all calls
            for task in tasks[1:]:
                helpers.put(task)
        for task in tasks:
            if (make := task.take()) is not None:
                make()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.take()
        helpers.stop()
        helpers.join()
