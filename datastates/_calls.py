"""Shared parts of the public calls: they check arguments and open the world of ranks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from datastates._base import log
from datastates.commit import health, manifest, newest
from datastates.commit.directory_tier import readable_tier
from datastates.commit.names import checked_step
from datastates.config import IoSettings, RankSettings
from datastates.errors import CheckpointNotFoundError, RestoreError
from datastates.executor.executor import Executor
from datastates.executor.make import make_small_executor
from datastates.executor.timeline import TRAINING_THREAD, Span
from datastates.exporting import export as exporting
from datastates.exporting.export import Exported, cast_type
from datastates.exporting.safetensors_layout import parse_size
from datastates.exporting.target import is_file, refuse_existing
from datastates.formats import recognise
from datastates.formats.format import Format, Opened
from datastates.ranks.world import SoloWorld, World, world_of
from datastates.reading.tensors import Tensors
from datastates.restoring.comparison import Comparison
from datastates.restoring.meeting import Meeting
from datastates.restoring.newest_whole import compare as compare_newest
from datastates.restoring.newest_whole import restore as restore_newest
from datastates.restoring.renaming import Renames, checked_renames
from datastates.restoring.request import RestoreRequest
from datastates.restoring.restore import Restore
from datastates.restoring.restored import Restored
from datastates.restoring.selection import checked_keys
from datastates.saving import gate
from datastates.state.provider import StateProvider
from datastates.state.pytrees import is_leaf
from datastates.storage import store_of
from datastates.storage.location import Location, PathLike

IN_PYTHON = "take it with step={step}"
"""Advice to callers in Python on how to take another step."""


def open_world(settings: RankSettings, directory: Location) -> World:
    return world_of(settings.rank, settings.world_size, directory, settings.rank_timeout)


def world_beside(path: Location) -> Location:
    """The directory where ranks meet to restore from ``path``: beside a checkpoint, never in it."""
    has_checkpoints = (
        store_of(path).is_folder(path)
        and not store_of(path).exists(path / manifest.FILE)
        and recognise.other(path) is None
    )
    return path if has_checkpoints else path.parent


def refuse_checkpoint(directory: Location) -> None:
    """Raise ValueError if a directory for checkpoints is itself a checkpoint: restore would find none saved in it."""
    if manifest.look(directory) is not None:
        raise ValueError(
            f"directory: {directory} is itself a checkpoint: give the directory that it lies in, or use "
            "datastates.restore"
        )
    if (kind := recognise.other(directory)) is not None:
        raise ValueError(
            f"directory: {directory} is {kind.NAME}: give another directory for new checkpoints, and restore from this "
            f"one by datastates.restore(providers, {str(directory)!r})"
        )


def warn_of_other(directory: Location) -> None:
    """If a directory has no checkpoint of a training run, log the name of another checkpoint in it."""
    if (there := recognise.newest_other(directory)) is not None:
        path, what = there
        log.warning(
            "%s has no checkpoint of this training run. %s is %s: datastates.restore(providers, %r) restores from it",
            *(directory, path, what, str(path)),
        )


def meeting_of(world: World, name: str, attempt: int) -> Meeting:
    """The meeting for one attempt of a restore; attempts count from 0."""
    return Meeting(world, f"{name}/again/{attempt}" if attempt else name)


def check_order(providers: Sequence[StateProvider]) -> None:
    """Raise TypeError for a path in the place of providers."""
    if isinstance(providers, (str, bytes, os.PathLike)):
        raise TypeError(f"providers: got the path {providers!r:.80}; providers come first, then the path")


def open_other(kind: Format, path: Location, meeting: Meeting, request: RestoreRequest) -> Tensors:
    """Open a checkpoint of another format on all ranks, which must request the same.

    Raises:
        CheckpointNotFoundError: It is of another step.
        FormatError, StorageError: As :meth:`Format.open` does.
        RestoreError: Another rank failed, or wants something else.
    """
    meeting.choose(request.wish, lambda: b"")
    opened = meeting.together("open", lambda: of_step(kind.open(path), path, request.step))
    found = f"{opened.format}, {opened.tensors.path}, step {opened.tensors.step}"

    def decide(told: dict[int, bytes]) -> bytes:
        if len(set(told.values())) > 1:
            said = "; ".join(f"rank {rank}: {text.decode()}" for rank, text in sorted(told.items()))
            raise RestoreError(f"the ranks have opened different checkpoints: {said}")
        return b""

    meeting.settle("opened", lambda: found.encode("utf-8", "backslashreplace"), decide)
    return opened.tensors


def of_step(opened: Opened, path: Location, step: int | None) -> Opened:
    """Return ``opened``; raises CheckpointNotFoundError if a ``step`` is wanted and it is of another step."""
    if step is not None and (saved := opened.tensors.step) != step:
        of = "no step that it names" if saved is None else f"step {saved}"
        raise CheckpointNotFoundError(f"{path} is of {of}, not of step {step}")
    return opened


@contextlib.contextmanager
def opened(path: PathLike, step: int | None, advice: str = IN_PYTHON) -> Iterator[Opened]:
    """Open the checkpoint that a path means, of any format, protected from deletion.

    If the newest checkpoint of a directory is damaged, the error names an older one that looks whole, and ``advice``
    tells how to take it.
    """
    given, wish = Location.of(path), None if step is None else checked_step(step)
    with (
        recognise.kept(given, wish) as (kind, found),
        health.advice(readable_tier(given), found, advice if found != given and wish is None else None),
    ):
        yield of_step(kind.open(found), found, wish)


def export(
    source: PathLike,
    target: PathLike,
    *,
    settings: IoSettings,
    step: int | None,
    keys: str | Sequence[str],
    rename: Renames,
    dtype: object,
    shard_size: str | int | None,
    progress: Callable[[int, int], object] | None,
    advice: str = IN_PYTHON,
) -> Exported:
    """Write the tensors of a checkpoint as files of other tools.

    Arguments and errors as for :func:`datastates.export`; ``advice`` as for :func:`opened`.
    """
    to, cast, globs = Location.of(target), cast_type(dtype), checked_keys(keys)
    if shard_size is not None and is_file(to):
        raise ValueError(f"shard_size: {to.name} is one file; give a folder for several")
    nbytes = None if shard_size is None else parse_size(str(shard_size))
    refuse_existing(to)
    with opened(source, step, advice) as found:
        return exporting.export(
            found.tensors,
            found.format,
            to,
            partial(make_small_executor, settings),
            keys=globs or ["*"],
            rename=checked_renames(rename),
            dtype=cast,
            shard_nbytes=nbytes,
            direct_io=settings.direct_io,
            progress=progress or (lambda *_: None),
        )


def restore_by(
    path: Location,
    meant: newest.Given | Format,
    providers: Sequence[StateProvider],
    meetings: Callable[[int], Meeting],
    executor: Callable[[int], Executor],
    options: Mapping[str, Any],
    *,
    wait: Callable[[], None] = lambda: None,
    prove: Callable[[], None] = lambda: None,
) -> Restored | None:
    """Restore; the common part of :func:`datastates.restore` and :meth:`datastates.Checkpointer.restore`.

    Args:
        path: A checkpoint directory, or a directory of them, or a checkpoint of another format.
        meant: What it means.
        providers: The state to restore.
        meetings: Returns the meeting of the n-th attempt, from 0.
        executor: Returns the executor to use, given the number of bytes that will be read.
        options: Fields of a :class:`~datastates.restoring.request.RestoreRequest`, as the user gave them.
        wait: Called when the state may change, before a checkpoint is chosen.
        prove: Called on the coordinator before a checkpoint is looked for; raises StorageError to refuse the directory.

    Returns:
        The result; None if there is no checkpoint at all.

    Raises:
        CheckpointNotFoundError: There is no checkpoint of the wanted step.
    """
    begin = time.monotonic()
    providers, request = _checked(providers, options, meetings(0))
    gate.pass_all()  # a restore changes the state, so it waits for captures like any update
    wait()
    if not isinstance(meant, newest.Given):
        meeting = meetings(0)
        restored = Restore(open_other(meant, path, meeting, request), providers, executor, meeting, request).run()
    else:

        def candidates() -> list[Location]:
            prove()
            return newest.candidates(meant, request.step, certain=not request.fallback)

        found = restore_newest(providers, meant.tier, candidates, executor, meetings, request)
        if found is None:
            return None if request.step is None else recognise.refuse_absence(path, request.step)
        restored = found
    restored.spans.insert(0, Span("open", TRAINING_THREAD, begin, restored.spans[0].begin, 0))
    log.info("%s", restored.report)
    return restored


def compare_by(
    path: Location,
    meant: newest.Given | Format,
    providers: Sequence[StateProvider],
    meeting: Meeting,
    executor: Callable[[int], Executor],
    options: Mapping[str, Any],
) -> Comparison:
    """Compare the checkpoint with the state, without restoring. Arguments and errors as for :func:`restore_by`."""
    providers, request = _checked(providers, {**options, "strict": False}, meeting)
    if not isinstance(meant, newest.Given):
        return Restore(open_other(meant, path, meeting, request), providers, executor, meeting, request).compare()
    candidates = partial(newest.candidates, meant, request.step, certain=True)
    found = compare_newest(providers, meant.tier, candidates, executor, meeting, request)
    return recognise.refuse_absence(path, request.step) if found is None else found


def _checked(
    providers: Sequence[StateProvider], options: Mapping[str, Any], meeting: Meeting
) -> tuple[Sequence[StateProvider], RestoreRequest]:
    """The checked providers and request. If they are wrong, the other ranks hear of it before the error is raised."""
    try:
        check_order(providers)
        # a generator's providers are gone through more than once
        kept = list(providers) if isinstance(providers, Iterator) else providers
        return kept, RestoreRequest.of(options)
    except Exception as error:
        meeting.refuse(error)


def load_like(
    path: Location, like: Mapping[str, Any], executor: Callable[[int], Executor], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Read trees into new arrays like the arrays in ``like``; arguments and errors as for :func:`datastates.load`."""
    from datastates.providers.pytree import from_pytree

    if not isinstance(like, Mapping):
        raise TypeError(f"like: a tree for each provider's name is wanted, not a {type(like).__name__}")
    meant = recognise.meant(path)
    # the names in a file of safetensors, say: no provider's name is in front of them
    is_bare = not isinstance(meant, newest.Given) and all(is_leaf(tree) for tree in like.values())
    trees = {"like": dict(like)} if is_bare else like
    providers = [from_pytree(name, tree) for name, tree in trees.items()]
    meetings = partial(meeting_of, SoloWorld(), "load")
    if restore_by(path, meant, providers, meetings, executor, options) is None:
        recognise.refuse_absence(path, None)
    found: dict[str, Any] = {provider.name: provider.tree for provider in providers}
    return found["like"] if is_bare else found
