"""Lazy checkpoints for versions of DeepSpeed that do not know the JSON file's entry."""

from __future__ import annotations

from typing import Any

from datastates.adapters.deepspeed import binding
from datastates.adapters.deepspeed.checkpoint_engine import CheckpointEngine
from datastates.adapters.deepspeed.settings import DeepSpeedSettings


def attach(engine: Any, **settings: Any) -> CheckpointEngine:
    """Let a DeepSpeed engine save as it does with ``datastates_ckpt`` in its JSON file, which it reads from 0.18.1 on.

    To be called on all ranks alike, between ``deepspeed.initialize()`` and the first save or load.

    Args:
        engine: What ``deepspeed.initialize()`` returned.
        settings: The fields of :class:`~datastates.adapters.deepspeed.settings.DeepSpeedSettings`.

    Returns:
        The engine that saves from now on, also to be found as ``engine.checkpoint_engine.ckpt_engine``.

    Raises:
        SettingsError: A setting is impossible; the message names it.
        RuntimeError: This version of DeepSpeed has another interface than those known here.
        ValueError: The JSON file asks for another checkpoint engine than torch's.
    """
    present = type(engine.checkpoint_engine).__name__
    if present != "TorchCheckpointEngine":
        raise ValueError(f"attach: this DeepSpeed engine has a {present} already; take that out of its configuration")
    ours = CheckpointEngine(None, engine.global_rank, settings=DeepSpeedSettings.of(settings))
    made = type("AttachedCheckpointEngine", (binding.Calls, binding.interface()), {})()
    made.ckpt_engine = ours
    engine.checkpoint_engine = made
    return ours
