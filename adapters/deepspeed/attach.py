"""Lazy checkpoints for versions of DeepSpeed that do not know the entry in the JSON file."""

from __future__ import annotations

from typing import Any

from datastates.adapters.deepspeed import binding
from datastates.adapters.deepspeed.checkpoint_engine import CheckpointEngine
from datastates.adapters.deepspeed.settings import DeepSpeedSettings


def attach(engine: Any, **settings: Any) -> CheckpointEngine:
    """Let a DeepSpeed engine save as with the entry ``datastates_ckpt`` of its JSON file.

    DeepSpeed reads that entry from 0.18.1 on; earlier versions need this call. Call it on all ranks, between
    ``deepspeed.initialize()`` and the first save or load.

    Args:
        engine: The engine that ``deepspeed.initialize()`` returned.
        settings: Fields of :class:`~datastates.adapters.deepspeed.settings.DeepSpeedSettings`.

    Returns:
        The checkpoint engine that saves from now on. It is also ``engine.checkpoint_engine.ckpt_engine``.

    Raises:
        SettingsError: A setting is unknown or its value is invalid; the message names it.
        RuntimeError: The interface of this version of DeepSpeed is not supported; the message says why.
        ValueError: The JSON file asks for another checkpoint engine than torch's, or this one is attached already.
    """
    present = type(engine.checkpoint_engine).__name__
    if present != "TorchCheckpointEngine":
        raise ValueError(f"attach: this DeepSpeed engine has a {present} already; take that out of its configuration")
    ours = CheckpointEngine(None, engine.global_rank, settings=DeepSpeedSettings.of(settings))
    made = type("AttachedCheckpointEngine", (binding.Calls, binding.interface()), {})()
    made.ckpt_engine = ours
    engine.checkpoint_engine = made
    return ours
