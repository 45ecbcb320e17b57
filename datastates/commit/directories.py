"""A directory of checkpoints: what is committed in it, what interrupted runs left, and what is deleted."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from datastates._base import files, locks
from datastates.commit import manifest
from datastates.errors import CheckpointNotFoundError, FormatError, StorageError

_log = logging.getLogger("datastates")
_STEP = re.compile(r"step-([0-9]{8,18})(?:\.r([0-9]{1,9}))?\Z")
_AT_ONCE = 32
_PARTIAL = re.compile(r"(.+)\.partial-[0-9a-f]{8}\Z", re.DOTALL)


def candidates(path: Path, step: int | None = None) -> list[Path]:
    """The checkpoints that ``path`` may mean, the newest at the end: itself, or all in it, or that of a step.

    Raises:
        CheckpointNotFoundError: It is the checkpoint of another step.
    """
    if _manifest_stat(path) is not None:
        if step is not None and (found := manifest.open(path).step) != step:
            raise CheckpointNotFoundError(f"{path} is the checkpoint of step {found}, not of step {step}")
        return [path]
    every = by_age(path)
    return list(every.values()) if step is None else [every[step]] if step in every else []


def find(path: Path, step: int | None = None) -> Path:
    """The checkpoint directory that ``path`` means: itself, or the newest one in it, or that of a step.

    Raises:
        CheckpointNotFoundError: There is none.
    """
    if not (found := candidates(path, step)):
        refuse_absence(path, step)
    return found[-1]


def refuse_absence(path: Path, step: int | None) -> NoReturn:
    """Raise CheckpointNotFoundError."""
    if (other := kind_of_other(path)) is not None:
        raise CheckpointNotFoundError(other)
    where = f" at {path}" if step is None else f" of step {step} in {path}"
    raise CheckpointNotFoundError(f"no committed checkpoint{where}")


def kind_of_other(path: Path) -> str | None:
    """What a directory is that holds a checkpoint of torch.distributed.checkpoint, in words; None where it is none."""
    if not (path / ".metadata").is_file():
        return None
    return (
        f"{path} is a checkpoint of torch.distributed.checkpoint: dcp.load reads it; of what datastates wrote, inspect "
        "and verify take each .distcp file by itself"
    )


def committed(root: Path) -> dict[int, Path]:
    """The committed checkpoints below ``root`` by step, ascending; of several of one step the one saved last."""
    return dict(sorted(by_age(root).items()))


def by_age(root: Path) -> dict[int, Path]:
    """The same, the one saved first at the beginning, which after a roll-back need not be that of the lowest step."""
    found: dict[int, Path] = {}
    for step, path in _in_order(root):
        found.pop(step, None)
        found[step] = path
    return found


def superseded(root: Path) -> list[Path]:
    """Committed checkpoints of a step that was saved again later."""
    every = _in_order(root)
    last = dict(every)
    return [path for step, path in every if path != last[step]]


def next_sequence(root: Path) -> int:
    """The number behind those of all committed checkpoints below ``root``."""
    return 1 + max((sequence for sequence, *_ in _numbered(root) if sequence is not None), default=0)


class Order:
    """Numbers the checkpoints of a directory as they were taken, in whichever order they are committed.

    Used by any thread.
    """

    def __init__(self, root: Path) -> None:
        """Look at nothing yet."""
        self._root = root
        self._lock = threading.Lock()
        self._given = 0
        self._begun = 0
        self._reserved: dict[int, int] = {}

    def sequence(self, number: int) -> int:
        """The sequence of the one that was taken as ``number``, counted from 0; asked for when it is committed."""
        with self._lock:
            if number >= self._begun:
                first = max(self._given + 1, next_sequence(self._root))
                # those taken before it may still come
                self._reserved.update({n: first + n - self._begun for n in range(self._begun, number + 1)})
                self._begun, self._given = number + 1, self._reserved[number]
            return self._reserved.pop(number)


def _in_order(root: Path) -> list[tuple[int, Path]]:
    """Step and path of every committed checkpoint, the one saved first at the beginning.

    Those without a number, of format 1, are older than those with one, and in the order of their steps. One whose
    manifest cannot be read stands behind those whose directories were last changed before its own.
    """
    numbered = _numbered(root)
    known = [(changed, sequence) for sequence, _, _, _, changed in numbered if sequence is not None]

    def age(sequence: int | None, step: int, revision: int, changed: int) -> tuple[int, bool, int, int]:
        if sequence is not None:
            return sequence, False, step, revision
        guess = max((s for before, s in known if before <= changed), default=0)
        return guess, guess > 0, step, revision

    ordered = sorted((age(s, step, revision, changed), path) for s, step, revision, path, changed in numbered)
    return [(step, path) for (_, _, step, _), path in ordered]


def _numbered(root: Path) -> list[tuple[int | None, int, int, Path, int]]:
    """Of every committed checkpoint: sequence, step, revision, path, and when names in it were last changed.

    The sequence is 0 where the manifest is of format 1, and None where it cannot be read.
    """
    found: list[tuple[int | None, int, int, Path, int]] = []
    for entry in _entries(root):
        if (match := _STEP.match(entry.name)) and (stat := _manifest_stat(entry)) is not None:
            identity = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
            with contextlib.suppress(CheckpointNotFoundError, FileNotFoundError):  # it has just been deleted
                changed = entry.stat().st_mtime_ns  # its last change was to unlink the lock, at the commit
                try:
                    sequence = _sequence(entry, identity)
                except StorageError:  # whoever opens it is told
                    sequence = None
                found.append((sequence, int(match[1]), int(match[2] or 0), entry, changed))
    return found


@functools.lru_cache(maxsize=1 << 16)
def _sequence(path: Path, identity: tuple[int, ...]) -> int | None:
    """What a manifest says, read once as long as the file stays the same."""
    del identity
    try:
        return manifest.open(path).sequence or 0
    except FormatError:
        return None


def target(root: Path, step: int, *, in_flight: bool = True) -> Path:
    """Where the next checkpoint of a step will stand: a step saved again gets a revision, nothing is overwritten.

    ``in_flight``: behind those that are still being written, too.
    """
    name = step_name(step)
    with files.syscall("list", root):
        entries = [e for e in _names(root) if e.startswith(name)]
    names = (m[1] if (m := _PARTIAL.match(e)) and in_flight else e for e in entries)
    taken = [int(m[2] or 0) for m in map(_STEP.match, names) if m and int(m[1]) == step]
    return root / (f"{name}.r{1 + max(taken)}" if taken else name)


def step_name(step: int) -> str:
    """What the directory of a step is called, revisions apart."""
    return f"step-{step:08d}"


def debris(root: Path, targets: re.Pattern[str] = _STEP) -> list[Path]:
    """What interrupted snapshots and deletions left; never a committed checkpoint, nor one being written.

    ``targets``: of what, by name; of steps unless it is said.
    """
    left = (e for e in _entries(root) if (m := _PARTIAL.match(e.name)) and targets.match(m[1]))
    return [e for e in left if not is_live(e)]


def without_manifest(root: Path) -> list[Path]:
    """Directories that are named as checkpoints are, and are none."""
    return [e for e in _entries(root) if _STEP.match(e.name) and _manifest_stat(e) is None]


def debris_of(target: Path) -> list[Path]:
    """What interrupted snapshots to one path left beside it."""
    return debris(target.parent, re.compile(re.escape(target.name) + r"\Z"))


def sweep(root: Path, targets: re.Pattern[str] = _STEP) -> None:
    """Delete what :func:`debris` finds, and say so; raises StorageError."""
    for path in debris(root, targets):
        _log.warning("removing what an interrupted run left: %s", path)
        clear(path)


def _manifest_stat(path: Path) -> os.stat_result | None:
    """What the system says of a checkpoint's manifest; None where there is none, and so no checkpoint."""
    try:
        return os.stat(path / manifest.FILE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # not knowing must not pass for absence
        raise StorageError(error.errno or 0, "stat", str(path / manifest.FILE)) from error


def is_live(entry: Path) -> bool:
    """Whether somebody is writing into a partial directory, as far as that can be told."""
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
        yield locks.try_lock(fd) is True
    finally:
        os.close(fd)


def _entries(root: Path) -> list[Path]:
    with files.syscall("list", root):
        return sorted(e for e in map(root.joinpath, _names(root)) if e.is_dir() and not e.is_symlink())


def _names(root: Path) -> list[str]:
    try:
        return os.listdir(root)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _length(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def lengths(paths: Sequence[Path]) -> list[int | None]:
    """The lengths of files, None where there is none."""
    if len(paths) == 1:
        return [_length(paths[0])]
    try:
        with ThreadPoolExecutor(_AT_ONCE) as pool:  # a shared file system takes long for each
            return list(pool.map(_length, paths))
    except RuntimeError:  # the interpreter is ending, and starts no more threads
        return list(map(_length, paths))


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
        with files.syscall("open", path / manifest.FILE):
            fd = os.open(path / manifest.FILE, os.O_RDONLY | os.O_CLOEXEC)
    except StorageError as error:
        manifest.refuse_missing(path, error)
        raise
    locks.hold(fd)
    try:
        if locks.try_lock(fd, fcntl.LOCK_SH) is False or not locks.is_open(fd, path / manifest.FILE):
            raise CheckpointNotFoundError(f"{path} is being deleted")
        yield
    finally:
        locks.release(fd)


def keep(find: Callable[[], Path | None], reader: contextlib.ExitStack) -> Path | None:
    """Keep the checkpoint that ``find`` gives from deletion until ``reader`` ends, as :func:`reading` does.

    Where it is deleted before that, ``find`` is asked again. None when it gives none.
    """
    while (path := find()) is not None:
        try:
            reader.enter_context(reading(path))
            break
        except CheckpointNotFoundError:
            if path == find():
                raise
    return path


@contextlib.contextmanager
def kept(path: Path, step: int | None = None) -> Iterator[Path]:
    """A container file itself, or what :func:`find` finds, kept from deletion as in :func:`reading`."""
    if path.is_file():
        yield path
        return
    with contextlib.ExitStack() as reader:
        found = keep(lambda: find(path, step), reader)
        assert found is not None
        yield found


def remove(path: Path) -> bool:
    """Delete a checkpoint: a rename takes the commit back at once, so that no half checkpoint is ever seen.

    False when it stays, because somebody reads it. Raises StorageError, but not where it is gone already.
    """
    left = path.with_name(f"{path.name}.partial-{secrets.token_hex(4)}")
    try:
        with files.syscall("open", path / manifest.FILE):
            fd = os.open(path / manifest.FILE, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if locks.try_lock(fd) is False:
                return False
            with files.syscall("rename", path):
                os.rename(path, left)
        finally:
            os.close(fd)
    except StorageError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):  # another process has deleted it
            return True
        raise
    files.sync_directory(path.parent)
    clear(left)
    return True


def clear(left: Path) -> None:
    """Delete debris, unless a writer holds it by now."""

    def tolerate(_: object, name: str, error: tuple[type[BaseException], BaseException, object]) -> None:
        # another process clears it away, too, or has just taken it for its own
        if not isinstance(error[1], OSError) or error[1].errno not in (errno.ENOENT, errno.ENOTEMPTY):
            raise error[1]

    with _unlocked(left) as unlocked, files.syscall("remove", left):
        if unlocked:
            shutil.rmtree(left, onerror=tolerate)
