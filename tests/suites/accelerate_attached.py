"""accelerate's tests of ``save_state`` and ``load_state``, with this package attached to each accelerator."""

from __future__ import annotations

from typing import Any

from attaching import attach_to_each

VARIANTS = ("stock", "ours")
TESTS = ("tests/test_state_checkpointing.py",)
OPTIONS = ("-n", "2")
ENVIRONMENT = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
MODULE = "accelerate.accelerator"


def change(module: Any, variant: str) -> None:
    """Attach to each accelerator as soon as it is made."""
    del variant
    attach_to_each(module.Accelerator, "accelerate")
