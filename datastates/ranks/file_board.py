"""A board in a shared directory.

The board relies only on guarantees of NFS: a rename is atomic, and a listing of a directory shows every entry that
was renamed into it before. It looks for entries by listing the directory, never by opening a path on the chance that
it exists: a client may remember that a name was absent.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
import secrets
from collections.abc import Callable, Iterable, Iterator

from datastates.errors import StorageError, UnreachableError
from datastates.storage import Folders, folders_of
from datastates.storage.location import Location
from datastates.storage.objects import ABSENT


def store(path: Location) -> Folders:
    """The :class:`Folders` of the shared directory where ranks meet."""
    return folders_of(path, "ranks")


def names(folder: Location) -> list[str]:
    """The names in a folder; none if the folder is absent. Skips dot files: they are still being written."""
    return [name for name in store(folder).names(folder, stale_ok=True) if not name.startswith(".")]


def read(path: Location) -> bytes | None:
    """The contents of a file; None if it is absent."""
    try:
        return store(path).read_all(path)
    except StorageError as error:
        if error.errno in ABSENT:
            return None
        raise


def remove(path: Location) -> None:
    """Delete a file or a folder. Other processes may delete or add entries meanwhile: that is no error."""
    if store(path).is_folder(path):
        store(path).remove_tree(path)
    else:
        store(path).remove(path, missing_ok=True)


class FileBoard:
    """A :class:`~datastates.ranks.board_world.Board` below the folder of a run. A box is a folder.

    A message is a file in it, named after the rank. The file is the rank's mark, too.
    """

    def __init__(self, folder: Location, rank: int, leave: Callable[[], None]) -> None:
        """Use ``folder``, which rank 0 has made and named after the run. Rank 0 calls ``leave`` to delete it."""
        self._folder = folder
        self._rank = rank
        self._leave = leave

    @property
    def run(self) -> str:
        """The random name that rank 0 gave the run."""
        return self._folder.name

    def _box(self, box: str) -> Location:
        # readable; the hash keeps names of different boxes apart
        readable = re.sub("[^A-Za-z0-9_.-]", "_", box)[-100:].lstrip(".")
        return self._folder / f"{readable}-{hashlib.blake2b(box.encode(), digest_size=8).hexdigest()}"

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            if error.errno not in ABSENT:
                raise
            raise self._gone() from error

    def _gone(self) -> UnreachableError:
        return UnreachableError(f"{self._folder} is gone: rank 0 has closed this run, or has begun another one there")

    def put(self, box: str, data: bytes) -> None:
        """Leave this rank's message and its mark."""
        folder = self._box(box)
        with self._writing():
            store(folder).add_folder(folder, exist_ok=True)
            store(folder).replace(folder / str(self._rank), data)

    def mark(self, box: str) -> None:
        """Leave this rank's mark: an empty message."""
        self.put(box, b"")

    def _marked(self, box: str) -> list[int]:
        folder = self._box(box)
        return [int(name) for name in names(folder)] if folder.name in names(self._folder) else []

    def marks(self, box: str) -> int:
        """The number of ranks that have left a mark."""
        return len(self._marked(box))

    def read(self, box: str, ranks: Iterable[int]) -> dict[int, bytes]:
        """The messages that any of these ``ranks`` left, by rank."""
        there = set(self._marked(box))
        found = {rank: read(self._box(box) / str(rank)) for rank in ranks if rank in there}
        return {rank: data for rank, data in found.items() if data is not None}

    def claim(self, box: str) -> int:
        """Claim a box; returns the rank that claimed it first."""
        folder = self._box(box)
        mine = self._folder / f".claim-{secrets.token_hex(4)}"
        with self._writing():
            store(mine).add_folder(mine)
            # not a file: by the rename, rclone loses an empty one that it is still to upload
            store(mine).add_folder(mine / str(self._rank))
            try:
                store(mine).rename(mine, folder)  # fails if another rank's claim is there: it is not empty
            except StorageError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                remove(mine)
        if not (claims := self._marked(box)):
            raise self._gone()
        return claims[0]

    def take_back(self, box: str) -> None:
        """Delete this rank's message."""
        remove(self._box(box) / str(self._rank))

    def drop(self, box: str, ranks: Iterable[int]) -> None:
        """Delete the box with everything in it."""
        remove(self._box(box))

    def close(self, *, given_up: bool) -> None:
        """On rank 0, delete what the run left in the directory."""
        del given_up
        if self._rank == 0:
            self._leave()
