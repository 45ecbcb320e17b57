"""Fences: in a directory of checkpoints, a run that has begun to save keeps earlier runs from saving.

A process that was stopped for a while, such as a frozen machine, does not know that its job was restarted meanwhile.
Files in the folder ``.openings`` tell it:

- ``opened-N``: made when a :class:`~datastates.checkpointer.Checkpointer` opens. No two openings have the same N.
- ``saving-N``: made when that opening takes its first snapshot. It fences all openings with a lower N.

A fenced opening neither commits nor deletes. It looks for a higher ``saving-N`` before it renames. If it is stopped
between that look and the rename, the rename fails: after a new opening has made its ``saving-N``, it gives the partial
directories of older openings another name. The lock file of a partial directory holds the number of its opening. No
step waits for a lock, which a stopped process might hold for ever.

What a fenced opening has left is debris for everybody: nobody can commit it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

from typing_extensions import override

from datastates._base import log
from datastates._base.packing import pack, unpack
from datastates.commit import names, trial
from datastates.commit.directories import partials
from datastates.commit.names import LOCK, STEP, Writer, as_debris, final_of
from datastates.commit.opening import Opening, owner_of, record_of, told
from datastates.errors import StorageError
from datastates.storage import Folders, folders_of
from datastates.storage.location import Location
from datastates.storage.objects import ABSENT, absent

FOLDER = ".openings"
_RECORD = re.compile(r"(opened|saving)-([0-9]{1,18})\Z")
_MOST = 1 << 16
"""Most bytes of the lock file of a partial directory."""


def _store(root: Location) -> Folders:
    return folders_of(root, "opening")


class _Record(NamedTuple):
    """One file in the folder ``.openings``: its number, its kind (``opened`` or ``saving``) and its path."""

    number: int
    kind: str
    path: Location


def _records(root: Location) -> list[_Record]:
    """The files in the folder ``.openings`` of ``root``, the lowest number first."""
    found = filter(None, map(_RECORD.match, _store(root).names(root / FOLDER, stale_ok=True)))
    return sorted(_Record(int(m[2]), m[1], root / FOLDER / m[0]) for m in found)


def _newest_saving(root: Location) -> _Record | None:
    return max((record for record in _records(root) if record.kind == "saving"), default=None)


def lock_file(root: Location) -> Location:
    """The path to lock while a checkpoint gets its sequence number: the newest ``saving-N``; without one, ``root``."""
    newest = _newest_saving(root)
    return root if newest is None else newest.path


class DirectoryOpening(Opening):
    """One run's opening of a directory of checkpoints."""

    def __init__(self, root: Location, number: int, owner: str, *, is_only: bool = False) -> None:
        """Keep the number and the owner that rank 0 determined.

        Args:
            root: The directory.
            number: The number of the opening; 0 if it could not be written down.
            owner: Random name of the process that opened the directory: rank 0.
            is_only: Whether this process opened, and no earlier opening has left files.
        """
        self.root = root
        self._number = number
        self._owner = owner
        self._is_only = is_only
        self._process = os.getpid()
        self._saves = False
        self._beginning = threading.Lock()
        self._place = None if (found := _store(root).look(root)) is None else found.place
        self._mount = _store(root).mount(root)
        self._own: tuple[int, ...] = ()  # the place and the time of this run's file
        _openings.add(self)

    @classmethod
    def begin(cls, root: Location) -> DirectoryOpening:
        """Number a new opening, as rank 0 does when it opens the place.

        A place that cannot be written can still be read: the number is then written down by the first snapshot.
        """
        owner = owner_of(os.getpid())
        try:
            is_only = not _records(root)
            return cls(root, _numbered(root, owner), owner, is_only=is_only)
        except StorageError as error:
            log.info("%s is opened without a number: %s", root, error)
            return cls(root, 0, owner)

    def encode(self) -> bytes:
        """The opening as the bytes that rank 0 sends to the other ranks."""
        return pack([self._number, self._owner, self._is_only])

    @classmethod
    def decode(cls, root: Location, data: bytes) -> DirectoryOpening:
        """The inverse of :meth:`encode`."""
        number, owner, is_only = unpack(data)
        return cls(root, number, owner, is_only=is_only and owner == owner_of(os.getpid()))

    @property
    @override
    def mark(self) -> bytes:
        return f"{self._number} {self._owner}".encode() if self._number else b""

    @override
    def begin_to_save(self, then: Callable[[], None] = lambda: None) -> None:
        if self._saves:
            self.refuse_if_fenced()
            return
        with self._beginning:
            if not self._number:
                self.refuse_elsewhere()
                self._number = _numbered(self.root, self._owner)
            self.refuse_if_fenced()
            if self._saves:
                return
            _make(self.root / FOLDER)
            trial.refuse_loss(self.root / FOLDER)
            self._write_down_saving()
            self.refuse_if_fenced()
            self._stop_older()
            then()
            self._saves = True

    @override
    def refuse_if_fenced(self) -> None:
        self.refuse_if_known_fenced()
        newest = _newest_saving(self.root)
        if newest is None or newest.number < self._number:
            if self._saves:
                raise self._elsewhere()
            self.refuse_elsewhere()
            return
        if newest.number == self._number:
            if not self._is_own(newest):
                raise self._elsewhere()
            return
        record = told(newest.path, "opening")
        if record.get("owner") != self._owner:
            self._refuse_newer(record)

    @override
    def refuse_elsewhere(self) -> None:
        found = _store(self.root).look(self.root)
        if found is not None and found.place == self._place:
            return
        # a mount that comes back has other numbers, and some file systems change them by themselves
        if found is not None and self._number and any(map(self._is_own, _records(self.root))):
            self._place = found.place
            return
        raise self._elsewhere()

    def _is_own(self, record: _Record) -> bool:
        """Whether a file in ``.openings`` is of the process that opened. Another run may have got the number anew."""
        found = _store(self.root).look(record.path)
        stamp = () if found is None else (*found.place, found.changed)
        if stamp and stamp != self._own:
            found_there = told(record.path, "opening", certain=True)
            cut_short = not found_there and record.number == self._number  # as an interrupt leaves it
            if not cut_short and found_there.get("owner") != self._owner:
                return False
            self._own = stamp
        return bool(stamp)

    def _elsewhere(self) -> StorageError:
        found = _store(self.root).look(self.root)
        number, what = (errno.ENOENT, "is gone") if found is None else (errno.ESTALE, "is another directory now")
        if found is not None and found.kind != "folder":
            number, what = errno.ENOTDIR, f"is a {found.kind} now"
        if self._mount != _store(self.root).mount(self.root):
            why = f"the mount at {self._mount} is lost. This run goes on to save once it is mounted again"
        else:
            why = f"the directory that was opened, or {FOLDER} in it, was deleted, moved or replaced"
        text = f"{self.root} {what}: {why}. To save in what is there now, open it by a new Checkpointer"
        return StorageError(number, "open", str(self.root), text)

    @override
    def close(self) -> None:
        _openings.discard(self)
        if not self._is_only or os.getpid() != self._process:
            return
        with contextlib.suppress(OSError):
            records = _records(self.root)
            if all(record.number == self._number for record in records):
                for record in records:
                    _store(self.root).remove(record.path, missing_ok=True)
                _store(self.root).remove_empty(self.root / FOLDER)

    def _write_down_saving(self) -> None:
        folder = self.root / FOLDER
        with _ignoring(errno.EEXIST):  # an interrupted call may have made it
            _store(folder).create(folder / f"saving-{self._number}", record_of(self._owner))
        _store(folder).sync_folder(folder)
        _forget_lower(self.root)

    def _stop_older(self) -> None:
        """Give the partial directories of older openings another name, so that nobody can commit them."""
        stopped = False
        for entry in partials(self.root, STEP):
            if any(self._is_older(one) for one in writers_of(entry)):
                left = as_debris(entry.with_name(final_of(entry.name)))
                with _ignoring(*ABSENT):
                    _store(self.root).rename(entry, left)
                    stopped = True
                    log.warning("an older run can no longer commit %s, which is now %s", entry, left.name)
        if stopped:
            _store(self.root).sync_folder(self.root)

    def _is_older(self, writer: Writer) -> bool:
        """Whether an older opening, of another process, writes.

        A partial directory without a number is not marked yet: its process has yet to look whether it is fenced.
        """
        return 0 < writer.number < self._number and writer.owner != self._owner


def writers_of(partial: Location) -> list[Writer]:
    """Who writes into a partial directory, as its lock file says; none without that file."""
    try:
        return names.decode(_store(partial).read_all(partial / LOCK, _MOST))
    except StorageError as error:
        if error.errno in ABSENT:
            return []
        raise


def fenced(root: Location) -> Callable[[Writer], bool]:
    """Return a function that tells whether a writer's opening is fenced, so that it cannot commit any more."""
    newest = _newest_saving(root)
    owner = None if newest is None else told(newest.path, "opening").get("owner")
    return lambda writer: newest is not None and 0 < writer.number < newest.number and writer.owner != owner


def is_own(writer: Writer) -> bool:
    """Whether this process opened the directory for a writer. Then nobody else can commit what it writes."""
    return writer.owner == owner_of(os.getpid())


_openings: weakref.WeakSet[DirectoryOpening] = weakref.WeakSet()
"""The openings of this process, and of the process that it was forked off, that are not closed."""


def _after_fork() -> None:
    for opening in list(_openings):  # a thread of the parent may hold the lock
        opening._beginning = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def refuse_in(root: Location) -> None:
    """Raise FencedError if this process has opened a directory where a newer run has begun to save since."""
    for opening in list(_openings):
        if opening.root == root:
            opening.refuse_if_fenced()


def _numbered(root: Location, owner: str) -> int:
    """Write down a new opening; returns its number, which is above all others."""
    folder = root / FOLDER
    while True:
        if not _store(root).is_folder(root):
            raise absent("open", root)
        number = 1 + max((record.number for record in _records(root)), default=0)
        # another process took that number, or deleted the folder when it closed
        with _ignoring(errno.EEXIST, errno.ENOENT):
            _make(folder)
            _store(folder).create(folder / f"opened-{number}", record_of(owner))
            _store(folder).sync_folder(folder)
            # a process that was stopped since it looked may have taken a number that was given before
            if _records(root)[-1].number == number:
                _forget_lower(root)
                return number


def _make(folder: Location) -> None:
    """Make the folder ``.openings``, if it is not there."""
    _store(folder).add_folder(folder, exist_ok=True)
    _store(folder).sync_folder(folder.parent)


def _forget_lower(root: Location) -> None:
    """Delete files in ``.openings`` that no longer matter. The file with the highest number of each kind stays."""
    for kind in ("opened", "saving"):
        for record in [record for record in _records(root) if record.kind == kind][:-1]:
            _store(root).remove(record.path, missing_ok=True)


@contextlib.contextmanager
def _ignoring(*numbers: int) -> Iterator[None]:
    """Go on after a StorageError that has one of these error numbers."""
    try:
        yield
    except StorageError as error:
        if error.errno not in numbers:
            raise
