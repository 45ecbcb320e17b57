"""Copies of frameworks' checkpoints in a place of any store: sent, listed, fetched and removed.

Beside the files of a copy, ``NAME.TOKEN/FILE``, lies its list, ``NAME.TOKEN.json``: their lengths and checksums. It is
created last, and readers see nothing without it. Other contents have another token, so no object is ever replaced. Who
creates the list first decides: a sweep creates a fence there before it removes what a killed process has sent.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import secrets
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from datastates._base import log
from datastates._base.tasks import each
from datastates.commit import carry, names
from datastates.commit.decision import Patience, decide
from datastates.container import checksums
from datastates.container.file import open_container
from datastates.draining import folder
from datastates.draining.folder import Folder, Kept
from datastates.errors import CommitError, CorruptError, StorageError
from datastates.formats import own
from datastates.storage import Folders, folders_of, store_of
from datastates.storage.in_pieces import in_pieces
from datastates.storage.location import Location
from datastates.storage.objects import AT_ONCE

_NAME = re.compile(r"(.+)\.[0-9a-f]{16}(\.json)?\Z", re.DOTALL)
_FENCE = b"no copy\n"
_DAY = 86_400 * 10**9
_KEPT = 7 * _DAY
"""Nanoseconds for which a fence stays: a request that was sent before may arrive."""

Pace = Callable[[int], object]
"""Called with the number of bytes before they are sent. It may wait."""


class Copy(NamedTuple):
    """A whole copy.

    Attributes:
        key: Its name in the place.
        name: The name of the checkpoint.
        number: The newer one has the higher number.
        is_file: Whether the checkpoint is one file.
        files: For each file its length, its CRC-32, and when it was last changed, in nanoseconds.
    """

    key: str
    name: str
    number: int
    is_file: bool
    files: dict[str, tuple[int, int, int]]

    @property
    def kept(self) -> Kept:
        """For retention."""
        return Kept(self.name, self.number, self.key)


class Copies:
    """The copies in one place. Used by one thread at a time.

    Attributes:
        place: The place.
        used: Names of copies that will never be: their lists are fences, or damaged.
        damaged: Those whose lists are damaged.
    """

    def __init__(self, place: Location) -> None:
        """Remember the place; nothing is read yet."""
        self.place = place
        self.used: set[str] = set()
        self.damaged: set[str] = set()
        self._known: dict[str, Copy | None] = {}
        self._swept = False

    def every(self) -> dict[str, Copy]:
        """All whole copies by key; raises StorageError. A list is read once."""
        there = store_of(self.place).entries(self.place)
        keys = [n[: -len(".json")] for n in there if (m := _NAME.match(n)) and m[2] and there[n].kind == "file"]
        new = [key for key in keys if key not in self._known]
        self._known |= dict(zip(new, each(self._read, new, AT_ONCE), strict=True))
        self.used = {key for key in keys if self._known[key] is None}
        self.damaged &= self.used
        return {key: copy for key in keys if (copy := self._known[key]) is not None}

    def _read(self, key: str) -> Copy | None:
        path = self._list(key)
        found = _decoded(key, data := store_of(path).read_all(path))
        if found is None and data != _FENCE:
            self.damaged.add(key)
        return found

    def _list(self, key: str) -> Location:
        return self.place / f"{key}.json"

    def key_of(self, one: Folder) -> str:
        """The name of a checkpoint's copy."""
        return next(key for n in itertools.count() if (key := one.name_of(n)) not in self.used)

    # --- sending

    def send(self, one: Folder, number: int, pace: Pace) -> Copy:
        """Send what the place lacks of a checkpoint, and make it a copy.

        Raises:
            CorruptError, FormatError: A file of the checkpoint is damaged.
            StorageError: It cannot be read, it has changed meanwhile, or the place cannot be written.
            CommitError: Another process has given this copy up. A later try takes another name.
        """
        key = self.key_of(one)
        paths = {name: self.place / key / name for name in sorted(one.files)}
        store = store_of(self.place)
        store.make_folder(self.place)
        lengths = dict(zip(paths, store.lengths([*paths.values()]), strict=True))
        files = {}
        for name, path in paths.items():
            nbytes, changed = one.files[name]
            taken = _Taken(_pieces(one.file(name), nbytes), pace)
            if lengths[name] == nbytes:  # sent before
                for _ in taken:
                    pass
            else:
                store.make_folder(path.parent)
                store.upload(path, iter(taken), nbytes)
            files[name] = nbytes, taken.crc, changed
        if not is_there(one):
            raise StorageError(0, "read", str(one.path), f"read {one.path}: it has changed meanwhile")
        copy = Copy(key, one.path.name, number, one.is_file, files)
        patience = Patience()
        there = decide(self._list(key), _encoded(copy), patience.commit, patience)
        store.sync_folder(self.place)
        self._known[key] = _decoded(key, there)
        if (made := self._known[key]) is None:
            raise CommitError(f"{self.place / key} was given up by another process")
        return made

    # --- removing

    def remove(self, key: str) -> None:
        """Remove a copy: its list first; raises StorageError."""
        self._known.pop(key, None)
        store_of(self.place).discard([self._list(key)])
        self._clear(key)

    def _clear(self, key: str) -> None:
        store, path = store_of(self.place), self.place / key
        if isinstance(store, Folders):
            store.remove_tree(path)
        else:
            store.discard([path / name for name in store.entries(path, deep=True)])

    def sweep(self, but: Collection[str], after: Copy) -> None:
        """Remove what killed processes have sent, once; raises StorageError.

        Args:
            but: Copies that are still to be completed.
            after: A copy that was made just now: it tells the time by the store's clock.
        """
        store, patience = store_of(self.place), Patience()
        if self._swept or (made := store.look(self._list(after.key))) is None:
            return
        self._swept = True
        there = store.entries(self.place)
        for key in (name for name, one in there.items() if one.kind == "folder" and _NAME.match(name)):
            if key in but or self._known.get(key) is not None:
                continue
            last = max((one.changed for one in store.entries(self.place / key, deep=True).values()), default=0)
            if made.changed - last > _DAY and decide(self._list(key), _FENCE, patience.fence, patience) == _FENCE:
                log.warning("removing what an interrupted run has sent: %s", self.place / key)
                self._clear(key)
        old = [k for k in self.used if k not in there and made.changed - there[f"{k}.json"].changed > _KEPT]
        store.discard([self._list(key) for key in old])

    # --- fetching

    def fetch(self, copy: Copy, root: Location, pace: Pace) -> Location:
        """Bring a copy to a directory, where it appears at once, as the newest for its framework; returns its path.

        Raises:
            CorruptError: A file does not match its checksum.
            StorageError: It cannot be read or written, or another checkpoint has its name there.
            ValueError: The directory is in a store of objects.
        """
        folders, final = folders_of(root), root / copy.name
        made = Folder(final, copy.number, {name: (n, at) for name, (n, _, at) in copy.files.items()}, copy.is_file)
        if (there := folder.found(final)) is not None and (there.files, there.is_file) == (made.files, copy.is_file):
            folder.name_newest(made)
            return final
        if folders.exists(final, follow=False):
            text = f"{final} is there, with other files than the copy in {self.place}: move it away first"
            raise StorageError(0, "create", str(final), text)
        staged = names.partial(names.hidden(final), secrets.token_hex(4))
        folders.make_folder(staged)
        try:
            for name, (nbytes, crc, changed) in copy.files.items():
                self._fetch_file(self.place / copy.key / name, staged / name, (nbytes, crc), pace)
                folders.set_changed(staged / name, changed)
            if copy.is_file:
                folders.rename(staged / copy.name, final)
            else:
                folder.write_record(made._replace(path=staged))
                folders.rename(staged, final)
            folders.sync_folder(root)
        finally:
            with contextlib.suppress(StorageError):
                folders.remove_tree(staged, tolerant=True)
        folder.name_newest(made)
        return final

    def _fetch_file(self, source: Location, path: Location, told: tuple[int, int], pace: Pace) -> None:
        nbytes, crc = told
        taken = _Taken(_plain(source, nbytes), pace)

        def checked() -> Iterator[memoryview]:
            yield from taken
            if taken.crc != crc:
                what = f"{source} does not match the checksum in its list"
                raise CorruptError(what, key=source.name, path=str(source))

        folders_of(path).make_folder(path.parent)
        folders_of(path).upload(path, checked(), nbytes)


def is_there(one: Folder) -> bool:
    """Whether a checkpoint is still there as it was found; raises StorageError."""
    now = folder.found(one.path, by_hand=True)
    return now is not None and now.files == one.files


class _Taken:
    """Pieces of a file, and the CRC-32 of those that were taken."""

    def __init__(self, pieces: Iterator[memoryview], pace: Pace) -> None:
        self.crc = 0
        self._pieces, self._pace = pieces, pace

    def __iter__(self) -> Iterator[memoryview]:
        for data in self._pieces:
            self._pace(len(data))
            self.crc = checksums.crc32_combine(self.crc, checksums.crc32(data), len(data))
            yield data


def _pieces(path: Location, nbytes: int) -> Iterator[memoryview]:
    """The bytes of a file; those of a container are compared with its index."""
    is_ours = own.has_ending(path) or own.has_beginning(path)
    return carry.every(open_container(path)) if is_ours else _plain(path, nbytes)


def _plain(path: Location, nbytes: int) -> Iterator[memoryview]:
    piece = store_of(path).traits.best_piece
    yield from in_pieces(path, [(at, min(piece, nbytes - at)) for at in range(0, nbytes, piece)])


def _encoded(copy: Copy) -> bytes:
    told = json.dumps({"format": 1, **copy._asdict()}, sort_keys=True)
    return json.dumps({"list": told, "crc32": checksums.crc32(told.encode())}).encode()


def _decoded(key: str, data: bytes) -> Copy | None:
    """The copy that a list describes; None for a fence, and for what is no list of that copy."""
    try:
        outer = json.loads(data)
        if checksums.crc32(outer["list"].encode()) != outer["crc32"]:
            return None
        told: dict[str, Any] = json.loads(outer["list"])
        files = {str(name): (int(n), int(crc), int(at)) for name, (n, crc, at) in told["files"].items()}
        copy = Copy(key, told["name"], int(told["number"]), bool(told["is_file"]), files)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    match = _NAME.match(key)
    is_ours = match is not None and match[1] == copy.name and told["key"] == key and told["format"] == 1
    return copy if is_ours and all(map(_is_below, [copy.name, *files])) else None


def _is_below(name: str) -> bool:
    """Whether a file of this name lies in the folder that it is put in."""
    return not {"", ".", ".."} & {*name.split("/")}
