"""Calls without a :class:`Checkpointer`: :func:`snapshot`, :func:`restore`, :func:`load` and :func:`open`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from datastates import _calls
from datastates._base import paths
from datastates._base.paths import PathLike
from datastates.commit import directories, health, retention
from datastates.commit.ballot import Ballot
from datastates.config import IoOptions, IoSettings, RankOptions, RankSettings
from datastates.errors import (
    CheckpointNotFoundError,
)
from datastates.executor.make import make_executor
from datastates.ranks.together import meet
from datastates.restoring import loading
from datastates.restoring.mapping import Checkpoint
from datastates.restoring.provider_view import Trust
from datastates.restoring.restore import Verify
from datastates.restoring.restored import Restored
from datastates.restoring.stored import Stored
from datastates.restoring.telling import refuse_to_meet, refuse_to_restore, telling
from datastates.saving.engine import take_one
from datastates.saving.snapshot import Snapshot
from datastates.saving.target import Target
from datastates.state.provider import StateProvider


def snapshot(
    providers: Sequence[StateProvider],
    path: PathLike,
    *,
    step: int = 0,
    auto_gate: bool = True,
    **options: Unpack[RankOptions],
) -> Snapshot:
    """Write one checkpoint directory at ``path``, which must not exist, without a :class:`Checkpointer`.

    Returns at once, as :meth:`Checkpointer.snapshot` does; the interpreter's exit waits for the commit.

    Args:
        providers: What makes the state.
        path: The directory that appears once the checkpoint is committed.
        step: A number to store with it.
        auto_gate: Let every torch optimizer's ``step()`` wait for capture.
        **options: Fields of :class:`~datastates.config.IoSettings`.

    Raises:
        FileExistsError: There is something at ``path``.
        SettingsError, ProviderError: As for :class:`Checkpointer`.
    """
    name = "snapshot"
    with telling(lambda: paths.local(path).parent, options, partial(refuse_to_meet, name)):
        settings = RankSettings.of(options)
        _calls.check_order(providers)
        target, step = paths.local(path), _calls.checked_step(step)
    world = _calls.open_world(settings, target.parent)

    def prepare() -> None:
        if target.exists():
            raise FileExistsError(f"{target} exists, and is not written over: delete it or choose another path")
        for left in retention.debris_of(target):
            retention.clear(left)

    try:
        meet(world, name, target, prepare, timeout=settings.rank_timeout)
        sequence = partial(directories.next_sequence, target.parent)
        ballot = Ballot(world, f"{name}/commit", sequence, step=step, timeout=settings.rank_timeout)
        return take_one(settings, providers, world, ballot, Target.fixed(lambda: target), auto_gate=auto_gate)
    except BaseException:
        world.close()
        raise


def restore(
    providers: Sequence[StateProvider],
    path: PathLike,
    *,
    step: int | None = None,
    strict: bool = True,
    trust: Trust = (),
    verify: Verify = "checksum",
    fallback: bool = False,
    **options: Unpack[RankOptions],
) -> Restored:
    """Restore one checkpoint in place: the mirror of :func:`snapshot`; all ranks call it together.

    Args:
        providers: What to restore.
        path: A checkpoint directory, or a directory of them.
        step: Which of them; None for the newest.
        strict: As for :meth:`Checkpointer.restore`, as are the errors.
        trust: As for :meth:`Checkpointer.restore`.
        verify: As for :meth:`Checkpointer.restore`.
        fallback: As for :meth:`Checkpointer.restore`.
        **options: Fields of :class:`~datastates.config.RankSettings`.

    Raises:
        CheckpointNotFoundError: There is no committed checkpoint, or none of that step.
    """
    name = "restore"
    with telling(lambda: _calls.world_beside(paths.local(path)), options, partial(refuse_to_restore, name)):
        settings = RankSettings.of(options)
        _calls.check_order(providers)
        given = paths.local(path)
    with contextlib.closing(_calls.open_world(settings, _calls.world_beside(given))) as world:
        restored = _calls.restore_by(
            given,
            providers,
            partial(_calls.meeting_of, world, name, settings.rank_timeout),
            lambda n: make_executor(settings, n),
            step=step,
            fallback=fallback,
            strict=strict,
            trust=trust,
            verify=verify,
            replicas=settings.replicas,
        )
    if restored is None:
        directories.refuse_absence(given, None)
    return restored


def load(path: PathLike, *, step: int | None = None, trust: Trust = (), **options: Unpack[IoOptions]) -> dict[str, Any]:
    """Read a checkpoint as nested host arrays and objects, with no providers: ``{provider name: value}``.

    Args:
        path: A checkpoint directory, a directory of them, or one container file.
        step: Which of a directory of them, None for the newest; otherwise the step that it must be.
        trust: As for :meth:`Checkpointer.restore`.
        **options: Fields of :class:`~datastates.config.IoSettings`.

    Raises:
        TrustError: An object needs a class that is not trusted.
        CorruptError, FormatError: A file is damaged or missing; the message names an older checkpoint that looks whole.
        CheckpointNotFoundError: There is no committed checkpoint, or none of that step.
        ImportError: An element type needs torch or ml_dtypes and neither is installed.
    """
    settings = IoSettings.of(options)
    with _kept(path, step) as found:
        return loading.load(found, lambda n: make_executor(settings, n), trust=trust)


@contextlib.contextmanager
def _kept(path: PathLike, step: int | None) -> Iterator[Path]:
    """What a path means, kept from deletion; an error that says that it is damaged names one that looks whole."""
    given, wish = paths.local(path), None if step is None else _calls.checked_step(step)
    with directories.kept(given, wish) as found:
        if wish is not None and found.is_file() and (saved := Stored.of_file(found).head.step) != wish:
            raise CheckpointNotFoundError(f"{found} is of step {saved}, not of step {wish}")
        with (
            health.advice(found, "take it with step={step}")
            if found != given and wish is None
            else contextlib.nullcontext()
        ):
            yield found


def open(path: PathLike, *, step: int | None = None, **options: Unpack[IoOptions]) -> Checkpoint:
    """Open a checkpoint to read single arrays: a mapping of full keys to host arrays, each read when it is asked for.

    Retention does not delete the checkpoint before it is closed. What several ranks saved is opened rank by rank, as it
    is needed.

    Args:
        path: As for :func:`load`.
        step: As for :func:`load`.
        **options: Fields of :class:`~datastates.config.IoSettings`.

    Raises:
        FormatError: The file is damaged; the message names an older checkpoint that looks whole.
        CheckpointNotFoundError: There is no committed checkpoint, or none of that step.
    """
    settings = IoSettings.of(options)
    most = (settings.queue_depth + 1) * settings.block  # what one array after another keeps in flight
    with contextlib.ExitStack() as reading:
        found = reading.enter_context(_kept(path, step))
        stored = Stored.of_file(found) if found.is_file() else Stored.open(found)
        return Checkpoint(stored, lambda nbytes: make_executor(settings, min(nbytes, most)), reading.pop_all())
