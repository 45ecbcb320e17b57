"""Gives a folder its final name at once. Files that others have written under that name stay. Thread-safe.

A checkpoint ``NAME`` is written as ``.NAME.partial-XXXXXXXX/NAME``: whoever is handed that folder sees its later name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from datastates._base import log
from datastates.commit import trial
from datastates.commit.names import LOCK, stem_of_partial
from datastates.errors import CommitError
from datastates.files import hidden
from datastates.storage import Location, folders_of
from datastates.storage.local import opened

_COMMON = 50
"""Leading characters of a long name by which names that differ in numbers only are recognised."""
_OLD = "old"
"""The old folder at the final path, moved beside the new folder until the new one has its name."""

Contents = Mapping[Path, tuple[int, int]]
"""The files, links and empty folders in a folder, by relative path, each with numbers that tell a change."""


def contents(folder: Path) -> Contents:
    """The contents of a folder; empty if there is no folder."""
    return dict(_entries(folder))


def refuse(final: Path) -> None:
    """Raise CommitError if no folder can take a name: a file has it, or a folder that cannot be moved."""
    if os.path.lexists(final) and not final.is_dir():
        raise CommitError(f"{final} is a file, and a checkpoint is a folder: save to another path")
    if os.path.ismount(final) or Path.cwd().is_relative_to(final):
        raise CommitError(f"{final} is a mount point or the working directory: save to a folder in it")


def publish(staged: Path, final: Path, before: Contents, *, replace: bool) -> None:
    """Give a folder its final name. It is merged with a folder of that name, as if it had been written there.

    Args:
        staged: The folder, in a hidden one of its own.
        final: The name.
        before: The contents of ``final`` when the checkpoint was begun. A new file replaces one of the same name.
        replace: Whether all of ``before`` is removed. Files that were written there later stay in any case.

    Raises:
        CommitError: ``final`` is no folder, or a file is in the place of a folder in it. Nothing has changed.
        OSError: The file system has failed. The old contents are there again.
    """
    refuse(final)
    home = Location(final.parent)
    folders_of(home).make_folder(home)
    holder = Location(staged.parent)
    trial.refuse_loss_in(holder, folders_of(holder).look(holder))
    old, kept = staged.with_name(_OLD) / final.name, before
    if final.exists():
        kept = _keep(final, staged, before, replace=replace)
        os.chmod(staged, stat.S_IMODE(final.stat().st_mode))
        old.parent.mkdir()
    try:
        if final.exists() and _move(final, old):
            kept = contents(old)
        folders_of(home).rename(Location(staged), Location(final))
    except OSError:
        _put_back(old, final)
        raise
    folders_of(home).sync_folder(home)
    _keep(old, final, kept, replace=True)  # files that were written between the look and the rename
    clear(staged, final.parent)


def sync(folder: Path) -> None:
    """Put a folder and everything in it on stable storage."""
    for path in (folder, *folder.rglob("*")):
        # a file that is gone was a temporary one of another rank, which is still writing
        with contextlib.suppress(FileNotFoundError), opened(path, os.O_RDONLY) as fd:
            os.fsync(fd)


def clear(staged: Path, home: Path) -> None:
    """Remove the hidden folder of a checkpoint, and the checkpoint if it is still in it.

    Other files in the hidden folder, written by code that was given its path, move to ``home``.
    """
    holder = staged.parent
    ours = {staged.name, _OLD, f"{_OLD}.copy", LOCK}
    for name in (name for name in os.listdir(holder) if name not in ours and not name.startswith(trial.PREFIX)):
        if (holder / name).is_dir():
            _keep(holder / name, home / name, {}, replace=False)
        else:
            os.replace(holder / name, home / name)
    shutil.rmtree(holder, ignore_errors=True)


def numbered(name: str) -> re.Pattern[str]:
    """A pattern that matches a name, also with other numbers in it."""
    return re.compile(re.sub("[0-9]+", "[0-9]+", re.escape(name)) + r"\Z")


def alike(name: str) -> re.Pattern[str]:
    """A pattern that matches the hidden folders of a checkpoint's name, also with other numbers in the name."""
    stem = stem_of_partial(f".{name}")
    if stem == f".{name}":
        return numbered(stem)
    # a long name is cut after more or fewer of its characters with other numbers, and has another digest
    return re.compile(numbered(stem[:_COMMON]).pattern.removesuffix(r"\Z") + r".*~[0-9a-f]{16}\Z", re.DOTALL)


def sweep(room: Path, names: re.Pattern[str], home: Path) -> None:
    """Remove the debris of interrupted runs, and put back checkpoints that such a run had moved aside.

    Args:
        room: The folder in which checkpoints lie until they have their names.
        names: The pattern of :func:`alike` for the names.
        home: The folder of the finished checkpoints.
    """
    try:
        for left in map(Path, hidden.debris(room, names)):
            for old in (left / _OLD).glob("*"):
                if (left / old.name).exists():  # the run ended before the new one had the name
                    _put_back(old, home / old.name)
        hidden.sweep(room, names)
    except OSError as error:  # this rank must not fail for that, as the others go on
        log.warning("debris of an interrupted run could not be removed: %s", error)


def _keep(source: Path, target: Path, known: Contents, *, replace: bool) -> Contents:
    """Give each file, link and empty folder in a folder a second name in another; returns the folder's contents.

    An entry that is unchanged since ``known`` is left out if the target has that name, or with ``replace``.
    """
    there = contents(source)
    for path, stamp in there.items():
        new = target / path
        if known.get(path) == stamp and (replace or os.path.lexists(new)):
            continue
        try:
            _keep_one(source / path, new)
        except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
            raise CommitError(f"{source / path} is a file in place of a folder, or the other way round") from error
    return there


def _keep_one(entry: Path, new: Path) -> None:
    """Give a file, a link or an empty folder a second name, in place of a file that has it."""
    if entry.is_dir() and not entry.is_symlink():
        new.mkdir(parents=True, exist_ok=True)
        return
    new.parent.mkdir(parents=True, exist_ok=True)
    second = new.with_name(f"{stem_of_partial(f'.{new.name}')}.kept")
    try:
        os.link(entry, second, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copy2(entry, second, follow_symlinks=False)
    os.replace(second, new)
    second.unlink(missing_ok=True)  # a rename to the same file does nothing
    folders_of(home := Location(new.parent)).sync_folder(home)


def _move(folder: Path, to: Path) -> bool:
    """Rename a folder. overlayfs cannot rename one of a lower layer: it is copied, then removed, and this is True."""
    try:
        os.rename(folder, to)
        return False
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        copy = to.parent.with_name(f"{_OLD}.copy")
        shutil.copytree(folder, copy, symlinks=True)
        sync(copy)
        os.rename(copy, to)
        shutil.rmtree(folder)
        return True


def _put_back(old: Path, final: Path) -> None:
    """Undo :func:`_move`, even after an interrupted call."""
    if not final.exists():
        if old.exists():
            os.rename(old, final)
    else:  # a part of it may be removed
        _keep(old, final, contents(old), replace=False)


def _entries(folder: Path) -> Iterator[tuple[Path, tuple[int, int]]]:
    for root, folders, names in os.walk(folder):
        for path in (Path(root, name) for name in (*names, *folders)):
            try:
                found = path.lstat()
                if not stat.S_ISDIR(found.st_mode):
                    yield path.relative_to(folder), (found.st_ino, found.st_mtime_ns)
                elif not os.listdir(path):
                    yield path.relative_to(folder), (found.st_ino, 0)
            except FileNotFoundError:  # somebody has removed it meanwhile
                continue
