"""Functions that stand in for those of a library while it saves a checkpoint. The library decides all else."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

Function = Callable[..., Any]


def instead_of(method: Function, stock: Function) -> Function:
    """``method`` for a framework's function, which it is handed first. A copy of the object that has it has a copy."""
    return functools.update_wrapper(functools.partial(method, stock), stock)


@contextlib.contextmanager
def having(holder: Any, name: str, value: object) -> Iterator[None]:
    """A context in which an attribute of an object has another value."""
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


@contextlib.contextmanager
def standing_in(module: ModuleType | type, name: str, make: Callable[[Function], Function]) -> Iterator[None]:
    """A context in which another function is called for one of a module or a class, by this thread.

    Args:
        module: The module or class in which the function is looked up.
        name: Its name there.
        make: Given the function, returns the one to call instead.
    """
    thread, stock = threading.get_ident(), getattr(module, name)
    instead = make(stock)

    @functools.wraps(stock)
    def call(*words: Any, **options: Any) -> Any:
        return (instead if threading.get_ident() == thread else stock)(*words, **options)

    with having(module, name, call):
        yield
