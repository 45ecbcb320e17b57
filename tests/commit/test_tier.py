"""The contract of a tier. It asks the store for everything: a store in memory will do."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from memory_folders import MemoryFolders

from datastates.commit import directories, fence, health, manifest, newest, retention, sequence
from datastates.commit.directory_tier import tier_of
from datastates.commit.manifest import ContainerEntry, Manifest
from datastates.commit.names import LOCK
from datastates.commit.pending import Pending, publish_files
from datastates.commit.tier import Tier, Uncommitted
from datastates.config import Keep
from datastates.errors import CheckpointNotFoundError, FencedError, StorageError
from datastates.storage import Folders, Location, folders_of, stores


@pytest.fixture(params=["local", "memory"])
def tier(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tier:
    """The tier of a directory that is not made yet."""
    if request.param == "memory":
        store = MemoryFolders()
        monkeypatch.setitem(stores.KINDS, "", (lambda stage: store,) * 2)
        return tier_of(Location("/nowhere/on/disk/run"))
    return tier_of(Location(tmp_path / "run"))


def made(tier: Tier, step: int, data: bytes = b"state") -> Manifest:
    container = ContainerEntry(file="rank-00000.pt", rank=0, nbytes=len(data), index_crc32=0)
    return Manifest(
        format=2,
        step=step,
        sequence=sequence.next_sequence(tier),
        attempt="01234567",
        created=manifest.now(),
        world_size=1,
        containers=(container,),
    )


def pending(tier: Tier, step: int, data: bytes = b"state") -> Uncommitted:
    """A checkpoint whose container is written."""
    begun = tier.pending(tier.target(step)).begin()
    folders_of(tier.root).create(begun.file("rank-00000.pt"), data)
    return begun


def commit(tier: Tier, step: int) -> Location:
    return pending(tier, step).commit(made(tier, step), lambda: tier.target(step, in_flight=False))


def test_a_checkpoint_appears_at_its_commit(tier: Tier) -> None:
    begun = pending(tier, 1)
    assert newest.committed(tier) == {}
    with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint"):
        newest.find(tier.root)
    path = begun.commit(made(tier, 1), lambda: tier.target(1, in_flight=False))
    assert (path, newest.find(tier.root)) == (tier.root / "step-00000001",) * 2
    assert manifest.open(path).step == 1
    assert sorted(folders_of(path).names(path)) == ["manifest.json", "rank-00000.pt"]
    assert health.problem(path) is None
    assert tier.debris() == []


def test_a_step_that_is_saved_again_gets_a_revision_and_is_the_newest(tier: Tier) -> None:
    for step in (2, 1, 2):
        commit(tier, step)
    assert [path.name for _, path in newest.in_order(tier.checkpoints())] == [
        "step-00000002",
        "step-00000001",
        "step-00000002.r1",
    ]
    assert newest.find(tier.root, 2).name == "step-00000002.r1"
    retention.retain(tier, Keep(last=1))
    assert [path.name for path in directories.steps(tier.root)] == ["step-00000002.r1"]


def test_what_is_read_is_not_deleted(tier: Tier) -> None:
    path = commit(tier, 1)
    with tier.protect(path):
        assert not tier.remove(path)
        assert newest.find(tier.root) == path
    assert tier.remove(path)
    assert folders_of(tier.root).names(tier.root) == []
    with pytest.raises(CheckpointNotFoundError), tier.protect(path):
        pass


def test_only_what_nobody_writes_is_debris(tier: Tier) -> None:
    dead, alive = pending(tier, 1), pending(tier, 2)
    dead.close()
    assert tier.debris() == [dead.path("rank-00000.pt").parent]
    tier.sweep()
    assert directories.entries(tier.root) == [alive.path("rank-00000.pt").parent]
    alive.abandon()
    assert directories.entries(tier.root) == []


def _failing(verb: str, monkeypatch: pytest.MonkeyPatch, tier: Tier) -> None:
    """Let the next call of a verb fail that concerns a name, not the partial directory."""
    kind: type[Folders] = type(folders_of(tier.root))
    plain = getattr(kind, verb)

    def call(store: Folders, path: Location, *words: object, **named: object) -> object:
        if ".partial-" not in str(path):
            monkeypatch.setattr(kind, verb, plain)
            raise StorageError(errno.EIO, verb, str(path))
        return plain(store, path, *words, **named)

    monkeypatch.setattr(kind, verb, call)


@pytest.mark.parametrize("verb", ["remove", "sync_folder"])
def test_a_commit_that_fails_after_the_name_is_taken_back(
    verb: str, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = pending(tier, 1)
    wanted = made(tier, 1)
    _failing(verb, monkeypatch, tier)
    with pytest.raises(StorageError, match="Input/output error"):
        begun.commit(wanted, lambda: tier.target(1, in_flight=False))
    assert newest.committed(tier) == {}
    begun.abandon()
    assert directories.entries(tier.root) == []


def test_a_lock_file_that_is_gone_after_the_rename_fails_no_commit(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on s3fs: it remembers for a while that a name in the new folder was absent."""
    kind: type[Folders] = type(folders_of(tier.root))
    rename = kind.rename

    def lose(store: Folders, source: Location, target: Location) -> None:
        store.remove(source / LOCK, missing_ok=True)
        rename(store, source, target)

    begun = pending(tier, 1)
    monkeypatch.setattr(kind, "rename", lose)
    assert begun.commit(made(tier, 1), lambda: tier.target(1, in_flight=False)) == newest.find(tier.root)


def test_ranks_write_one_checkpoint(tier: Tier) -> None:
    store, target = folders_of(tier.root), tier.target(1)
    ranks = [tier.pending(target, "01234567").begin() for _ in range(2)]
    for number, rank in enumerate(ranks):
        store.create(rank.file(f"rank-0000{number}.pt"), b"state")
        rank.seal()
    assert [rank.path("rank-00001.pt") for rank in ranks] == [ranks[1].file("rank-00001.pt")] * 2
    ranks[1].leave()
    ranks[1].abandon()  # it does not know yet that rank 0 commits
    path = ranks[0].commit(made(tier, 1), lambda: tier.target(1, in_flight=False))
    assert sorted(store.names(path)) == ["manifest.json", "rank-00000.pt", "rank-00001.pt"]
    assert tier.of_attempt(target, "01234567") == path


def test_a_rank_that_gives_up_removes_its_files_alone(tier: Tier) -> None:
    store, target = folders_of(tier.root), tier.target(1)
    ranks = [tier.pending(target, "01234567").begin() for _ in range(2)]
    for number, rank in enumerate(ranks):
        store.create(rank.file(f"rank-0000{number}.pt"), b"state")
    ranks[1].abandon()
    assert [store.exists(ranks[0].path(f"rank-0000{number}.pt")) for number in range(2)] == [True, False]
    ranks[0].abandon()
    assert directories.entries(tier.root) == []


@pytest.mark.parametrize("owners", [["a", "a"], ["a", "b"]], ids=["one process", "two processes"])
def test_a_newer_opening_of_another_process_fences(
    owners: list[str], tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders_of(tier.root).make_folder(tier.root)
    names = iter(owners)
    monkeypatch.setattr(fence, "_owner", lambda process: next(names))
    first, second = tier.open(), tier.open()
    monkeypatch.setattr(fence, "_owner", lambda process: "neither")
    first = tier.opening(first.encode())
    first.begin_to_save()
    begun = tier.pending(tier.target(1), mark=first.mark).begin()
    folders_of(tier.root).create(begun.file(manifest.container_name(0)), b"state")
    first.refuse_if_fenced()
    second.begin_to_save()
    if owners[0] == owners[1]:
        first.refuse_if_fenced()
        assert begun.commit(made(tier, 1), lambda: tier.target(1, in_flight=False)) == newest.find(tier.root)
        return
    with pytest.raises(FencedError, match="a newer run saves in"):
        first.refuse_if_fenced()
    with pytest.raises(StorageError):
        begun.commit(made(tier, 1), lambda: tier.target(1, in_flight=False))
    begun.abandon()
    assert newest.committed(tier) == {}


@pytest.mark.parametrize("replace", [False, True])
def test_files_get_their_names_all_or_none(replace: bool, tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    store = folders_of(tier.root)
    store.make_folder(tier.root / "out")
    begun = Pending(tier.root / "out" / "export").begin()
    for name in ("a", "b"):
        store.create(begun.file(name), name.encode())
    store.create(tier.root / "out" / "b", b"old")
    moves: list[tuple[Location, Location]] = [(file, tier.root / "out" / file.name) for file in begun.files]
    expected: Callable[[], contextlib.AbstractContextManager[object]] = (
        contextlib.nullcontext if replace else lambda: pytest.raises(StorageError, match="File exists")
    )
    with expected():
        publish_files(moves, replace=replace)
    begun.abandon()
    found = {name: store.read_all(tier.root / "out" / name) for name in store.names(tier.root / "out")}
    assert found == ({"a": b"a", "b": b"b"} if replace else {"b": b"old"})
