"""The manifest is the commit: which files make a checkpoint, and how a directory of checkpoints stays consistent.

A snapshot is written into ``NAME.partial-XXXXXXXX``, a directory that no reader looks at, and in which its writer
holds a file locked. To commit, ``manifest.json`` is written there and synced, the directory is synced, renamed to
``NAME``, and its parent synced. A directory without a manifest is no checkpoint. ``docs/format.md`` is the contract.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from datastates import faults
from datastates.errors import CheckpointNotFoundError, FormatError, StorageError

FILE = "manifest.json"
_LOCK = ".lock"
FORMAT_VERSION = 1
_STEP = re.compile(r"step-([0-9]{8,18})(?:\.r([0-9]{1,9}))?\Z")
_PARTIAL = re.compile(r"(.+)\.partial-[0-9a-f]{8}\Z", re.DOTALL)
_MAX_NBYTES = 1 << 28


class ContainerEntry(BaseModel):
    """One container of a checkpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=255)]
    """Its name within the checkpoint's directory: never a path."""
    rank: Annotated[int, Field(ge=0)]
    nbytes: Annotated[int, Field(ge=0)]
    index_crc32: Annotated[int, Field(ge=0, lt=1 << 32)]
    """CRC-32 of its index, which identifies the snapshot and covers the checksums of all the rest."""


class Manifest(BaseModel):
    """What makes a directory a checkpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: int = FORMAT_VERSION
    step: Annotated[int, Field(ge=0)]
    attempt: Annotated[str, Field(max_length=64)]
    """A random name shared by all containers of one snapshot."""
    created: Annotated[str, Field(max_length=64)]
    """When it was committed, ISO 8601, UTC."""
    world_size: Annotated[int, Field(ge=1)]
    containers: tuple[ContainerEntry, ...]

    @model_validator(mode="after")
    def _one_for_each_rank(self) -> Manifest:
        ranks, files = [c.rank for c in self.containers], {c.file for c in self.containers}
        if len(ranks) != self.world_size or ranks != list(range(len(ranks))) or len(files) != len(ranks):
            raise ValueError("not one container for each rank, each in a file of its own")
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of all containers."""
        return sum(c.nbytes for c in self.containers)


def now() -> str:
    """The present as a manifest's ``created``."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON, with a ``crc32`` over the rest in its canonical form."""
    fields = manifest.model_dump(mode="json")
    return (json.dumps({**fields, "crc32": _checksum(fields)}, indent=2) + "\n").encode()


def _checksum(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


def decode(data: bytes, path: str) -> Manifest:
    """The mirror of :func:`encode`; raises FormatError that names ``path`` and what is wrong."""
    try:
        fields = json.loads(data)
        if type(fields) is not dict or type(fields.get("format")) is not int:
            raise FormatError(f"{path}: not a manifest")
        checksum = fields.pop("crc32")
        if fields.get("format") != FORMAT_VERSION:
            raise FormatError(f"{path}: a manifest of format {fields.get('format')!r:.40}; this reads {FORMAT_VERSION}")
        if checksum != _checksum(fields) or encode(Manifest.model_validate_json(json.dumps(fields))) != data:
            raise FormatError(f"{path}: the manifest does not match its checksum")
        return Manifest.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        first = error.errors()[0]
        raise FormatError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{path}: not a manifest ({type(error).__name__}: {error})") from None


@contextlib.contextmanager
def _step(operation: str, path: Path) -> Iterator[None]:
    """One system call on a checkpoint's files: a fault point before it, its error with operation and path."""
    try:
        faults.hit(f"manifest.{operation}", str(path))
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(error.errno or 0, operation, str(path)) from error


def _sync_directory(path: Path) -> None:
    with _step("sync_directory", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@dataclass(slots=True)
class Pending:
    """A checkpoint being written: the directory for its files, and where it will stand once committed."""

    directory: Path
    target: Path
    lock: int

    def close(self) -> None:
        """Let the lock go. Idempotent."""
        if self.lock in _locks:
            _locks.remove(self.lock)
            os.close(self.lock)


_locks: set[int] = set()


def _drop_locks() -> None:
    # a child that outlives its parent must not keep what the parent left from being cleared away
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_drop_locks)


def begin(target: Path) -> Pending:
    """Make a locked partial directory beside ``target``; raises StorageError."""
    make_directory(target.parent)
    while True:
        directory = target.with_name(f"{target.name}.partial-{secrets.token_hex(4)}")
        with _step("mkdir", directory):
            directory.mkdir()
        try:
            with _step("lock", directory):
                lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except StorageError as error:
            if error.errno == errno.ENOENT and target.parent.is_dir():
                continue  # a clean-up in another process took the new directory for debris before it was locked
            shutil.rmtree(directory, ignore_errors=True)
            raise
        if _try_lock(lock) is not False and directory.exists():
            _locks.add(lock)
            return Pending(directory, target, lock)
        os.close(lock)


def make_directory(path: Path) -> None:
    """Make a directory and those above it, each on stable storage, unless they are there; raises StorageError."""
    if path.is_dir():
        return
    make_directory(path.parent)
    with _step("mkdir", path):
        if path.exists():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        path.mkdir(exist_ok=True)
    _sync_directory(path.parent)


def _try_lock(fd: int) -> bool | None:
    """Lock a file for a writer: False when somebody holds it, None where the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def commit(pending: Pending, manifest: Manifest) -> None:
    """Make the pending directory the checkpoint; all its containers must be synced. Raises StorageError."""
    path = pending.directory / FILE
    with _step("open", path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        data = memoryview(encode(manifest))
        with _step("write", path):
            while data:
                data = data[os.write(fd, data) :]
        with _step("sync", path):
            os.fsync(fd)
    finally:
        os.close(fd)
    _sync_directory(pending.directory)
    with _step("rename", pending.target):
        os.rename(pending.directory, pending.target)
    try:
        # not before: a partial directory without it passes for abandoned
        with _step("unlock", pending.target):
            (pending.target / _LOCK).unlink()
        _sync_directory(pending.target.parent)
    except StorageError:
        with contextlib.suppress(OSError):  # who is told that it failed must not find it
            os.rename(pending.target, pending.directory)
        raise
    pending.close()


def abandon(pending: Pending) -> None:
    """Remove what a failed snapshot left, as far as possible: the rest is debris for the next run to remove."""
    shutil.rmtree(pending.directory, ignore_errors=True)
    pending.close()


def open(path: Path) -> Manifest:
    """Read the manifest of the checkpoint directory ``path``.

    Raises:
        CheckpointNotFoundError: There is none.
        FormatError: It is damaged.
    """
    file = path / FILE
    try:
        with _step("read", file):
            if file.stat().st_size > _MAX_NBYTES:
                raise FormatError(f"{file}: too long for a manifest")
            data = file.read_bytes()
    except StorageError as error:
        if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
            raise CheckpointNotFoundError(f"{path} is not a committed checkpoint: it has no {FILE}") from None
        raise
    return decode(data, str(file))


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


def target(root: Path, step: int) -> Path:
    """Where the next checkpoint of a step will stand: a step saved again gets a revision, nothing is overwritten."""
    name = f"step-{step:08d}"
    names = (m[1] if (m := _PARTIAL.match(e.name)) else e.name for e in _entries(root))
    taken = [int(m[2] or 0) for m in map(_STEP.match, names) if m and int(m[1]) == step]
    return root / (f"{name}.r{1 + max(taken)}" if taken else name)


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
        os.stat(path / FILE)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:  # not knowing must not pass for absence
        raise StorageError(error.errno or 0, "stat", str(path / FILE)) from error
    return True


def _is_locked(entry: Path) -> bool:
    with _unlocked(entry) as unlocked:
        return not unlocked


@contextlib.contextmanager
def _unlocked(entry: Path) -> Iterator[bool]:
    """Hold a partial directory's lock if nobody else does; what cannot be locked counts as held."""
    try:
        fd = os.open(entry / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True  # its writer has died before it locked it, or while committing or deleting it
        return
    except OSError:
        yield False  # not ours to judge
        return
    try:
        yield _try_lock(fd) is True
    finally:
        os.close(fd)


def _entries(root: Path) -> list[Path]:
    try:
        return sorted(e for e in root.iterdir() if e.is_dir() and not e.is_symlink())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StorageError(error.errno or 0, "list", str(root)) from error


def remove(path: Path) -> None:
    """Delete a checkpoint: a rename takes the commit back at once, so that no half checkpoint is ever seen."""
    left = path.with_name(f"{path.name}.partial-{secrets.token_hex(4)}")
    with _step("rename", path):
        os.rename(path, left)
    _sync_directory(path.parent)
    clear(left)


def clear(left: Path) -> None:
    """Delete debris, unless a writer holds it by now."""

    def tolerate(_: object, name: str, error: tuple[type[BaseException], BaseException, object]) -> None:
        # another process clears it away, too, or has just taken it for its own
        if not isinstance(error[1], OSError) or error[1].errno not in (errno.ENOENT, errno.ENOTEMPTY):
            raise error[1]

    with _unlocked(left) as unlocked, _step("remove", left):
        if unlocked:
            shutil.rmtree(left, onerror=tolerate)
