"""Attaching this package to the objects that a framework's tests make."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any


def attach_to_each(made: type[Any], adapter: str, wanted: Callable[[Any], bool] = lambda _: True) -> None:
    """From now on, attach an adapter to each object of a class as soon as it is made, if it is wanted there."""
    stock = made.__init__

    @functools.wraps(stock)
    def __init__(self: Any, *words: Any, **options: Any) -> None:
        stock(self, *words, **options)
        if wanted(self):
            importlib.import_module(f"datastates.adapters.{adapter}").attach(self, host_cache="16MiB")

    made.__init__ = __init__  # type: ignore[misc]  # that is the point
