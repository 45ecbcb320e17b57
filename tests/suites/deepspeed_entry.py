"""DeepSpeed's tests of checkpoints, with the entry ``datastates_ckpt`` in the configuration of each engine."""

from __future__ import annotations

import multiprocessing
from typing import Any

VARIANTS = ("stock", "ours")
TESTS = ("unit/checkpoint",)
OPTIONS = ("-n", "2")
ENVIRONMENT = {"DS_UNITTEST_TIMEOUT": "300", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
MODULE = "deepspeed.runtime.config"

# the tests fork their ranks from that server; an engine needs the others, which take seconds to import
multiprocessing.set_forkserver_preload(["deepspeed", "deepspeed.moe.layer", "torch._dynamo", "torch.onnx"])


def change(module: Any, variant: str) -> None:
    """Add the entry to every configuration that has none."""
    del variant
    config = module.DeepSpeedConfig
    stock = config._initialize_params

    def _initialize_params(self: Any, param_dict: dict[str, Any]) -> None:
        stock(self, {"datastates_ckpt": {}, **param_dict})

    config._initialize_params = _initialize_params
