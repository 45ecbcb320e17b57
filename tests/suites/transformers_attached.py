"""transformers' tests of the ``Trainer``, with this package attached to each."""

from __future__ import annotations

from typing import Any

from attaching import attach_to_each

VARIANTS = ("stock", "ours")
TESTS = ("tests/trainer",)
OPTIONS = ("-n", "2")
ENVIRONMENT = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "TRANSFORMERS_TEST_DEVICE": "cpu"}
MODULE = "transformers.trainer"


def change(module: Any, variant: str) -> None:
    """Attach to each Trainer as soon as it is made, unless it saves in a way that is refused."""
    del variant
    attach_to_each(
        module.Trainer, "transformers", lambda made: not made.is_deepspeed_enabled and not made.args.push_to_hub
    )
