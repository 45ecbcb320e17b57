"""Binds DeepSpeed to this package. It mends gaps in DeepSpeed's own engine for ``datastates_ckpt``.

That engine claims to be decoupled but hands no checkpoint to DeepSpeed's commit, so ``latest`` is never written. And
DeepSpeed itself truncates ``latest`` in place, before other ranks have written their files. Therefore:

- The engine's ``create``, ``commit`` and ``cleanup`` call :class:`~.checkpoint_engine.CheckpointEngine`.
- ``DeepSpeedEngine.save_checkpoint`` does not write ``latest``, and reports where a save begins and ends.
- ``load_checkpoint`` waits for the saves that are under way, and so does ``destroy``, which calls ``cleanup``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datastates.adapters.deepspeed.save import wait_for_every
from datastates.adapters.shared import small_files
from datastates.adapters.shared.tried import warn_of_untried
from datastates.errors import SettingsError
from datastates.files import looks

_ENTRY = "deepspeed.runtime.checkpoint_engine.datastates_checkpoint_engine"
_BOUND = "_datastates_bound"


def bind() -> None:
    """Bind the installed DeepSpeed. Idempotent.

    Raises:
        RuntimeError: The interface of this version is not supported; the message says what differs.
    """
    engine = importlib.import_module("deepspeed.runtime.engine").DeepSpeedEngine
    if _BOUND in vars(engine):
        return
    own = importlib.import_module(_ENTRY).DataStatesCheckpointEngine
    _check_interface(engine, own)
    warn_of_untried("deepspeed")
    engine.save_checkpoint = _saving(engine.save_checkpoint)
    engine.load_checkpoint = _loading(engine.load_checkpoint)
    engine._checkpoint_tag_validation = _validating(engine._checkpoint_tag_validation)
    engine.save_16bit_model = _saving_16bit(engine.save_16bit_model)
    engine._copy_recovery_script = _copying(engine._copy_recovery_script)
    for name in ("offload_states", "reload_states"):
        # moving frees memory that may still be read
        setattr(engine, name, _after(lambda ours: ours.wait_captured(), getattr(engine, name)))
    for name in ("makedirs", "create", "commit", "cleanup"):
        setattr(own, name, vars(Calls)[name])
    for name in ("is_decoupled", "get_commit_info", "preserves_storage_sharing"):
        setattr(own, name, vars(Calls)[name])
    # its __del__ would wait, perhaps on a thread that a checkpoint needs, for that checkpoint: destroy() waits instead
    own.__del__ = lambda self: None
    setattr(engine, _BOUND, True)


def _check_interface(engine: Any, own: Any) -> None:
    _check(
        engine,
        save_checkpoint=["save_dir", "tag", "client_state", "save_latest"],
        load_checkpoint=["load_dir", "tag"],
        _checkpoint_tag_validation=["tag"],
        _copy_recovery_script=["save_path"],
        save_16bit_model=["save_dir"],
        offload_states=["include"],
        reload_states=[],
        _commit_decoupled_checkpoint=[],
    )
    _check(own, makedirs=["path", "exist_ok"], create=["info"], commit=["info"])
    _check(own, is_decoupled=[], get_commit_info=[], cleanup=[])
    _check(own, save=["state_dict", "path"], load=["path", "map_location"])


def _check(cls: Any, **methods: Sequence[str]) -> None:
    for name, parameters in methods.items():
        method = getattr(cls, name, None)
        found = list(inspect.signature(method).parameters)[1:] if callable(method) else None
        if found is None or found[: len(parameters)] != list(parameters):
            takes = "is not there" if found is None else f"takes ({', '.join(found)})"
            raise _unknown(f"{cls.__name__}.{name} {takes}, where ({', '.join(parameters)}, …) is known")


def _unknown(what: str) -> RuntimeError:
    version = importlib.import_module("deepspeed").__version__
    return RuntimeError(
        f"DeepSpeed {version}: {what}: checkpoints would not be safe. Use a version of the list in docs/deepspeed.md, "
        "or leave datastates_ckpt out"
    )


class Calls:
    """The methods that DeepSpeed calls. They call the :class:`~.checkpoint_engine.CheckpointEngine` beside them."""

    ckpt_engine: Any

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make the folder ``path``. An error is raised at the end of ``save_checkpoint()``."""
        try:
            os.makedirs(path, exist_ok=exist_ok)
        except OSError as error:
            if not self.ckpt_engine.defer(error):
                raise

    def create(self, info: Any) -> None:
        """Begin a checkpoint. ``info``: a ``CheckpointCommitInfo``."""
        self.ckpt_engine.create(info.tag)

    def save(self, state_dict: Any, path: str) -> None:
        """Save one file of a checkpoint: ``state_dict`` at ``path``."""
        self.ckpt_engine.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load one file; see :meth:`~.checkpoint_engine.CheckpointEngine.load`."""
        return self.ckpt_engine.load(path, map_location)

    def commit(self, info: Any) -> Any:
        """End a checkpoint. ``info``: as for :meth:`create`; or None, from an optimizer step."""
        return None if info is None else self.ckpt_engine.commit(info.tag)

    def cleanup(self) -> None:
        """Close the engine. DeepSpeed may call this more than once."""
        engine = getattr(self, "ckpt_engine", None)
        if engine is not None:  # None if its construction failed
            engine.close()

    def is_decoupled(self) -> bool:
        """Whether ``save_checkpoint()`` returns before the checkpoint is complete."""
        engine = getattr(self, "ckpt_engine", None)
        return engine is not None and engine.settings.enabled

    def get_commit_info(self) -> None:
        """None: an optimizer step has nothing to commit, as that happens in the background."""

    def preserves_storage_sharing(self) -> bool:
        """Whether files store whole storages. For an engine that does, DeepSpeed clones views of large storages."""
        return not self.ckpt_engine.settings.enabled


# --- around the methods of DeepSpeedEngine


def engine_of(engine: Any) -> Any:
    """The CheckpointEngine of a DeepSpeed engine; None if it has none, or a disabled one."""
    found = getattr(getattr(engine, "checkpoint_engine", None), "ckpt_engine", None)
    return found if found is not None and found.settings.enabled else None


def _saving(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = engine_of(self)
        if ours is None:
            return original(self, *args, **kwargs)
        _refuse_ungated(self)
        if ours.settings.tiers:
            _refuse_parts(self)
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        if not given.arguments["save_dir"]:
            return original(self, *args, **kwargs)  # DeepSpeed refuses that
        with looks.unwatched():
            ours.begin(self, Path(os.path.abspath(given.arguments["save_dir"])), latest=given.arguments["save_latest"])
            given.arguments["save_latest"] = False
            try:
                result = original(*given.args, **given.kwargs)
            except BaseException as error:
                ours.seal(error)
                if ours.only_logs(error, midway=True):
                    return False
                raise
            ours.seal()
        return result

    return save_checkpoint


def _refuse_ungated(engine: Any) -> None:
    """Raise, on all ranks, for engines that step their optimizer in another way than by torch's ``step()``."""
    offload = engine._config.zero_config.offload_optimizer
    for wrong, what in (
        (getattr(engine, "zenflow", False), "zero_optimization.zenflow"),
        (getattr(offload, "super_offload", False), "zero_optimization.offload_optimizer.super_offload"),
    ):
        if wrong:
            raise SettingsError(
                f"{what}: its optimizer does not wait for checkpoints to be captured; leave datastates_ckpt out"
            )


def _refuse_parts(engine: Any) -> None:
    """Raise, on all ranks, where a folder of DeepSpeed's is not all of a checkpoint: it must not travel alone."""
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    kind = None if state is None else state._shared_state.get("distributed_type")
    for wrong, what in (
        (engine._config.use_node_local_storage, "with use_node_local_storage, each host has a part of a checkpoint"),
        (kind == "DEEPSPEED", "below accelerate and the Trainer, other files of a checkpoint lie beside DeepSpeed's"),
    ):
        if wrong:
            raise SettingsError(f"tiers: {what}: leave it out, and use the command `datastates drain` after the run")


def _saving_16bit(original: Any) -> Any:
    @functools.wraps(original)
    def save_16bit_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = engine_of(self)
        try:
            with looks.unwatched() if ours is not None else contextlib.nullcontext():
                return original(self, *args, **kwargs)
        except BaseException as error:
            if ours is not None:
                ours.give_up(error)  # the other ranks wait in commit()
            raise

    return save_16bit_model


def _copying(original: Any) -> Any:
    @functools.wraps(original)
    def _copy_recovery_script(self: Any, save_path: str) -> None:
        ours = engine_of(self)
        failed: list[OSError] = []
        with small_files.collected(Path(save_path), failed):
            original(self, save_path)
        for error in failed:
            if ours is None or not ours.defer(error):
                raise error

    return _copy_recovery_script


def _validating(original: Any) -> Any:
    @functools.wraps(original)
    def _checkpoint_tag_validation(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        except BaseException:
            if (ours := engine_of(self)) is not None:
                ours.withdraw()  # it compares the tags of all ranks, and raises on all of them
            raise

    return _checkpoint_tag_validation


def _loading(original: Any) -> Any:
    @functools.wraps(original)
    def load_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        wait_for_every()  # whoever loads may want a checkpoint that another engine saves
        return original(self, *args, **kwargs)

    return load_checkpoint


def _after(wait: Callable[[Any], object], original: Any) -> Any:
    """Wrap a method of DeepSpeed, so that it first waits, by ``wait``, for the saves of its engine."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (ours := engine_of(self)) is not None:
            wait(ours)
        return original(self, *args, **kwargs)

    return method
