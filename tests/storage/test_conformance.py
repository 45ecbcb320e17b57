"""Every store does what its contract says: those of file systems and of memory, and the first with fault points."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from memory_folders import MemoryFolders
from memory_store import MemoryStore

from datastates._base import faults
from datastates._base.faults import Fault
from datastates.errors import StorageError
from datastates.storage import Folders, Location, Store, folders_of
from datastates.storage.local import LocalStore
from datastates.storage.stores import FaultyStore
from datastates.testing import StoreTests

STORES: dict[str, Callable[[], Folders]] = {
    "local": lambda: LocalStore("store"),
    "faulty": lambda: FaultyStore("store"),
    "memory": MemoryFolders,
}


class TestMemory(StoreTests):
    def make(self) -> tuple[Store, Location]:
        return MemoryStore(), Location("mem://run")


@pytest.mark.parametrize("kind", STORES)
class TestFolders(StoreTests):
    @pytest.fixture(autouse=True)
    def _made(self, kind: str, tmp_path: Path) -> None:
        self.store, self.root = STORES[kind](), Location(tmp_path / "root")
        self.prepare(self.root)

    def prepare(self, folder: Location) -> None:
        assert isinstance(self.store, Folders)
        self.store.make_folder(folder)


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Folders:
    return STORES[request.param]()


@pytest.fixture
def root(store: Folders, tmp_path: Path) -> Location:
    """A folder with nothing in it."""
    folder = Location(tmp_path / "root")
    store.make_folder(folder)
    return folder


def fails(number: int, operation: str, path: Location, call: Callable[[], object]) -> None:
    with pytest.raises(StorageError) as caught:
        call()
    assert (caught.value.errno, caught.value.operation, caught.value.filename) == (number, operation, str(path))


# --- files


def test_a_file_that_is_absent(store: Folders, root: Location) -> None:
    none = root / "none"
    store.remove(none, missing_ok=True)
    fails(errno.ENOENT, "stat", none, lambda: store.length(none))
    fails(errno.ENOENT, "read", none, lambda: store.read(none, 0, 1))
    fails(errno.ENOENT, "read", none, lambda: store.read_all(none))
    fails(errno.ENOENT, "unlock", none, lambda: store.remove(none, operation="unlock"))
    fails(errno.ENOENT, "rename", root / "a", lambda: store.rename(none, root / "a"))
    fails(errno.ENOENT, "rename", root / "a", lambda: store.rename_new(none, root / "a"))
    fails(errno.ENOENT, "lock", none, lambda: store.open_lock(none))
    fails(errno.ENOENT, "open", none, lambda: store.open_lock(none, write=False))
    fails(errno.ENOENT, "open", none / "a", lambda: store.create(none / "a", b""))


def test_touching_changes_no_contents(store: Folders, root: Location) -> None:
    store.touch(root / "a")
    assert store.read_all(root / "a") == b""
    store.replace(root / "a", b"data")
    store.touch(root / "a")
    assert store.read_all(root / "a") == b"data"


def test_a_file_that_is_written_in_pieces(store: Folders, root: Location) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    for direct in (False, True):
        writer = store.writer(root / str(direct), direct=direct)
        writer.write(b"b" * page + b"bbb", page)
        writer.write(b"a" * page, 0)
        writer.write(b"tail", 2 * page + 3)
        writer.finish()
        writer.close()
        writer.close()
        assert store.read_all(root / str(direct)) == b"a" * page + b"b" * page + b"bbbtail"
        fails(errno.EEXIST, "open", root / str(direct), lambda d=direct: store.writer(root / str(d), direct=False))


def test_what_is_synced_is_read_while_the_file_is_open(store: Folders, root: Location) -> None:
    for direct in (False, True):
        writer = store.writer(root / str(direct), direct=direct)
        writer.write(b"one", 0)
        writer.sync()
        assert store.read_all(root / str(direct)) == b"one"
        writer.write(b"two", 3)
        writer.finish()
        assert store.read_all(root / str(direct)) == b"onetwo"


def test_what_is_shared_are_the_bytes_or_nothing(store: Folders, root: Location) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    store.create(root / "source", b"x" * page + b"y" * page)
    writer = store.writer(root / "target", direct=False)
    writer.write(b"\0" * page, 0)
    shared = writer.share(root / "source", page, page, 0)
    assert not writer.share(root / "none", 0, page, 0)
    writer.finish()
    assert store.read_all(root / "target") == (b"y" if shared else b"\0") * page


# --- folders


def test_folders_hold_files(store: Folders, root: Location) -> None:
    store.make_folder(root / "a" / "b")
    store.make_folder(root / "a" / "b")
    store.create(root / "a" / "file", b"1")
    assert sorted(store.names(root / "a")) == ["b", "file"]
    assert store.names(root / "none") == store.names(root / "a" / "file") == []
    assert store.is_folder(root / "a")
    assert not store.is_file(root / "a")
    assert store.is_file(root / "a" / "file")
    assert store.exists(root / "a", follow=False)
    store.sync_folder(root / "a")
    store.add_folder(root / "a", exist_ok=True)
    fails(errno.ENOENT, "mkdir", root / "c" / "d", lambda: store.add_folder(root / "c" / "d"))
    for name in ("a/file", "a"):
        fails(errno.EEXIST, "mkdir", root / name, lambda path=root / name: store.add_folder(path))
    for make in (store.make_folder, lambda path: store.add_folder(path, exist_ok=True)):
        fails(errno.ENOTDIR, "mkdir", root / "a" / "file", lambda make=make: make(root / "a" / "file"))


def test_removing_folders(store: Folders, root: Location) -> None:
    store.make_folder(root / "a" / "b")
    store.create(root / "a" / "file", b"1")
    fails(errno.ENOTEMPTY, "rmdir", root / "a", lambda: store.remove_empty(root / "a"))
    store.remove_empty(root / "a" / "b")
    store.remove_tree(root / "a")
    assert store.names(root) == []
    store.remove_tree(root / "a")
    store.remove_tree(root / "a", tolerant=True)


def test_a_rename_moves_a_folder_with_all_in_it(store: Folders, root: Location) -> None:
    store.make_folder(root / "a" / "deep")
    store.create(root / "a" / "deep" / "file", b"1")
    before = store.look(root / "a")
    store.rename(root / "a", root / "b")
    after = store.look(root / "b")
    assert store.read_all(root / "b" / "deep" / "file") == b"1"
    assert store.names(root) == ["b"]
    assert before is not None
    assert after is not None
    assert before.place == after.place


def test_a_rename_replaces_a_file_and_no_folder_with_something_in_it(store: Folders, root: Location) -> None:
    for name in ("old", "new"):
        store.create(root / name, name.encode())
    store.rename(root / "new", root / "old")
    assert store.read_all(root / "old") == b"new"
    store.make_folder(root / "full" / "inside")
    store.make_folder(root / "empty")
    with pytest.raises(StorageError) as caught:
        store.rename(root / "empty", root / "full")
    assert caught.value.errno in (errno.ENOTEMPTY, errno.EEXIST)
    store.rename(root / "full", root / "empty")
    assert sorted(store.names(root)) == ["empty", "old"]


def test_a_new_name_replaces_nothing(store: Folders, root: Location) -> None:
    for name in ("a", "b"):
        store.create(root / name, name.encode())
    fails(errno.EEXIST, "rename", root / "b", lambda: store.rename_new(root / "a", root / "b"))
    assert store.read_all(root / "b") == b"b"
    store.rename_new(root / "a", root / "c")
    assert sorted(store.names(root)) == ["b", "c"]


# --- locks


def test_locks_exclude_and_share(store: Folders, root: Location) -> None:
    with store.open_lock(root / "a", create=b"mark") as first, store.open_lock(root / "a") as second:
        assert store.read_all(root / "a") == b"mark"
        assert first.hold(shared=True) is True
        assert second.hold(shared=True) is True
        assert second.hold() is False
        first.close()
        first.close()
        assert second.hold() is True
        with store.open_lock(root / "a", write=False) as third:
            assert third.hold(shared=True) is False
            second.close()
            assert third.hold(shared=True) is True


def test_a_lock_knows_where_its_file_is(store: Folders, root: Location) -> None:
    with store.open_lock(root / "a", create=b"") as lock:
        assert lock.is_at(root / "a")
        store.rename(root / "a", root / "b")
        assert not lock.is_at(root / "a")
        assert lock.is_at(root / "b")
        store.replace(root / "b", b"another")
        assert not lock.is_at(root / "b")


def test_a_folder_is_locked(store: Folders, root: Location) -> None:
    with store.open_lock(root, write=False) as one, store.open_lock(root, write=False) as other:
        assert one.hold() is True
        assert other.hold() is False


# --- what file systems have besides


def test_links_are_followed_or_not(tmp_path: Path) -> None:
    place = Location(tmp_path)
    store = LocalStore("store")
    (tmp_path / "file").write_bytes(b"1")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "loose").symlink_to(tmp_path / "none")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert store.is_link(place / "link")
    assert store.is_file(place / "link")
    assert not store.is_link(place / "file")
    assert store.target(place / "loose") == str(tmp_path / "none")
    assert not store.exists(place / "loose")
    assert store.exists(place / "loose", follow=False)
    assert store.look(place / "loop") is None
    assert store.look(place / "file" / "below") is None


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    place = Location(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    store = LocalStore("store")
    entry = store.look(place / "pipe")
    assert entry is not None
    assert entry.kind == "other"
    for call in (lambda: store.read(place / "pipe", 0, 1), lambda: store.open_lock(place / "pipe", write=False)):
        with pytest.raises(StorageError, match="not a regular file"):
            call()


@pytest.mark.long
def test_a_lock_is_seen_by_other_processes_and_given_up_with_its_process(tmp_path: Path) -> None:
    place = Location(tmp_path)
    store = folders_of(place)
    script = """
import sys
from datastates.storage import Location, folders_of
path = Location(sys.argv[1])
print(folders_of(path).open_lock(path, create=b"").hold(), flush=True)
"""

    def other() -> str:
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "a")], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    with store.open_lock(place / "a", create=b"") as lock:
        assert lock.hold() is True
        assert other() == "False"
    assert other() == "True"
    with store.open_lock(place / "a") as lock:
        assert lock.hold() is True


# --- fault points


def test_each_system_call_of_the_faulty_store_can_fail(tmp_path: Path) -> None:
    place = Location(tmp_path)
    store = FaultyStore("place")
    calls: dict[str, Callable[[], object]] = {
        "place.stat": lambda: store.look(place),
        "place.list": lambda: store.names(place),
        "place.read": lambda: store.read_all(place / "a"),
        "place.read_range": lambda: store.read(place / "a", 0, 1),
        "place.open": lambda: store.create(place / "b", b""),
        "place.write": lambda: store.create(place / "c", b"1"),
        "place.sync": lambda: store.create(place / "d", b""),
        "place.mkdir": lambda: store.make_folder(place / "e"),
        "place.sync_directory": lambda: store.make_folder(place / "f"),
        "place.rename": lambda: store.rename(place / "a", place / "g"),
        "place.remove": lambda: store.remove(place / "a"),
        "place.rmdir": lambda: store.remove_empty(place),
        "place.lock": lambda: store.open_lock(place / "h", create=b""),
        "place.close": lambda: store.create(place / "i", b""),
    }
    (tmp_path / "a").write_bytes(b"1")
    for point, call in calls.items():
        faults.arm(Fault(point, "fail", errno.EIO))
        try:
            with pytest.raises(StorageError) as caught:
                call()
        finally:
            faults.clear()
        assert caught.value.errno == errno.EIO
        assert str(tmp_path) in str(caught.value.filename)


def test_only_what_is_armed_passes_fault_points(tmp_path: Path) -> None:
    place = Location(tmp_path)
    assert type(folders_of(place)) is LocalStore
    faults.arm(Fault("store.rename", "fail", errno.EIO))
    try:
        assert type(folders_of(place)) is FaultyStore
    finally:
        faults.clear()


def test_an_address_that_no_store_serves_is_refused() -> None:
    with pytest.raises(ValueError, match=r"is an address, and no store is registered for ftp: \(registered: abfs:,"):
        folders_of(Location("ftp://bucket/run"))
    with pytest.raises(ValueError, match=r"s3://bucket/run is in a store of objects.*give a path"):
        folders_of(Location("s3://bucket/run"))
