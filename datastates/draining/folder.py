"""A checkpoint in a framework's own files on a disk: a folder of them, or one file. Is all of it there?

A folder gets a record once its framework has completed it: what a killed run left half written, or half deleted, has
none, or one that does not fit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Collection
from typing import NamedTuple

from datastates.commit.names import final_of
from datastates.errors import StorageError
from datastates.formats import own
from datastates.storage import Entry, folders_of
from datastates.storage.location import Location

RECORD = ".datastates"
"""The file in a folder that tells what it had when it was complete."""
FILE = ".ckpt"
"""The ending of files that are checkpoints by themselves."""
_MOST = 1 << 26
_MARKS = ("trainer_state.json", "random_states_0.pkl", "meta.pt", "metadata.json")
"""Files that frameworks write last: of a Trainer, accelerate, Lightning, Megatron."""
_STATES = ("random_states_", "rng_state")
"""The beginnings of files in checkpoints of accelerate and a Trainer, never in the directories of such checkpoints."""
_OF_DEEPSPEED, _LATEST = "_model_states.pt", "latest"
_ITERATION, _TRACKER = re.compile(r"iter_([0-9]{7,})\Z"), "latest_checkpointed_iteration.txt"
_ZIP_END, _ZIP_END_NBYTES = b"PK\5\6", 22
_NUMBERS = re.compile("[0-9]+")

Files = dict[str, tuple[int, int]]
"""The files of a folder by name: length, and when each was last changed, in nanoseconds."""


class Folder(NamedTuple):
    """A checkpoint that is complete.

    Attributes:
        path: The folder, or the file.
        number: The later one of two has the higher number.
        files: Its files; of a file, only itself.
        is_file: Whether it is a file.
    """

    path: Location
    number: int
    files: Files
    is_file: bool

    def name_of(self, attempt: int) -> str:
        """Its name in a place: other contents have another one. ``attempt`` counts the names that are used up."""
        text = json.dumps([sorted(self.files.items()), attempt])
        return f"{self.path.name}.{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"

    def file(self, name: str) -> Location:
        """The path of one of its files."""
        return self.path if self.is_file else self.path / name


def found(path: Location, *, by_hand: bool = False) -> Folder | None:
    """The checkpoint at a path; None if it is none, or not complete.

    Args:
        path: The folder or the file.
        by_hand: Whether a folder without a record is taken if it has what its framework writes last.

    Raises:
        StorageError: It cannot be read.
    """
    entry = None if path.name.startswith(".") else folders_of(path).look(path, follow=False)
    if entry is not None and entry.kind == "file":
        return _of_file(path, entry) if _has_end(path, entry.nbytes) else None
    if entry is None or entry.kind != "folder":
        return None
    if (told := _recorded(path)) is not None:
        return told if told.files.items() <= _files(path).items() else None
    if not by_hand:
        return None
    files = _files(path)
    return _of_folder(path, files) if _looks_complete(path, files) else None


def is_surely(one: Folder) -> bool:
    """Whether a folder is a checkpoint, and no directory of them, which may have the same files."""
    return any(name.startswith(_STATES) for name in one.files)


def every(root: Location, *, by_hand: bool = False) -> list[Folder]:
    """The checkpoints in a directory, as :func:`found`."""
    there = folders_of(root).entries(root)
    names = [name for name, entry in there.items() if entry.kind == "folder" or name.endswith(FILE)]
    return [one for name in sorted(names) if (one := found(root / name, by_hand=by_hand)) is not None]


def record(path: Location, above: int) -> Folder | None:
    """Note that a framework has completed a checkpoint. Its number is higher than ``above``.

    None: the framework has more to write. Raises StorageError if it is gone, or cannot be read or written.
    """
    folders = folders_of(path)
    if (entry := folders.look(path)) is not None and entry.kind == "file":
        return _of_file(path, entry)
    files = _files(path)
    if not files or _lacks(path, files):
        return None
    made = _of_folder(path, files)
    made = made._replace(number=max(made.number, above + 1))
    write_record(made)
    return made


def write_record(made: Folder) -> None:
    """Write the record of a folder; raises StorageError."""
    data = json.dumps({"number": made.number, "files": made.files}).encode()
    folders_of(made.path).replace(made.path / RECORD, data)


def name_newest(made: Folder) -> None:
    """Let the framework take a checkpoint for the newest, where it asks a file beside its folders."""
    root = made.path.parent
    if "" in _folders_with(_OF_DEEPSPEED, made.files):
        folders_of(root).replace(root / _LATEST, made.path.name.encode())
    elif (match := _ITERATION.match(made.path.name)) is not None:
        folders_of(root).replace(root / _TRACKER, match[1].lstrip("0").encode() or b"0")


def step_of(name: str) -> int:
    """The step in a checkpoint's name: the last number in it; 0 without one."""
    return int((_NUMBERS.findall(name) or ["0"])[-1])


class Kept(NamedTuple):
    """A copy or a coming copy, for retention: the checkpoint's name, its number, and its name in the place."""

    name: str
    number: int
    key: str


def outdated(every: Collection[Kept], last: int | None, multiple: int | None) -> list[Kept]:
    """What need not be kept: copies of other contents under a name that a later one has, and those beyond the last."""
    newest: dict[str, Kept] = {}
    for one in sorted(every, key=lambda one: (one.number, one.key), reverse=True):
        newest.setdefault(one.name, one)
    again = [one for one in every if newest[one.name] is not one]
    beyond = [] if last is None else [*newest.values()][last:]
    return again + [one for one in beyond if multiple is None or step_of(one.name) % multiple]


def _of_file(path: Location, entry: Entry) -> Folder:
    return Folder(path, entry.changed, {path.name: (entry.nbytes, entry.changed)}, is_file=True)


def _of_folder(path: Location, files: Files) -> Folder:
    return Folder(path, max((changed for _, changed in files.values()), default=0), files, is_file=False)


def _has_end(path: Location, nbytes: int) -> bool:
    """Whether a file of ``torch.save`` has been written to its end."""
    at = nbytes - _ZIP_END_NBYTES
    is_torchs = at >= 0 and folders_of(path).read(path, at, _ZIP_END_NBYTES).startswith(_ZIP_END)
    return is_torchs or own.has_ending(path)


def _recorded(path: Location) -> Folder | None:
    try:
        told = json.loads(folders_of(path).read_all(path / RECORD, _MOST))
        files = {name: (nbytes, changed) for name, (nbytes, changed) in told["files"].items()}
        return Folder(path, int(told["number"]), files, is_file=False)
    except StorageError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):  # cut short by a power failure
        return Folder(path, 0, {"": (-1, 0)}, is_file=False)


def _files(folder: Location, before: str = "") -> Files:
    """The files in a folder, through links, too; without what is being written."""
    files: Files = {}
    for name, entry in folders_of(folder).entries(folder).items():
        if entry.kind == "link":
            found = folders_of(folder).look(folder / name)
            entry = entry if found is None else found
        if name == RECORD or final_of(name):
            continue
        if entry.kind == "file":
            files[before + name] = entry.nbytes, entry.changed
        elif entry.kind == "folder":
            files |= _files(folder / name, f"{before}{name}/")
    return files


def _lacks(path: Location, files: Files) -> bool:
    """Whether a folder lacks what is written last, of what torch.distributed.checkpoint and Megatron write."""
    if ".metadata" in files and "meta.pt" not in files and not _is_json(path / "metadata.json"):
        return True
    return any(f"{folder}.metadata" not in files for folder in _folders_with(".distcp", files))


def _is_json(path: Location) -> bool:
    """Whether a file has been written to its end."""
    try:
        json.loads(folders_of(path).read_all(path, _MOST))
    except (StorageError, ValueError):
        return False
    return True


def _folders_with(end: str, files: Files) -> set[str]:
    """The folders that have files whose names end so, each with a slash; empty for the folder itself."""
    return {name[: name.rfind("/") + 1] for name in files if name.endswith(end)}


def _looks_complete(path: Location, files: Files) -> bool:
    of_deepspeed = _folders_with(_OF_DEEPSPEED, files)
    if not ("" in of_deepspeed or any(mark in files for mark in _MARKS)) or _lacks(path, files):
        return False
    return all(_is_latest(path / folder if folder else path) for folder in of_deepspeed)


def _is_latest(folder: Location) -> bool:
    """Whether the file beside DeepSpeed's folders names this one."""
    with contextlib.suppress(StorageError):
        return folders_of(folder).read_all(folder.parent / _LATEST, _MOST).decode(errors="replace") == folder.name
    return False
