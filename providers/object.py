"""A provider for one Python value, serialized whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from datastates.providers.tree import TreeProvider
from datastates.state import memory
from datastates.state.provider import Saved


class PickledObjectProvider(TreeProvider):
    """Any value that pickles, asked for and copied inside ``snapshot()``.

    Numbers, strings, arrays and nested containers load back without trust; objects of other classes need ``trust``.
    Arrays come back in host memory, those of CuPy as NumPy's.
    """

    def __init__(self, name: str, get: Callable[[], Any], set: Callable[[Any], Any]) -> None:
        """Keep the two callables: ``get`` gives the value at each snapshot, ``set`` takes it back on restore."""
        super().__init__(name)
        self._get = get
        self._set = set

    def value(self) -> object:
        """What ``get`` gives now."""
        return self._get()

    def is_lazy(self, key: str, array: object) -> bool:
        """Never: anybody may change such a value at any time."""
        del key, array
        return False

    def match(self, stored: object, saved: Saved) -> Sequence[tuple[str, object]]:
        """Fresh arrays for all: the value is built anew and handed to ``set``."""
        del stored
        known = saved.arrays()
        return [(key, memory.empty(known[key])) for key in self.listed(saved)]

    def accept(self, value: Any) -> None:
        """Hand the value to ``set``."""
        self._set(value)
