"""Providers of objects that are pickled: any value, and the random number generators."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from datastates._base.loaded import loaded
from datastates.providers.nested.tree import Match, TreeProvider
from datastates.state import devices, together
from datastates.state.provider import Saved


class PickledObjectProvider(TreeProvider):
    """Any value that pickles. ``snapshot()`` asks for the value and copies it before it returns.

    Numbers, strings, arrays and nested containers load back without ``trust``. Objects of other classes need it.
    Restored arrays are in host memory; CuPy arrays come back as NumPy arrays.
    """

    def __init__(self, name: str, get: Callable[[], Any], set: Callable[[Any], Any]) -> None:
        """Keep the two callables.

        Args:
            name: Top-level key in the checkpoint.
            get: Returns the value. It is called at each snapshot.
            set: Takes the restored value. It is called on restore.
        """
        super().__init__(name)
        self._get = get
        self._set = set

    def value(self) -> object:
        """The value that ``get`` returns now."""
        return self._get()

    def is_lazy(self, key: str, array: object) -> bool:
        """False: the arrays of a pickled value may change at any time."""
        del key, array
        return False

    def match(self, stored: object, saved: Saved) -> Match:
        """Restore into a new array for each stored one. The restored value is a new one, which goes to ``set``."""
        del stored
        return Match([*together.fresh(saved, self.listed(saved)).items()], self._set)


class RngProvider(PickledObjectProvider):
    """The states of the global random generators of Python, NumPy, torch and CUDA.

    torch's state is saved if torch is imported, and CUDA's states if CUDA is initialized. CUDA generators are restored
    by device number. If the checkpoint has more devices than this machine, the states of the other devices are left out
    with a warning. Each rank saves its own states.

    Generator objects, such as ``numpy.random.default_rng()`` returns, are not included: give them a provider of their
    own.
    """

    per_rank = True

    def __init__(self, name: str = "rng") -> None:
        """Name the provider: ``name`` is the top-level key in the checkpoint."""
        super().__init__(name, _get, _set)


def _get() -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
    torch = loaded("torch")
    if torch is not None:
        state["torch"] = torch.get_rng_state()
    return state | devices.rng_states()


def _set(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if "torch" in state:
        importlib.import_module("torch").set_rng_state(state["torch"])
        devices.set_rng_states(state)
