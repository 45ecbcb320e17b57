"""torchtitan's debug model with lazy checkpoints: ``--module config_registry --config llama3_debugmodel_lazily``.

For a configuration that exists already, a word on torchtitan's command line does the same:
``--override.imports datastates.adapters.torchtitan.lazy_checkpoints``.
"""

from __future__ import annotations

from typing import Any

from torchtitan.models.llama3.config_registry import llama3_debugmodel

from datastates.adapters.torchtitan import DataStatesCheckpointManager


def llama3_debugmodel_lazily() -> Any:
    """The debug model's configuration, with a checkpoint every ten steps."""
    config = llama3_debugmodel()
    config.checkpoint = DataStatesCheckpointManager.Config(
        enable=True, interval=10, keep_latest_k=3, last_save_model_only=False, host_cache="1GiB"
    )
    return config
