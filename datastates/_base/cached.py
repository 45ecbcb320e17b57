"""Attributes that are computed at their first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

from typing_extensions import Self

T = TypeVar("T")


class cached_property(Generic[T]):  # named as the standard library's
    """As ``functools.cached_property``, without its lock, which Python 3.10 and 3.11 share among all instances.

    There, a thread that computes the attribute of one object holds up all others, and one that is interrupted between
    taking the lock and entering its block holds them up for ever. Two threads may both compute the attribute here.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        """Take the method; the attribute gets its name."""
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        """Take the name."""
        self._name = name

    @overload
    def __get__(self, owner: None, kind: type) -> Self: ...

    @overload
    def __get__(self, owner: object, kind: type) -> T: ...

    def __get__(self, owner: object, kind: type) -> Self | T:
        """Compute the attribute and put it into the object, where it is found from then on."""
        if owner is None:
            return self
        value = self._compute(owner)
        owner.__dict__[self._name] = value
        return value
