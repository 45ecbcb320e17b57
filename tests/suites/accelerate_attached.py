"""accelerate's tests of ``save_state`` and ``load_state``, with this package attached to each accelerator."""

from __future__ import annotations

import functools
import importlib
from typing import Any

VARIANTS = ("stock", "ours")
TESTS = ("tests/test_state_checkpointing.py",)
OPTIONS = ("-n", "2")
ENVIRONMENT = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
MODULE = "accelerate.accelerator"


def change(module: Any, variant: str) -> None:
    """Attach to each accelerator as soon as it is made."""
    del variant
    stock = module.Accelerator.__init__

    @functools.wraps(stock)
    def __init__(self: Any, *words: Any, **options: Any) -> None:
        stock(self, *words, **options)
        importlib.import_module("datastates.adapters.accelerate").attach(self, host_cache="16MiB")

    module.Accelerator.__init__ = __init__
