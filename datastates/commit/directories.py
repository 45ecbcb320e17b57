"""A directory of checkpoints: what is committed there, found and ordered."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from datastates._base import files, locks
from datastates.commit import manifest
from datastates.errors import CheckpointNotFoundError, FormatError, StorageError

STEP = re.compile(r"step-([0-9]{8,18})(?:\.r([0-9]{1,9}))?\Z")
_AT_ONCE = 32
PARTIAL = re.compile(r"(.+)\.partial-[0-9a-f]{8}\Z", re.DOTALL)


def candidates(path: Path, step: int | None = None, *, certain: bool = True) -> list[Path]:
    """The checkpoints that ``path`` may mean, the newest last: itself, or all in it, or the newest of ``step``.

    Args:
        path: A checkpoint, or a directory of them.
        step: The step that is wanted; None for any.
        certain: Fail where the newest cannot be told, as the manifest of what may be the newest cannot be read.

    Raises:
        CheckpointNotFoundError: ``path`` is itself a checkpoint, but of another step.
        StorageError: With ``certain``, the newest cannot be told.
    """
    if _manifest_stat(path) is not None:
        if step is not None and (found := manifest.open(path).step) != step:
            raise CheckpointNotFoundError(f"{path} is the checkpoint of step {found}, not of step {step}")
        return [path]
    every = by_certain_age(path, step) if certain else by_age(path)
    return list(every.values()) if step is None else [every[step]] if step in every else []


def find(path: Path, step: int | None = None) -> Path:
    """The checkpoint directory that ``path`` means: itself, or the newest in it, or the newest of ``step``.

    Raises:
        CheckpointNotFoundError: There is none.
    """
    if not (found := candidates(path, step)):
        refuse_absence(path, step)
    return found[-1]


def refuse_absence(path: Path, step: int | None) -> NoReturn:
    """Raise CheckpointNotFoundError for ``path``, or for a step in it."""
    if (other := kind_of_other(path)) is not None:
        raise CheckpointNotFoundError(other)
    where = f" at {path}" if step is None else f" of step {step} in {path}"
    raise CheckpointNotFoundError(f"no committed checkpoint{where}")


def kind_of_other(path: Path) -> str | None:
    """A message if ``path`` is a checkpoint of torch.distributed.checkpoint, with what can read it; else None."""
    if not (path / ".metadata").is_file():
        return None
    return (
        f"{path} is a checkpoint of torch.distributed.checkpoint: dcp.load restores from it, datastates.open and "
        "datastates.load read it"
    )


def committed(root: Path) -> dict[int, Path]:
    """The committed checkpoints below ``root`` by step, ascending. For a step saved again, the newest one."""
    return dict(sorted(by_age(root).items()))


def by_age(root: Path, *, certain: bool = False) -> dict[int, Path]:
    """As :func:`committed`, but the oldest first. After a roll-back this is not the order of the steps."""
    found: dict[int, Path] = {}
    for step, path in in_order(root, certain=certain):
        found.pop(step, None)
        found[step] = path
    return found


def by_certain_age(root: Path, step: int | None = None) -> dict[int, Path]:
    """As :func:`by_age`, but the place of the newest, or of the newest of ``step``, is no guess.

    Raises:
        StorageError: The manifest of what may be the newest cannot be read.
    """

    def choose() -> Path | None:
        return next(reversed(every.values()), None) if step is None else every.get(step)

    every = by_age(root)
    while (newest := choose()) is not None:
        with contextlib.suppress(CheckpointNotFoundError):  # another process has just deleted it
            if (stat := _manifest_stat(newest)) is not None:
                _sequence(newest, _identity(stat))  # cached, unless it could not be read before
        every = by_age(root)
        if choose() == newest:
            break
    return every


def next_sequence(root: Path) -> int:
    """A sequence number above those of the committed checkpoints below ``root``.

    A manifest that cannot be read may hold a number above all others: it counts for one more.
    """
    every = [sequence for sequence, *_ in _numbered(root)]
    return 1 + max((sequence for sequence in every if sequence is not None), default=0) + every.count(None)


class Order:
    """Gives the checkpoints of a directory sequence numbers in the order of their snapshots, not of their commits.

    Thread-safe.
    """

    def __init__(self, root: Path) -> None:
        """Remember ``root``; nothing is read yet."""
        self._root = root
        self._lock = threading.Lock()
        self._given = 0
        self._begun = 0
        self._reserved: dict[int, int] = {}

    def sequence(self, number: int) -> int:
        """The sequence number of the snapshot with this ``number``, from 0. Ask once for each, when it is committed."""
        with self._lock:
            if number >= self._begun:
                first = max(self._given + 1, next_sequence(self._root))
                # snapshots taken before this one may be committed later
                self._reserved.update({n: first + n - self._begun for n in range(self._begun, number + 1)})
                self._begun, self._given = number + 1, self._reserved[number]
            return self._reserved.pop(number)


def in_order(root: Path, *, certain: bool = False) -> list[tuple[int, Path]]:
    """Step and path of every committed checkpoint, the oldest first.

    Checkpoints of format 1 have no sequence number. They come first, in the order of their steps. A checkpoint whose
    manifest cannot be read comes after those whose directories were not changed later than its own. With ``certain``,
    one that the storage cannot read raises StorageError instead.
    """
    numbered = _numbered(root, certain=certain)
    known = [(changed, sequence) for sequence, _, _, _, changed in numbered if sequence is not None]

    def age(sequence: int | None, step: int, revision: int, changed: int) -> tuple[int, bool, int, int]:
        if sequence is not None:
            return sequence, False, step, revision
        guess = max((s for before, s in known if before <= changed), default=0)
        return guess, guess > 0, step, revision

    ordered = sorted((age(s, step, revision, changed), path) for s, step, revision, path, changed in numbered)
    return [(step, path) for (_, _, step, _), path in ordered]


def _numbered(root: Path, *, certain: bool = False) -> list[tuple[int | None, int, int, Path, int]]:
    """Sequence, step, revision, path and directory mtime (ns) of every committed checkpoint.

    The sequence is 0 if the manifest is of format 1, and None if it cannot be read.
    """
    found: list[tuple[int | None, int, int, Path, int]] = []
    for entry in entries(root):
        if (match := STEP.match(entry.name)) and (stat := _manifest_stat(entry)) is not None:
            with contextlib.suppress(CheckpointNotFoundError, FileNotFoundError):  # another process has just deleted it
                changed = entry.stat().st_mtime_ns  # the commit made the last change: it unlinked the lock
                try:
                    sequence = _sequence(entry, _identity(stat))
                except StorageError:
                    if certain:
                        raise
                    sequence = None  # reported to whoever opens it
                found.append((sequence, int(match[1]), int(match[2] or 0), entry, changed))
    return found


def _identity(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


@functools.lru_cache(maxsize=1 << 16)
def _sequence(path: Path, identity: tuple[int, ...]) -> int | None:
    """The sequence number in a manifest. Cached while ``identity``, the file's stat, stays the same."""
    del identity
    try:
        return manifest.open(path).sequence or 0
    except FormatError:
        return None


def target(root: Path, step: int, *, in_flight: bool = True) -> Path:
    """The path for the next checkpoint of a step. A step saved again gets a new revision: nothing is overwritten.

    ``in_flight``: count revisions that are still being written, too.
    """
    name = step_name(step)
    with files.syscall("list", root):
        entries = [e for e in _names(root) if e.startswith(name)]
    names = (m[1] if (m := PARTIAL.match(e)) and in_flight else e for e in entries)
    taken = [int(m[2] or 0) for m in map(STEP.match, names) if m and int(m[1]) == step]
    return root / (f"{name}.r{1 + max(taken)}" if taken else name)


def step_name(step: int) -> str:
    """The name of a step's directory, without a revision."""
    return f"step-{step:08d}"


def is_root(path: Path) -> bool:
    """Whether a path is a directory with a committed checkpoint in it."""
    return any(STEP.match(e.name) and _manifest_stat(e) is not None for e in entries(path))


def without_manifest(root: Path) -> list[Path]:
    """Directories with the name of a checkpoint, but without a manifest."""
    return [e for e in entries(root) if STEP.match(e.name) and _manifest_stat(e) is None]


def _manifest_stat(path: Path) -> os.stat_result | None:
    """The stat of a checkpoint's manifest; None if it has none, and so is no checkpoint."""
    try:
        return os.stat(path / manifest.FILE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # an unreadable manifest must not count as an absent one
        raise StorageError(error.errno or 0, "stat", str(path / manifest.FILE)) from error


def entries(root: Path) -> list[Path]:
    """The directories in a directory, sorted; links are none."""
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
    """The lengths of files in bytes, None for an absent one."""
    if len(paths) == 1:
        return [_length(paths[0])]
    try:
        with ThreadPoolExecutor(_AT_ONCE) as pool:  # on a shared file system each call takes long
            return list(pool.map(_length, paths))
    except RuntimeError:  # the interpreter is ending and starts no more threads
        return list(map(_length, paths))


def of_attempt(target: Path, attempt: str) -> Path | None:
    """The path of an attempt's checkpoint, if it was committed at ``target`` or as a revision of it; else None."""
    for entry in entries(target.parent):
        if entry.name == target.name or re.fullmatch(re.escape(target.name) + r"\.r[0-9]{1,9}", entry.name):
            with contextlib.suppress(CheckpointNotFoundError, FormatError):
                if manifest.open(entry).attempt == attempt:
                    return entry
    return None


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Keep other processes from deleting a checkpoint while it is read, if the file system has locks.

    Raises:
        CheckpointNotFoundError: ``path`` is no checkpoint, or is being deleted.
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
    """Keep the checkpoint that ``find`` returns from deletion until ``reader`` closes, as :func:`reading` does.

    If it is deleted before it can be kept, ``find`` is called again. Returns None if ``find`` does.
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
    """``path`` if it is a file, else what :func:`find` returns, kept from deletion as by :func:`reading`."""
    if path.is_file():
        yield path
        return
    with contextlib.ExitStack() as reader:
        found = keep(lambda: find(path, step), reader)
        assert found is not None
        yield found
