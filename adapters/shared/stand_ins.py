"""Replaces functions of a library while it saves a checkpoint. The library decides all else."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

Function = Callable[..., Any]


def instead_of(method: Function, stock: Function) -> Function:
    """Wrap ``method`` to replace a framework's function, its first argument. Copies of its object get copies of it."""
    return functools.update_wrapper(functools.partial(method, stock), stock)


@contextlib.contextmanager
def having(holder: Any, name: str, value: object) -> Iterator[None]:
    """A context in which an attribute of ``holder`` has another value."""
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


@contextlib.contextmanager
def standing_in(module: ModuleType | type, name: str, make: Callable[[Function], Function]) -> Iterator[None]:
    """A context in which this thread calls another function in place of one of a module or a class.

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
