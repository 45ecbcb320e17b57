"""Tries what a file system does: whether it loses files, and whether files share ranges.

The first: whether a file stays as it was written while the folder around it is renamed, as each commit renames one.

rclone before 1.62 loses a file then that it has not uploaded yet: at its new name it is empty, absent or unreadable,
for some seconds or for ever. It uploads after a file is closed, so the file that is tried is still open.
"""

from __future__ import annotations

import contextlib
import errno
import secrets

from datastates.errors import StorageError
from datastates.storage import Entry, folders_of
from datastates.storage.location import Location

PREFIX = ".trial-"
"""Begins the names of what is made for a trial."""
_DATA = b"still here"
_SHARED = 1 << 16
"""Bytes that two files try to share: whole blocks of every file system."""
_MOST = 1 << 12
_kept: set[tuple[Location, tuple[int, ...]]] = set()
"""The folders in which this process has tried it, each with the device that it was on."""


def refuse_loss(place: Location) -> None:
    """Make a folder with a file in it in the folder ``place``, rename it, look at the file, and remove it.

    Raises:
        StorageError: The file was lost (EIO), or a call has failed, as where a file cannot be written in any order.
    """
    folder = place / f"{PREFIX}{secrets.token_hex(4)}"
    store, moved = folders_of(folder, "trial"), folder.with_name(f"{folder.name}-renamed")
    try:
        store.add_folder(folder)
        with contextlib.closing(store.writer(folder / "file", direct=False)) as file:
            file.write(_DATA[1:], 1)
            file.write(_DATA[:1], 0)
            file.sync()
            store.rename(folder, moved)
            found, cause = _found(moved / "file")
    finally:
        for made in (folder, moved):
            store.remove_tree(made, tolerant=True)
    if found != _DATA:
        mount = store.mount(place)
        where = f"The mount at {mount}" if mount else "Its file system"
        raise StorageError(
            errno.EIO,
            "rename",
            str(place),
            f"{place}: a file that was written and synced is lost as the folder around it is renamed, as a checkpoint "
            f"would be when it gets its name. {where} does that. rclone does it before version 1.62: mount by a newer "
            "one, or save to a disk and copy each checkpoint from there",
        ) from cause


def _found(file: Location) -> tuple[bytes | None, StorageError | None]:
    try:
        return folders_of(file, "trial").read_all(file, len(_DATA)), None
    except StorageError as error:
        return None, error


def refuse_loss_in(pending: Location, found: Entry | None) -> None:
    """As :func:`refuse_loss`, in a folder that is about to be renamed. Once in a process for the folder that holds it.

    ``found`` is the look at ``pending``; nothing is tried where it is gone.
    """
    if found is None or (known := (pending.parent, found.place[:1])) in _kept:
        return
    refuse_loss(pending)
    if len(_kept) >= _MOST:
        _kept.clear()
    _kept.add(known)


def shares_ranges(folder: Location) -> bool:
    """Whether a file in a folder can share bytes with another one there, by trial; raises StorageError."""
    store = folders_of(folder, "trial")
    first, second = (folder / f"{PREFIX}{secrets.token_hex(4)}" for _ in range(2))
    with contextlib.closing(store.writer(first)) as one, contextlib.closing(store.writer(second)) as other:
        one.write(bytes(_SHARED), 0)
        return other.share(first, 0, _SHARED, 0)
