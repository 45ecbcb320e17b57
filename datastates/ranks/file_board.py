"""A board in a shared directory.

Nothing is asked of the file system but what NFS gives: a rename is atomic, and whoever lists a directory sees what was
renamed into it before. Everything is found by listing: a name that was looked up in vain may be remembered as absent.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from datastates.errors import StorageError, UnreachableError

_ABSENT = (errno.ENOENT, errno.ESTALE)


@contextlib.contextmanager
def step(operation: str, path: Path) -> Iterator[None]:
    """One or more system calls in the shared directory: their error with operation and path."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(error.errno or 0, operation, str(path)) from error


def names(folder: Path) -> list[str]:
    """What is in a folder; nothing when it is not there. Files being written begin with a dot."""
    try:
        with step("list", folder):
            return [name for name in os.listdir(folder) if not name.startswith(".")]
    except StorageError as error:
        if error.errno in _ABSENT:
            return []
        raise


def read(path: Path) -> bytes | None:
    """What is in a file; None when it is not there."""
    try:
        with step("read", path):
            return path.read_bytes()
    except StorageError as error:
        if error.errno in _ABSENT:
            return None
        raise


def write(path: Path, data: bytes) -> None:
    """Write a file that appears with all its content, in place of an older one."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with step("write", new):
        new.write_bytes(data)
    with step("rename", path):
        os.rename(new, path)


def remove(path: Path) -> None:
    """Delete a file or a folder, as far as nobody else does or writes there."""

    def tolerate(_: object, name: str, error: tuple[type[BaseException], BaseException, object]) -> None:
        if not isinstance(error[1], OSError) or error[1].errno not in (*_ABSENT, errno.ENOTEMPTY):
            raise error[1]

    with step("remove", path):
        if path.is_dir():
            shutil.rmtree(path, onerror=tolerate)
        else:
            path.unlink(missing_ok=True)


class FileBoard:
    """What one rank leaves below the folder of a run for the others, and finds there. A box is a folder.

    A message is a file named after the rank, and is a mark as well.
    """

    def __init__(self, folder: Path, rank: int, leave: Callable[[], None]) -> None:
        """Use the folder of a run, which rank 0 has made and named after it; ``leave`` deletes it."""
        self._folder = folder
        self._rank = rank
        self._leave = leave

    @property
    def run(self) -> str:
        """Random, from rank 0."""
        return self._folder.name

    def _box(self, box: str) -> Path:
        # readable, and a name of its own whatever characters the box has
        readable = re.sub("[^A-Za-z0-9_.-]", "_", box)[-100:].lstrip(".")
        return self._folder / f"{readable}-{hashlib.blake2b(box.encode(), digest_size=8).hexdigest()}"

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            if error.errno not in _ABSENT:
                raise
            raise UnreachableError(
                f"{self._folder} is gone: rank 0 has closed this run, or has begun another one there"
            ) from error

    def put(self, box: str, data: bytes) -> None:
        """Leave this rank's message, and its mark."""
        folder = self._box(box)
        with self._writing():
            with step("mkdir", folder):
                folder.mkdir(exist_ok=True)
            write(folder / str(self._rank), data)

    def mark(self, box: str) -> None:
        """Leave this rank's mark only."""
        self.put(box, b"")

    def _marked(self, box: str) -> list[int]:
        folder = self._box(box)
        return [int(name) for name in names(folder)] if folder.name in names(self._folder) else []

    def marks(self, box: str) -> int:
        """How many ranks have left a mark."""
        return len(self._marked(box))

    def read(self, box: str, ranks: Iterable[int]) -> dict[int, bytes]:
        """The messages of these ranks that are there."""
        there = set(self._marked(box))
        found = {rank: read(self._box(box) / str(rank)) for rank in ranks if rank in there}
        return {rank: data for rank, data in found.items() if data is not None}

    def claim(self, box: str) -> int:
        """The rank whose call for this box was the first of all."""
        folder = self._box(box)
        mine = self._folder / f".claim-{secrets.token_hex(4)}"
        with self._writing():
            with step("mkdir", mine):
                mine.mkdir()
                (mine / str(self._rank)).touch()
            try:
                with step("rename", folder):
                    os.rename(mine, folder)  # a folder replaces none that is not empty
            except StorageError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                remove(mine)
        return self._marked(box)[0]

    def take_back(self, box: str) -> None:
        """Delete this rank's message."""
        remove(self._box(box) / str(self._rank))

    def drop(self, box: str, ranks: Iterable[int]) -> None:
        """Delete the box with all that is in it."""
        remove(self._box(box))

    def close(self, *, given_up: bool) -> None:
        """On rank 0, delete what is left of the run."""
        del given_up
        if self._rank == 0:
            self._leave()
