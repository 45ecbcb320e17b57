"""Lightning's tests of checkpoints, with this package's plugin where a trainer would write by ``TorchCheckpointIO``."""

from __future__ import annotations

import functools
import importlib
from typing import Any

VARIANTS = ("stock", "ours")
TESTS = (
    "tests_pytorch/checkpointing",
    "tests_pytorch/callbacks/test_model_checkpoint_additional_cases.py",
    "tests_pytorch/callbacks/test_model_checkpoint_edge_cases.py",
    "tests_pytorch/callbacks/test_model_checkpoint_manual_opt.py",
    "tests_pytorch/callbacks/test_model_checkpoint_step_interval_val_metric.py",
    "tests_pytorch/plugins/test_async_checkpoint.py",
    "tests_pytorch/plugins/test_checkpoint_io_plugin.py",
    "tests_pytorch/trainer/connectors/test_checkpoint_connector.py",
)
OPTIONS = ("-n", "2")
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
MODULE = "lightning.pytorch.strategies.strategy"


def change(module: Any, variant: str) -> None:
    """Let strategies take the plugin by default; a test that names another one gets that."""
    del variant

    def plugin() -> Any:
        return importlib.import_module("datastates.adapters.lightning").DataStatesCheckpointIO(host_cache="16MiB")

    module.TorchCheckpointIO = functools.wraps(module.TorchCheckpointIO, updated=())(plugin)
