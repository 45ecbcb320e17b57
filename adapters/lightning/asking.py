"""Who has asked Lightning for a checkpoint, and whether somebody may look at it unseen once it is saved.

A plugin is never told of the trainer that uses it, nor called on other ranks than the first. The stack tells who asks:
``ModelCheckpoint`` saves by one method.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

_PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")
_CALLBACK = "callbacks.model_checkpoint"


def needed() -> str | None:
    """Who may look at the checkpoint that is being saved, as soon as that call has returned, by means unheard of.

    These are other ranks, and code that is not Lightning's. None if nobody does.
    """
    is_lightning = False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        is_lightning |= _is_lightning(name := frame.f_globals.get("__name__", ""))
        if name.endswith(_CALLBACK) and _is_lightning(name) and frame.f_code.co_name == "_save_checkpoint":
            return _needed_after(frame)
        frame = frame.f_back
    return "something else than a ModelCheckpoint has asked for it" if is_lightning else None


def _needed_after(frame: FrameType) -> str | None:
    callback, trainer = frame.f_locals["self"], frame.f_locals["trainer"]
    if not _is_lightning(type(callback).__module__):
        return f"{type(callback).__name__} is a ModelCheckpoint of its own"
    own = (type(logger).__name__ for logger in trainer.loggers if not _is_lightning(_module_of_hook(logger)))
    return next((f"the logger {name} has after_save_checkpoint" for name in own), None)


def _module_of_hook(logger: Any) -> str:
    return str(getattr(logger.after_save_checkpoint, "__module__", ""))


def _is_lightning(module: str) -> bool:
    return module.partition(".")[0] in _PACKAGES
