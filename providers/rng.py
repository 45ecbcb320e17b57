"""A provider for the global random number generators."""

from __future__ import annotations

import importlib
import random
import sys
import warnings
from typing import Any

import numpy as np

from datastates.providers.object import PickledObjectProvider


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
