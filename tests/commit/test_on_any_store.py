"""Committing, finding, protecting and deleting checkpoints ask the store for everything: one in memory will do."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from memory_store import MemoryStore

from datastates.commit import directories, health, manifest, newest, protection, retention, sequence
from datastates.commit.fence import Opening
from datastates.commit.manifest import ContainerEntry, Manifest
from datastates.commit.pending import Pending, publish_files
from datastates.errors import CheckpointNotFoundError, StorageError
from datastates.storage import Location, Store, store_of, stores


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Location:
    """A directory of checkpoints that is not made yet."""
    if request.param == "memory":
        store = MemoryStore()
        monkeypatch.setattr(stores, "LocalStore", lambda stage: store)
        return Location("/nowhere/on/disk/run")
    return Location(tmp_path / "run")


def made(root: Location, step: int, data: bytes = b"state") -> Manifest:
    container = ContainerEntry(file="rank-00000.pt", rank=0, nbytes=len(data), index_crc32=0)
    return Manifest(
        format=2,
        step=step,
        sequence=sequence.next_sequence(root),
        attempt="01234567",
        created=manifest.now(),
        world_size=1,
        containers=(container,),
    )


def pending(root: Location, step: int, data: bytes = b"state") -> Pending:
    """A checkpoint whose container is written."""
    begun = Pending(directories.target(root, step)).begin()
    store_of(root).create(begun.file("rank-00000.pt"), data)
    return begun


def commit(root: Location, step: int) -> Location:
    return pending(root, step).commit(made(root, step), lambda: directories.target(root, step, in_flight=False))


def test_a_checkpoint_appears_at_its_commit(root: Location) -> None:
    begun = pending(root, 1)
    assert newest.committed(root) == {}
    with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint"):
        newest.find(root)
    path = begun.commit(made(root, 1), lambda: directories.target(root, 1, in_flight=False))
    assert (path, newest.find(root)) == (root / "step-00000001",) * 2
    assert manifest.open(path).step == 1
    assert sorted(store_of(path).names(path)) == ["manifest.json", "rank-00000.pt"]
    assert health.problem(path) is None
    assert retention.debris(root) == []


def test_a_step_that_is_saved_again_gets_a_revision_and_is_the_newest(root: Location) -> None:
    for step in (2, 1, 2):
        commit(root, step)
    assert [path.name for _, path in newest.in_order(root)] == ["step-00000002", "step-00000001", "step-00000002.r1"]
    assert newest.find(root, 2).name == "step-00000002.r1"
    retention.retain(root, 1, None)
    assert [path.name for path in directories.steps(root)] == ["step-00000002.r1"]


def test_what_is_read_is_not_deleted(root: Location) -> None:
    path = commit(root, 1)
    with protection.reading(path):
        assert not retention.remove(path)
        assert newest.find(root) == path
    assert retention.remove(path)
    assert store_of(root).names(root) == []
    with pytest.raises(CheckpointNotFoundError), protection.reading(path):
        pass


def test_only_what_nobody_writes_is_debris(root: Location) -> None:
    dead, alive = pending(root, 1), pending(root, 2)
    dead.close()
    assert retention.debris(root) == [dead.directory]
    retention.sweep(root)
    assert directories.entries(root) == [alive.directory]
    alive.abandon()
    assert directories.entries(root) == []


def _failing(verb: str, monkeypatch: pytest.MonkeyPatch, root: Location) -> None:
    """Let the next call of a verb fail that concerns a name, not the partial directory."""
    kind: type[Store] = type(store_of(root))
    plain = getattr(kind, verb)

    def call(store: Store, path: Location, *words: object, **named: object) -> object:
        if ".partial-" not in str(path):
            monkeypatch.setattr(kind, verb, plain)
            raise StorageError(errno.EIO, verb, str(path))
        return plain(store, path, *words, **named)

    monkeypatch.setattr(kind, verb, call)


@pytest.mark.parametrize("verb", ["remove", "sync_folder"])
def test_a_commit_that_fails_after_the_name_is_taken_back(
    verb: str, root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = pending(root, 1)
    wanted = made(root, 1)
    _failing(verb, monkeypatch, root)
    with pytest.raises(StorageError, match="Input/output error"):
        begun.commit(wanted, lambda: directories.target(root, 1, in_flight=False))
    assert newest.committed(root) == {}
    begun.abandon()
    assert directories.entries(root) == []


def test_an_older_opening_is_fenced(root: Location) -> None:
    store_of(root).make_folder(root)
    first = Opening.begin(root)
    first.begin_to_save()
    begun = Pending(directories.target(root, 1), mark=first.mark).begin()
    second = Opening.begin(root)
    second.begin_to_save()  # of the same process, so it fences nobody
    first.refuse_if_fenced()
    assert begun.directory in directories.entries(root)
    begun.abandon()


@pytest.mark.parametrize("replace", [False, True])
def test_files_get_their_names_all_or_none(replace: bool, root: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(root)
    store.make_folder(root / "out")
    begun = Pending(root / "out" / "export").begin()
    for name in ("a", "b"):
        store.create(begun.file(name), name.encode())
    store.create(root / "out" / "b", b"old")
    moves: list[tuple[Location, Location]] = [(file, root / "out" / file.name) for file in begun.files]
    expected: Callable[[], contextlib.AbstractContextManager[object]] = (
        contextlib.nullcontext if replace else lambda: pytest.raises(StorageError, match="File exists")
    )
    with expected():
        publish_files(moves, replace=replace)
    begun.abandon()
    found = {name: store.read_all(root / "out" / name) for name in store.names(root / "out")}
    assert found == ({"a": b"a", "b": b"b"} if replace else {"b": b"old"})
