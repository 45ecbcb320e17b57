"""Files and folders in memory: what the contract of folders asks for, and nothing that a file system adds."""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from datastates.errors import StorageError
from datastates.storage import Entry, FileWriter, Folders, Location, Lock


def _error(number: int, operation: str, path: Location) -> StorageError:
    return StorageError(number, operation, str(path))


@dataclass(eq=False)
class _Node:
    """A file, or a folder if ``inside`` is a mapping."""

    number: int
    changed: int
    data: bytearray = field(default_factory=bytearray)
    inside: dict[str, _Node] | None = None
    holders: dict[object, bool] = field(default_factory=dict)
    """Who has locked it, and whether shared."""


class MemoryFolders(Folders):
    """Files and folders in memory. Everything is durable at once; there are no links."""

    def __init__(self) -> None:
        self._clock = itertools.count(1)
        self._lock = threading.RLock()
        self._root = self._node(folder=True)

    def _node(self, *, folder: bool = False) -> _Node:
        now = next(self._clock)
        return _Node(now, now, inside={} if folder else None)

    def find(self, path: Location) -> _Node | None:
        node: _Node | None = self._root
        for part in filter(None, str(path).split("/")):
            node = None if node is None or node.inside is None else node.inside.get(part)
        return node

    def _folder(self, operation: str, path: Location, below: Location | None = None) -> dict[str, _Node]:
        """What a folder holds. Errors name ``below``, which is to be in it."""
        node = self.find(path)
        if node is None or node.inside is None:
            raise _error(errno.ENOENT if node is None else errno.ENOTDIR, operation, below or path)
        return node.inside

    def _file(self, operation: str, path: Location) -> _Node:
        node = self.find(path)
        if node is None:
            raise _error(errno.ENOENT, operation, path)
        if node.inside is not None:
            raise _error(0, operation, path)
        return node

    def look(self, path: Location, *, follow: bool = True) -> Entry | None:
        with self._lock:
            node = self.find(path)
            if node is None:
                return None
            kind = "file" if node.inside is None else "folder"
            return Entry(kind, len(node.data), node.changed, (node.number, node.changed), (node.number,))

    def names(self, folder: Location, *, stale_ok: bool = False) -> list[str]:
        with self._lock:
            node = self.find(folder)
            return [] if node is None or node.inside is None else list(node.inside)

    def entries(self, folder: Location, *, deep: bool = False) -> dict[str, Entry]:
        with self._lock:
            found = {name: entry for name in self.names(folder) if (entry := self.look(folder / name)) is not None}
            if not deep:
                return found
            files = {name: entry for name, entry in found.items() if entry.kind == "file"}
            for name in found.keys() - files.keys():
                files |= {f"{name}/{below}": one for below, one in self.entries(folder / name, deep=True).items()}
            return files

    def target(self, link: Location) -> str:
        raise _error(errno.EINVAL, "readlink", link)

    def read(self, path: Location, offset: int, nbytes: int) -> bytes:
        with self._lock:
            data = bytes(self._file("read", path).data[offset : offset + nbytes])
        if len(data) < nbytes:
            raise _error(0, "read", path)
        return data

    def read_all(self, path: Location, most: int | None = None) -> bytes:
        with self._lock:
            data = bytes(self._file("read", path).data)
        if most is not None and len(data) > most:
            raise _error(errno.EFBIG, "read", path)
        return data

    def create(self, path: Location, data: bytes) -> None:
        with self._lock:
            if path.name in self._folder("open", path.parent, path):
                raise _error(errno.EEXIST, "open", path)
            self.replace(path, data)

    def replace(self, path: Location, data: bytes) -> None:
        with self._lock:
            inside = self._folder("write", path.parent, path)
            if path.name in inside:
                self._file("rename", path)
            inside[path.name] = self._node()
            inside[path.name].data[:] = data

    def touch(self, path: Location) -> None:
        with self._lock:
            self._folder("write", path.parent, path).setdefault(path.name, self._node())

    def writer(self, path: Location, *, direct: bool = False) -> FileWriter:
        self.create(path, b"")
        return _Writer(self._file("open", path), lambda: self.discard([path]))

    def make_folder(self, path: Location) -> None:
        with self._lock:
            for folder in reversed([path, *path.parents]):
                if folder.name:
                    self.add_folder(folder, exist_ok=True)

    def add_folder(self, path: Location, *, exist_ok: bool = False) -> None:
        with self._lock:
            inside = self._folder("mkdir", path.parent, path)
            if path.name not in inside:
                inside[path.name] = self._node(folder=True)
            elif not exist_ok:
                raise _error(errno.EEXIST, "mkdir", path)
            elif inside[path.name].inside is None:
                raise _error(errno.ENOTDIR, "mkdir", path)

    def sync_folder(self, path: Location) -> None:
        with self._lock:
            self._folder("sync_directory", path)

    def rename(self, source: Location, target: Location) -> None:
        with self._lock:
            node = self.find(source)
            if node is None:
                raise _error(errno.ENOENT, "rename", target)
            if (old := self.find(target)) is not None:
                if node.inside is None and old.inside is not None:
                    raise _error(errno.EISDIR, "rename", target)
                if node.inside is not None and old.inside is None:
                    raise _error(errno.ENOTDIR, "rename", target)
                if old.inside:
                    raise _error(errno.ENOTEMPTY, "rename", target)
            inside = self._folder("rename", target.parent, target)
            del self._folder("rename", source.parent, source)[source.name]
            inside[target.name] = node

    def rename_new(self, source: Location, target: Location) -> None:
        with self._lock:
            if self.find(target) is not None:
                raise _error(errno.EEXIST, "rename", target)
            self.rename(source, target)

    def remove(self, path: Location, *, missing_ok: bool = False, operation: str = "remove") -> None:
        with self._lock:
            if self.find(path) is None and missing_ok:
                return
            self._file(operation, path)
            del self._folder(operation, path.parent, path)[path.name]

    def discard(self, paths: Sequence[Location]) -> None:
        for path in paths:
            self.remove(path, missing_ok=True)

    def remove_empty(self, folder: Location) -> None:
        with self._lock:
            if self._folder("rmdir", folder):
                raise _error(errno.ENOTEMPTY, "rmdir", folder)
            del self._folder("rmdir", folder.parent)[folder.name]

    def remove_tree(self, folder: Location, *, tolerant: bool = False) -> None:
        with self._lock:
            node = self.find(folder)
            if node is not None and node.inside is not None:
                del self._folder("remove", folder.parent)[folder.name]
            elif not tolerant and node is not None:
                raise _error(errno.ENOTDIR, "remove", folder)

    def open_lock(self, path: Location, *, create: bytes | None = None, write: bool = True) -> Lock:
        with self._lock:
            if create is not None and self.find(path) is None:
                self.replace(path, b"")
            node = self._file("lock", path) if write else self.find(path)
            if node is None:
                raise _error(errno.ENOENT, "open", path)
            node.data += create or b""
            return _Lock(self, node)


class _Lock(Lock):
    def __init__(self, store: MemoryFolders, node: _Node) -> None:
        self._store = store
        self._node = node

    def hold(self, *, shared: bool = False) -> bool | None:
        with self._store._lock:
            others = [kind for who, kind in self._node.holders.items() if who is not self]
            if not all(shared and kind for kind in others):
                return False
            self._node.holders[self] = shared
            return True

    def is_at(self, path: Location) -> bool:
        return self._store.find(path) is self._node

    def close(self) -> None:
        self._node.holders.pop(self, None)


class _Writer(FileWriter):
    def __init__(self, node: _Node, abandon: Callable[[], None]) -> None:
        self._node = node
        self._abandon: Callable[[], None] | None = abandon

    def write(self, data: Any, offset: int) -> None:
        self._node.data.extend(bytes(max(0, offset - len(self._node.data))))
        self._node.data[offset : offset + len(data)] = bytes(data)

    def share(self, source: Location, offset: int, nbytes: int, at: int) -> bool:
        return False

    def sync(self) -> None:
        pass

    def leave(self) -> None:
        self._abandon = None

    def finish(self) -> None:
        self._abandon = None

    def close(self) -> None:
        if self._abandon is not None:
            self._abandon()
        self._abandon = None
