"""What all public calls share: their arguments checked, and the ranks that they meet."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datastates.commit import directories, manifest
from datastates.config import RankSettings
from datastates.executor.executor import Executor
from datastates.ranks.world import World, world_of
from datastates.restoring.fallback import check
from datastates.restoring.fallback import restore as restore_newest
from datastates.restoring.meeting import Meeting
from datastates.restoring.restored import Restored
from datastates.saving import gate
from datastates.state.provider import StateProvider


def open_world(settings: RankSettings, directory: Path) -> World:
    return world_of(settings.rank, settings.world_size, directory, settings.rank_timeout)


def world_beside(path: Path) -> Path:
    """Where ranks that restore meet: beside a checkpoint, never in it."""
    return path if path.is_dir() and not (path / manifest.FILE).exists() else path.parent


def checked_step(step: Any) -> int:
    """A step from any integer, NumPy's too; TypeError or ValueError otherwise."""
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise TypeError(f"step: must be an integer, got {step!r:.40} ({type(step).__name__})")
    number = operator.index(step)
    if not 0 <= number < 10**18:
        raise ValueError(f"step: {number} is not from 0 to 10**18 - 1")
    return number


def meeting_of(world: World, name: str, timeout: float, attempt: int) -> Meeting:
    """Of the ranks that restore, at one of its attempts."""
    return Meeting(world, f"{name}/again/{attempt}" if attempt else name, timeout)


def wished(
    meetings: Callable[[int], Meeting],
    providers: Sequence[StateProvider],
    step: Any,
    *,
    fallback: bool,
    strict: bool,
) -> int | None:
    """The step that is wanted; what is impossible is raised once the other ranks know of it."""
    try:
        check_order(providers)
        wish = None if step is None else checked_step(step)
        check(fallback=fallback, step=wish, strict=strict)
    except Exception as error:
        meetings(0).refuse(error)
    return wish


def check_order(providers: Sequence[StateProvider]) -> None:
    """Refuse a path where providers belong."""
    if isinstance(providers, (str, bytes, os.PathLike)):
        raise TypeError(f"providers: got the path {providers!r:.80}; providers come first, then the path")


def restore_by(
    directory: Path,
    providers: Sequence[StateProvider],
    meetings: Callable[[int], Meeting],
    executor: Callable[[int], Executor],
    wait: Callable[[], None] = lambda: None,
    *,
    step: Any,
    fallback: bool,
    strict: bool,
    **how: Any,
) -> Restored | None:
    """What both ways to restore share. ``wait`` is called once the state may change, before anything is looked for."""
    wish = wished(meetings, providers, step, fallback=fallback, strict=strict)
    gate.pass_all()  # restoring changes the state, too
    wait()
    restored = restore_newest(
        providers,
        lambda: directories.candidates(directory, wish),
        executor,
        meetings,
        step=wish,
        fallback=fallback,
        strict=strict,
        **how,
    )
    if restored is None and wish is not None:
        directories.refuse_absence(directory, wish)
    return restored
