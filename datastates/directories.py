"""A directory of checkpoints: what is committed in it, what interrupted runs left, and what is deleted."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from datastates import durable, manifest
from datastates.errors import CheckpointNotFoundError, FormatError, StorageError

_STEP = re.compile(r"step-([0-9]{8,18})(?:\.r([0-9]{1,9}))?\Z")
_PARTIAL = re.compile(r"(.+)\.partial-[0-9a-f]{8}\Z", re.DOTALL)


def find(path: Path) -> Path:
    """The checkpoint directory that ``path`` means: itself, or the newest one in it."""
    if _is_committed(path):
        return path
    steps = committed(path)
    if not steps:
        raise CheckpointNotFoundError(f"no committed checkpoint at {path}")
    return steps[max(steps)]


def committed(root: Path) -> dict[int, Path]:
    """The committed checkpoints below ``root`` by step, ascending; of several of one step the one saved last."""
    return {step: revisions[-1] for step, revisions in _revisions(root).items()}


def superseded(root: Path) -> list[Path]:
    """Committed checkpoints of a step that was saved again later."""
    return [path for revisions in _revisions(root).values() for path in revisions[:-1]]


def _revisions(root: Path) -> dict[int, list[Path]]:
    """The committed checkpoints of each step, the one saved last at the end; one look at the directory."""
    found: dict[int, list[tuple[int, Path]]] = {}
    for entry in _entries(root):
        match = _STEP.match(entry.name)
        if match and _is_committed(entry):
            found.setdefault(int(match[1]), []).append((int(match[2] or 0), entry))
    return {step: [path for _, path in sorted(found[step])] for step in sorted(found)}


def target(root: Path, step: int, *, in_flight: bool = True) -> Path:
    """Where the next checkpoint of a step will stand: a step saved again gets a revision, nothing is overwritten.

    ``in_flight``: behind those that are still being written, too.
    """
    name = step_name(step)
    with durable.step("list", root):
        entries = [e for e in _names(root) if e.startswith(name)]
    names = (m[1] if (m := _PARTIAL.match(e)) and in_flight else e for e in entries)
    taken = [int(m[2] or 0) for m in map(_STEP.match, names) if m and int(m[1]) == step]
    return root / (f"{name}.r{1 + max(taken)}" if taken else name)


def step_name(step: int) -> str:
    """What the directory of a step is called, revisions apart."""
    return f"step-{step:08d}"


def debris(root: Path) -> list[Path]:
    """What interrupted snapshots and deletions left; never a committed checkpoint, nor one being written."""
    left = (e for e in _entries(root) if (m := _PARTIAL.match(e.name)) and _STEP.match(m[1]))
    return [e for e in left if not _is_locked(e)]


def debris_of(target: Path) -> list[Path]:
    """What interrupted snapshots to one path left beside it."""
    partial = (e for e in _entries(target.parent) if (m := _PARTIAL.match(e.name)) and m[1] == target.name)
    return [e for e in partial if not _is_locked(e)]


def _is_committed(path: Path) -> bool:
    try:
        os.stat(path / manifest.FILE)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:  # not knowing must not pass for absence
        raise StorageError(error.errno or 0, "stat", str(path / manifest.FILE)) from error
    return True


def _is_locked(entry: Path) -> bool:
    with _unlocked(entry) as unlocked:
        return not unlocked


@contextlib.contextmanager
def _unlocked(entry: Path) -> Iterator[bool]:
    """Hold a partial directory's lock if nobody else does; what cannot be locked counts as held."""
    try:
        fd = os.open(entry / manifest.LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True  # its writer has died before it locked it, or while committing or deleting it
        return
    except OSError:
        yield False  # not ours to judge
        return
    try:
        yield durable.try_lock(fd) is True
    finally:
        os.close(fd)


def _entries(root: Path) -> list[Path]:
    with durable.step("list", root):
        return sorted(e for e in map(root.joinpath, _names(root)) if e.is_dir() and not e.is_symlink())


def _names(root: Path) -> list[str]:
    try:
        return os.listdir(root)
    except (FileNotFoundError, NotADirectoryError):
        return []


def of_attempt(target: Path, attempt: str) -> Path | None:
    """Where the checkpoint of an attempt stands, if it has been committed at ``target`` or as a revision beside it."""
    for entry in _entries(target.parent):
        if entry.name == target.name or re.fullmatch(re.escape(target.name) + r"\.r[0-9]{1,9}", entry.name):
            with contextlib.suppress(CheckpointNotFoundError, FormatError):
                if manifest.open(entry).attempt == attempt:
                    return entry
    return None


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Keep other processes from deleting a checkpoint while it is read, where the file system has locks.

    Raises:
        CheckpointNotFoundError: There is none, or it is being deleted.
    """
    try:
        with durable.step("open", path / manifest.FILE):
            fd = os.open(path / manifest.FILE, os.O_RDONLY | os.O_CLOEXEC)
    except StorageError as error:
        manifest.refuse_missing(path, error)
        raise
    durable.hold(fd)
    try:
        if durable.try_lock(fd, fcntl.LOCK_SH) is False or not durable.is_open(fd, path / manifest.FILE):
            raise CheckpointNotFoundError(f"{path} is being deleted")
        yield
    finally:
        durable.release(fd)


@contextlib.contextmanager
def kept(path: Path) -> Iterator[Path]:
    """A container file itself, or what :func:`find` finds, kept from deletion as in :func:`reading`."""
    if path.is_file():
        yield path
        return
    found = find(path)
    with reading(found):
        yield found


def remove(path: Path) -> bool:
    """Delete a checkpoint: a rename takes the commit back at once, so that no half checkpoint is ever seen.

    False when it stays, because somebody reads it. Raises StorageError.
    """
    left = path.with_name(f"{path.name}.partial-{secrets.token_hex(4)}")
    with durable.step("open", path / manifest.FILE):
        fd = os.open(path / manifest.FILE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if durable.try_lock(fd) is False:
            return False
        with durable.step("rename", path):
            os.rename(path, left)
    finally:
        os.close(fd)
    durable.sync_directory(path.parent)
    clear(left)
    return True


def clear(left: Path) -> None:
    """Delete debris, unless a writer holds it by now."""

    def tolerate(_: object, name: str, error: tuple[type[BaseException], BaseException, object]) -> None:
        # another process clears it away, too, or has just taken it for its own
        if not isinstance(error[1], OSError) or error[1].errno not in (errno.ENOENT, errno.ENOTEMPTY):
            raise error[1]

    with _unlocked(left) as unlocked, durable.step("remove", left):
        if unlocked:
            shutil.rmtree(left, onerror=tolerate)
