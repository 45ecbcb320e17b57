"""Loads a DeepSpeed checkpoint on another number of ranks, straight from the files of the ranks that saved."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from datastates._base import log
from datastates.adapters.deepspeed import binding
from datastates.adapters.deepspeed.elastic.zero_live import LiveZero
from datastates.adapters.deepspeed.save import wait_for_every
from datastates.adapters.deepspeed.settings import DeepSpeedSettings
from datastates.errors import RestoreError
from datastates.formats import zero_saved
from datastates.ranks.world import world_of
from datastates.restoring.meeting import Meeting
from datastates.saving import gate
from datastates.storage import Location, location


def load_checkpoint(
    engine: Any,
    load_dir: str | os.PathLike[str],
    tag: str | None = None,
    *,
    load_module_strict: bool = True,
    load_lr_scheduler_states: bool = True,
) -> tuple[str | None, dict[str, Any] | None]:
    """Load a checkpoint that any number of data-parallel ranks saved. All ranks call it together.

    Each rank reads its present part of the master weights and the optimizer's state from the files of all ranks, and
    verifies it. Some ranges are so short that reading all bytes under their checksums would take much longer: these
    are not verified, and their keys are logged. DeepSpeed itself loads everything else. Names, shapes and types are
    compared on all ranks before anything is changed.

    Args:
        engine: A DeepSpeed engine with ZeRO-1, ZeRO-2 or ZeRO-3.
        load_dir: The directory of the checkpoints.
        tag: The tag of the checkpoint; by default the one that ``latest`` names.
        load_module_strict: Whether the module must have the same names as the stored one.
        load_lr_scheduler_states: Whether to restore the state of the scheduler.

    Returns:
        The path of the module's file, and the client's state; None for both if no tag is given and no ``latest`` is
        there.

    Raises:
        RestoreError: The checkpoint does not fit the engine, or one of them is not supported: pipelines, model
            parallelism, experts, state on NVMe. Nothing has been changed.
        FormatError: Another program wrote a file (the message says what to do), or a file is damaged.
        CorruptError: Contents do not match their checksum; the message names them. The engine's state is spoilt then.
        CheckpointNotFoundError: There is no checkpoint of that tag.
        StorageError: A file is missing or cannot be read; the message names it.
        CommitError: Loading failed on another rank; the message says why.
        ValueError: ``load_dir`` is the address of a store instead of a file path.
    """
    location.refuse_address(load_dir)
    ours = binding.engine_of(engine)
    settings = DeepSpeedSettings.of_entry(None) if ours is None else ours.settings
    wait_for_every()
    gate.pass_all()  # loading overwrites the training state: pending snapshots capture it first
    with contextlib.ExitStack() as closing:
        world = world_of(None, None, Location("deepspeed-load"), settings.rank_timeout)
        closing.callback(world.close)
        meeting = Meeting(world, "load")
        tag = _agree_on_tag(meeting, Path(load_dir), tag)
        if tag is None:
            log.warning("%s: no file named latest, and no tag given: nothing is loaded", load_dir)
            return None, None
        live, saved = _open(meeting, engine, Location(load_dir) / tag, strict=load_module_strict)
        _restore(meeting, live, saved, settings)
    with _handing_over(engine, live, saved):
        path, client_state = engine.load_checkpoint(
            str(load_dir), tag, load_module_strict=load_module_strict, load_lr_scheduler_states=load_lr_scheduler_states
        )
    return path, client_state


def _agree_on_tag(meeting: Meeting, folder: Path, wish: str | None) -> str | None:
    """The tag of the checkpoint, the same on all ranks: one rank reads ``latest``. None without a tag."""

    def decide(told: dict[int, bytes]) -> bytes:
        if len(wishes := set(told.values())) > 1:
            raise RestoreError(f"the ranks are to load different checkpoints: {sorted(map(bytes.decode, wishes))}")
        if wish is not None:
            return wish.encode()
        try:
            return (folder / "latest").read_text().strip().encode()
        except FileNotFoundError:
            return b""

    return meeting.settle("tag", (wish or "").encode, decide).decode() or None


def _open(meeting: Meeting, engine: Any, path: Location, *, strict: bool) -> tuple[LiveZero, zero_saved.SavedZero]:
    """Open engine and checkpoint, and compare their kinds and modules; all ranks go on, or none."""

    def compared() -> tuple[LiveZero, zero_saved.SavedZero]:
        live, saved = LiveZero(engine), zero_saved.SavedZero(path)
        if (live.stage == 3) != (saved.stage == 3):
            raise RestoreError(f"{path} was saved with ZeRO-{saved.stage}, the engine has ZeRO-{live.stage}")
        _compare_modules(engine, saved, strict=strict)
        return live, saved

    return meeting.together("open", compared)


def _compare_modules(engine: Any, saved: zero_saved.SavedZero, *, strict: bool) -> None:
    live, stored = engine.module.state_dict(), saved.module
    missing = [name for name in live if name not in stored] if strict else []
    unexpected = [name for name in stored if name not in live] if strict else []
    # with ZeRO-3 parameters are empty here: the restore compares their partitions
    compared = live.keys() & (stored.keys() if saved.stage < 3 else saved.buffer_names)
    mismatched = {}
    for name in sorted(compared):
        there, shape = saved.shape(name), getattr(live[name], "shape", None)
        if there is not None and shape is not None and there != tuple(shape):
            mismatched[name] = f"shape {there} in the checkpoint, {tuple(shape)} in the module"
    if missing or unexpected or mismatched:
        parts = [f"the checkpoint lacks {', '.join(map(repr, missing[:8]))}"] if missing else []
        parts += [f"the module lacks {', '.join(map(repr, unexpected[:8]))}"] if unexpected else []
        parts += [f"{name!r}: {what}" for name, what in list(mismatched.items())[:8]]
        raise RestoreError(
            f"{saved.path} does not fit the module: {'; '.join(parts)}",
            missing=missing,
            unexpected=unexpected,
            mismatched=[f"{name}: {what}" for name, what in mismatched.items()],
        )


def _restore(meeting: Meeting, live: LiveZero, saved: zero_saved.SavedZero, settings: DeepSpeedSettings) -> None:
    def described() -> Sequence[Any]:
        frozen = [live.frozen_provider()] if saved.has_frozen else []
        return [live.provider(), *frozen]

    result = saved.restore(meeting, settings, described)
    # before DeepSpeed's collectives
    plain = meeting.together("plain", lambda: [saved.plain(share.scalar_source) for share in live.shares])
    for share, states in zip(live.shares, plain, strict=True):
        live.put(share, states)
    log.info(
        "%s: saved on %d ranks, restored on %d; rank %d needed %d bytes of it and read %d",
        *(saved.path, saved.ranks, live.ranks, live.rank, result.needed_nbytes, result.read_nbytes),
    )


@contextlib.contextmanager
def _handing_over(engine: Any, live: LiveZero, saved: zero_saved.SavedZero) -> Iterator[None]:
    """Let DeepSpeed find the checkpoint as if as many ranks as there are now had saved it."""
    model = str(saved.model_path(live.rank % saved.ranks))
    own = engine.checkpoint_engine
    engine.checkpoint_engine = _AsSavedHere(own, model, live, saved)
    engine._get_all_ckpt_names = lambda folder, tag: [model]
    try:
        yield
    finally:
        del engine._get_all_ckpt_names
        engine.checkpoint_engine = own


class _AsSavedHere:
    """Replaces an engine's checkpoint engine, and returns files as if the present number of ranks had saved them.

    For the optimizer's file it returns the live state, which is restored already. DeepSpeed copies it onto itself and
    derives the same things from it as from a loaded file.
    """

    def __init__(self, own: Any, model: str, live: LiveZero, saved: zero_saved.SavedZero) -> None:
        self._own = own
        self._model = model
        self._live = live
        self._saved = saved

    def load(self, path: str, map_location: Any = None) -> dict[str, Any]:
        """Return the contents of the module's file, or of this rank's optimizer file."""
        if path != self._model:
            return {"optimizer_state_dict": {**self._live.state(), **self._saved.globals}}
        state: dict[str, Any] = self._own.load(path, map_location=map_location)
        state["dp_world_size"] = self._live.ranks
        if self._saved.has_frozen:
            state["frozen_param_fragments"] = self._live.frozen()
        return state
