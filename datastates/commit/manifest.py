"""The manifest, which names the files of a checkpoint, and the commit, which makes a directory a checkpoint.

A snapshot is written into a directory ``NAME.partial-XXXXXXXX``. Readers ignore it, and its writers hold a lock on a
file in it. The commit writes and syncs ``manifest.json`` there, syncs the directory, renames it to ``NAME``, and syncs
its parent. A directory without a manifest is no checkpoint. ``docs/format.md`` specifies the format.
"""

from __future__ import annotations

import contextlib
import errno
import json
import secrets
import time
import zlib
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from datastates.errors import CheckpointNotFoundError, FormatError, StorageError
from datastates.storage import Entry, Lock, store_of
from datastates.storage.location import Location, stem_of_partial

FILE = "manifest.json"
LOCK = ".lock"
FORMAT_VERSION = 2
"""The format of new manifests. Format 1, which has no ``sequence``, can be read, too."""
_MAX_NBYTES = 1 << 28


_FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=255)]
"""A name within the checkpoint's directory: never a path."""
_Bytes = Annotated[int, Field(ge=0, lt=1 << 63)]
_Crc32 = Annotated[int, Field(ge=0, lt=1 << 32)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ContainerEntry(_Model):
    """One container of a checkpoint."""

    file: _FileName
    rank: Annotated[int, Field(ge=0)]
    nbytes: _Bytes
    index_crc32: _Crc32
    """CRC-32 of its index. The index identifies the snapshot and holds the checksums of all the rest."""


class CatalogEntry(_Model):
    """The catalog of a checkpoint of several ranks."""

    file: _FileName
    nbytes: _Bytes
    head_crc32: _Crc32
    """CRC-32 of its head, which holds the checksums of all the rest."""


class Manifest(_Model):
    """The contents of the manifest, the file that makes a directory a checkpoint."""

    format: int
    step: Annotated[int, Field(ge=0, lt=1 << 63)]
    sequence: Annotated[int, Field(ge=1, lt=1 << 63)] | None = None
    """Its number in the order of its directory's snapshots: the highest is the newest. Only in format 2."""
    attempt: Annotated[str, Field(max_length=64)]
    """A random name shared by all containers of one snapshot."""
    created: Annotated[str, Field(max_length=64)]
    """When it was committed, ISO 8601, UTC."""
    world_size: Annotated[int, Field(ge=1)]
    containers: tuple[ContainerEntry, ...]
    catalog: CatalogEntry | None = None
    """Which rank holds which part of each tensor; only for several ranks."""

    @model_validator(mode="after")
    def _numbered(self) -> Manifest:
        if (self.format, self.sequence is None) not in ((1, True), (2, False)):
            raise ValueError("a sequence belongs to format 2, and to no other")
        return self

    @model_validator(mode="after")
    def _one_for_each_rank(self) -> Manifest:
        if (self.catalog is None) != (self.world_size == 1):
            raise ValueError("a catalog belongs to a checkpoint of several ranks, and to no other")
        ranks, files = [c.rank for c in self.containers], {c.file for c in self.containers}
        if len(ranks) != self.world_size or ranks != list(range(len(ranks))) or len(files) != len(ranks):
            raise ValueError("not one container for each rank, each in a file of its own")
        if self.catalog is not None and any(c.file != container_name(c.rank) for c in self.containers):
            # the catalog holds no names
            raise ValueError("in a checkpoint of several ranks, each container must be named by its rank")
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of all containers."""
        return sum(c.nbytes for c in self.containers)


def container_name(rank: int) -> str:
    """File name of a rank's container within a checkpoint."""
    return f"rank-{rank:05d}.pt"


def has_step(container: Location, rank: int) -> bool:
    """Whether a container file is of a checkpoint of this package, by its name or by what lies beside it.

    Others, such as those in the checkpoints of frameworks, have no step: 0 stands for it in their index.
    """
    return container.name == container_name(rank) or store_of(container).exists(container.parent / FILE)


def now() -> str:
    """The present time in the form of :attr:`Manifest.created`."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON. Its ``crc32`` covers all other fields in their canonical form."""
    fields = manifest.model_dump(mode="json", exclude_none=True)
    return (json.dumps({**fields, "crc32": _checksum(fields)}, indent=2) + "\n").encode()


def _checksum(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


def decode(data: bytes, path: str) -> Manifest:
    """The inverse of :func:`encode`. Raises FormatError, which names ``path`` and the defect."""
    try:
        fields = json.loads(data)
        if type(fields) is not dict or type(fields.get("format")) is not int:
            raise FormatError(f"{path}: not a manifest")
        checksum = fields.pop("crc32")
        if fields["format"] not in (1, 2):
            raise FormatError(f"{path}: a manifest of format {fields['format']!r:.40}; this reads 1 and 2")
        if checksum != _checksum(fields) or encode(made := Manifest.model_validate_json(json.dumps(fields))) != data:
            raise FormatError(f"{path}: the manifest does not match its checksum")
        return made
    except ValidationError as error:
        first = error.errors()[0]
        raise FormatError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{path}: not a manifest ({type(error).__name__}: {error})") from None


def partial(target: Location, attempt: str) -> Location:
    """The partial directory of an attempt to write ``target``."""
    return target.with_name(f"{stem_of_partial(target.name)}.partial-{attempt}")


class Pending:
    """A checkpoint that is being written.

    It only says what :func:`begin` is to make, so that it can be abandoned at any time, also after an interrupt.

    Attributes:
        directory: The partial directory for its files.
        target: The path that the checkpoint was expected to have when it was begun.
        attempt: The name of the attempt, as in the partial directory's name.
        shared: Whether other ranks write into the directory, too.
        files: The files of this process.
    """

    def __init__(self, target: Location, attempt: str | None = None, mark: bytes = b"") -> None:
        """Choose the partial directory, beside ``target``; nothing is made yet.

        ``attempt`` (8 hexadecimal digits) names a directory that the other ranks make and lock, too. If None, the
        directory is this process's alone and gets a random name. The lock file holds ``mark``.
        """
        self.target = target
        self.attempt = attempt or secrets.token_hex(4)
        self.directory = partial(target, self.attempt)
        self.shared = attempt is not None
        self.files: list[Location] = []
        self._mark = mark
        self._is_ours = True
        self._lock: Lock | None = None  # shows other processes that the writer lives

    def file(self, name: str) -> Location:
        """The path for a new file of this process."""
        self.files.append(self.directory / name)
        return self.files[-1]

    def make(self, *, again: bool) -> None:
        """Make the directory, for the first time or ``again``. Raises StorageError."""
        try:
            store_of(self.directory).add_folder(self.directory, exist_ok=self.shared or again)
        except StorageError as error:
            self._is_ours = error.errno != errno.EEXIST
            raise

    def lock(self) -> bool:
        """Lock the directory, which is there; False if it is being deleted. Raises StorageError."""
        path = self.directory / LOCK
        lock = store_of(path).open_lock(path, create=self._mark)
        if lock.hold(shared=True) is False or not lock.is_at(path):
            return False
        self._lock = lock
        return True

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._lock is not None:
            self._lock.close()

    def remove(self) -> None:
        """Delete the directory with all that is in it, as far as possible, and release the lock."""
        if self._is_ours:
            store_of(self.directory).remove_tree(self.directory, tolerant=True)
        self.close()


def begin(pending: Pending) -> Pending:
    """Make and lock the partial directory of ``pending``, which is returned.

    Raises:
        StorageError: The directory could not be made. Abandon ``pending``, as after every exception.
    """
    root = pending.target.parent
    store_of(root).make_folder(root)
    again = False
    while True:
        pending.make(again=again)
        again = True
        try:
            if pending.lock():
                return pending
        except StorageError as error:
            # another process took the directory for debris before it was locked
            if error.errno != errno.ENOENT or not store_of(root).is_folder(root):
                raise
        time.sleep(0.001)  # until the other process has deleted it


def commit(pending: Pending, manifest: Manifest, target: Callable[[], Location]) -> Location:
    """Make the pending directory a checkpoint; returns its path. All its other files must be synced.

    ``target`` returns the path that the checkpoint is to have. It is called again if another checkpoint has taken that
    path meanwhile.

    Raises:
        StorageError: The commit failed; the checkpoint is not committed.
    """
    store_of(pending.directory).create(pending.file(FILE), encode(manifest))
    return publish(pending, target)


def publish(pending: Pending, target: Callable[[], Location]) -> Location:
    """Give the pending directory its name; arguments, result and errors are those of :func:`commit`."""
    store = store_of(pending.directory)
    store.sync_folder(pending.directory)
    made = store.look(pending.directory)
    path = _rename(pending.directory, target)
    try:
        # not earlier: a partial directory without the lock file counts as abandoned
        store.remove(path / LOCK, operation="unlock")
        store.sync_folder(path.parent)
    except StorageError:
        with contextlib.suppress(OSError):  # a failed commit must leave no checkpoint, and touch no other one
            if made is not None and (found := store.look(path)) is not None and found.place == made.place:
                store.rename(path, pending.directory)
        raise
    pending.close()
    return path


def _rename(directory: Location, target: Callable[[], Location]) -> Location:
    path = target()
    while True:
        try:
            store_of(directory).rename(directory, path)
            return path
        except StorageError as error:
            taken, path = path, target()
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) or path == taken:
                raise


def abandon(pending: Pending) -> None:
    """Remove what a failed snapshot left, as far as possible. The next run removes the rest as debris."""
    if not pending.shared:
        pending.remove()
        return
    store = store_of(pending.directory)
    for path in pending.files:
        with contextlib.suppress(OSError):
            store.remove(path)
    pending.close()
    # other ranks may still be writing, or about to begin: the last one to give up removes the directory
    with contextlib.suppress(OSError), store.open_lock(pending.directory / LOCK) as lock:
        if lock.hold() is not False and store.names(pending.directory) == [LOCK]:
            store.remove_tree(pending.directory, tolerant=True)


def look(path: Location) -> Entry | None:
    """Look at a checkpoint's manifest; None if it has none, and so is no checkpoint. Raises StorageError."""
    return store_of(path).look(path / FILE)


def open(path: Location) -> Manifest:
    """Read the manifest of the checkpoint directory ``path``.

    Raises:
        CheckpointNotFoundError: ``path`` has no manifest.
        FormatError: The manifest is damaged.
        StorageError: The manifest cannot be read.
    """
    file = path / FILE
    try:
        data = store_of(file).read_all(file, _MAX_NBYTES)
    except StorageError as error:
        if error.errno == errno.EFBIG:
            raise FormatError(f"{file}: too long for a manifest") from None
        refuse_missing(path, error)
        raise
    return decode(data, str(file))


def refuse_missing(path: Location, error: StorageError) -> None:
    """Raise CheckpointNotFoundError if ``error`` means that ``path`` has no manifest."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        raise CheckpointNotFoundError(f"{path} is not a committed checkpoint: it has no {FILE}") from None
