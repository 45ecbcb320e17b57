"""Providers of objects that are pickled: any value, and the random number generators."""

from __future__ import annotations

import importlib
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from datastates.providers.nested.tree import TreeProvider
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


class RngProvider(PickledObjectProvider):
    """The states of Python's, NumPy's, torch's and CUDA's global generators; of torch's only where it is imported.

    CUDA generators are restored by device number; a checkpoint of more devices than this machine has leaves the rest
    out and warns. Generators that are objects of their own (``numpy.random.default_rng()``) belong into a provider of
    their own.
    """

    per_rank = True

    def __init__(self, name: str = "rng") -> None:
        """Name the provider."""
        super().__init__(name, _get, _set)


def _get() -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        state["torch"] = torch.get_rng_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _set(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if "torch" in state:
        torch = importlib.import_module("torch")
        torch.set_rng_state(state["torch"])
        stored = state.get("cuda", [])
        present = torch.cuda.device_count() if stored else 0
        if present < len(stored):
            warnings.warn(f"random states of {len(stored)} GPUs were saved, {present} are here", stacklevel=2)
        for device, generator in enumerate(stored[:present]):
            torch.cuda.set_rng_state(generator, device)
