"""Who has asked Lightning for a checkpoint, and who looks at it as soon as the call that saves it has returned.

A plugin is never told of the trainer that uses it. The stack tells: ``ModelCheckpoint`` saves by one method.
"""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

from datastates.adapters.torch_files import TorchFiles

_PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")
_CALLBACK = "callbacks.model_checkpoint"
_UPLOADS = ("WandbLogger", "MLFlowLogger", "LitLogger")
"""Loggers that upload a checkpoint as soon as it is saved only if ``log_model`` says so."""


class Asking:
    """Finds out who looks. Used on the thread that saves."""

    def __init__(self, files: TorchFiles) -> None:
        """Take what writes the checkpoints, and is waited for."""
        self._files = files
        self._is_ending = False

    def looks(self) -> str | None:
        """Who looks at the checkpoint that is being saved as soon as that call has returned; None if nobody does.

        From the first call by a trainer's ``ModelCheckpoint`` on, what this trainer does before it looks for a name, or
        when training ends, waits for what is under way.
        """
        is_lightning, frame = False, sys._getframe(1)
        while frame is not None:
            is_lightning |= _is_lightning(name := frame.f_globals.get("__name__", ""))
            if name.endswith(_CALLBACK) and _is_lightning(name) and frame.f_code.co_name == "_save_checkpoint":
                return self._looks_after(frame)
            frame = frame.f_back  # type: ignore[assignment]
        return "something else than a ModelCheckpoint has asked for it" if is_lightning else None

    def _looks_after(self, frame: FrameType) -> str | None:
        callback, trainer = frame.f_locals["self"], frame.f_locals["trainer"]
        self._let_it_wait(trainer)
        if not _is_lightning(type(callback).__module__):
            return f"{type(callback).__name__} is a ModelCheckpoint of its own"
        if callback.save_last == "link":
            return 'ModelCheckpoint(save_last="link") links to it'
        if self._is_ending:
            return "the training ends"
        looking = [type(logger).__name__ for logger in trainer.loggers if uploads(logger, callback)]
        return f"the logger {looking[0]} has after_save_checkpoint" if looking else None

    def _let_it_wait(self, trainer: Any) -> None:
        for callback in trainer.checkpoint_callbacks:
            if hasattr(callback, "file_exists"):  # it chooses the next version of a name that is taken
                self._stand_before(callback, "file_exists")
        self._stand_before(trainer.fit_loop, "on_run_end")
        self._stand_before(trainer.strategy, "on_exception")

    def _stand_before(self, holder: Any, name: str) -> None:
        stock = getattr(holder, name)
        if getattr(stock, "waits_by", None) is self:
            return

        @functools.wraps(stock)
        def wait_and_call(*words: Any, **options: Any) -> Any:
            self._files.wait()
            self._is_ending = name != "file_exists"
            try:
                return stock(*words, **options)
            finally:
                self._is_ending = False

        wait_and_call.waits_by = self  # type: ignore[attr-defined]
        setattr(holder, name, wait_and_call)


def _is_lightning(module: str) -> bool:
    return module.partition(".")[0] in _PACKAGES


def uploads(logger: Any, callback: Any) -> bool:
    """Whether a logger may look at a checkpoint in ``after_save_checkpoint``."""
    owner = next((c for c in type(logger).__mro__ if "after_save_checkpoint" in vars(c)), None)
    if owner is None or not _is_lightning(owner.__module__) or "after_save_checkpoint" in vars(logger):
        return True
    if owner.__name__ in _UPLOADS:
        log_model = getattr(logger, "_log_model", "all")
        return log_model is not False and (log_model is not True or callback.save_top_k == -1)
    return owner.__name__ not in ("Logger", "TensorBoardLogger")
