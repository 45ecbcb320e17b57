"""Finds the code that asked Lightning for a checkpoint: may it look at the file unnoticed, will ``teardown()`` follow?

A plugin is never told of its trainer, and is called on the first rank only. So the caller is found on the stack:
``ModelCheckpoint`` saves by one method, and a trainer runs a stage by one, after which it calls ``teardown()``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")
_SAVES = ("callbacks.model_checkpoint", "_save_checkpoint")
_RUNS = ("trainer.trainer", "_run_stage")


def needed() -> str | None:
    """Name the code that may look, unnoticed, at the checkpoint that is being saved, once the save call returns.

    That is other ranks, or code that is not Lightning's. None if nobody looks so.
    """
    asked = list(_lightnings())
    if not asked:
        return None
    saves = next((frame for frame in asked if _is(frame, _SAVES)), None)
    if saves is None:
        return "something else than a ModelCheckpoint has asked for it"
    return _needed_after(saves) if _runs(asked) else "a ModelCheckpoint saves outside of fit"


def trainer() -> Any | None:
    """The trainer that runs a stage on this thread, such as ``fit``; None if none does."""
    return next((frame.f_locals["self"] for frame in _lightnings() if _is(frame, _RUNS)), None)


@contextlib.contextmanager
def closing(close: Callable[[], None]) -> Iterator[None]:
    """A context of a save. If no ``teardown()`` by Lightning will follow, ``close`` is called at its end.

    None follows a save outside of a stage (after ``fit``, by ``Fabric``), or through ``AsyncCheckpointIO``,
    which saves on a thread of its own. A program that calls a plugin itself calls its ``teardown()``, too.
    """
    try:
        yield
    finally:
        asked = list(_lightnings())
        if asked and not _runs(asked):
            close()


def _lightnings() -> Iterator[FrameType]:
    """The frames of Lightning's code on this thread's stack, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_lightning(_module(frame)):
            yield frame
        frame = frame.f_back


def _runs(asked: list[FrameType]) -> bool:
    return any(_is(frame, _RUNS) for frame in asked)


def _is(frame: FrameType, method: tuple[str, str]) -> bool:
    module, name = method
    return frame.f_code.co_name == name and _module(frame).endswith(module)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


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
