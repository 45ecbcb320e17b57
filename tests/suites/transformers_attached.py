"""transformers' tests of the ``Trainer``, with this package attached to each."""

from __future__ import annotations

import functools
import importlib
from typing import Any

VARIANTS = ("stock", "ours")
TESTS = ("tests/trainer",)
OPTIONS = ("-n", "2")
ENVIRONMENT = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "TRANSFORMERS_TEST_DEVICE": "cpu"}
MODULE = "transformers.trainer"


def change(module: Any, variant: str) -> None:
    """Attach to each Trainer as soon as it is made, unless it saves in a way that is refused."""
    del variant
    stock = module.Trainer.__init__

    @functools.wraps(stock)
    def __init__(self: Any, *words: Any, **options: Any) -> None:
        stock(self, *words, **options)
        if not self.is_deepspeed_enabled and not self.args.push_to_hub:
            importlib.import_module("datastates.adapters.transformers").attach(self, host_cache="16MiB")

    module.Trainer.__init__ = __init__
