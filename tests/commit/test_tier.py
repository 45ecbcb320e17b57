"""The contract of a tier. It asks the store for everything: a store in memory will do."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from memory_folders import MemoryFolders

from datastates.commit import directories, fence, manifest, newest, run
from datastates.commit.manifest import ContainerEntry, Manifest
from datastates.commit.names import LOCK, step_name
from datastates.commit.pending import Pending, publish_files
from datastates.commit.tier import Tier, Uncommitted
from datastates.commit.tiers import tier_of
from datastates.errors import CheckpointNotFoundError, FencedError, StorageError
from datastates.storage import Folders, Location, folders_of, stores
from datastates.testing import TierTests


@pytest.fixture(params=["local", "memory"])
def tier(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tier:
    """The tier of an empty directory."""
    root = Location(tmp_path / "run")
    if request.param == "memory":
        store, root = MemoryFolders(), Location("/nowhere/on/disk/run")
        monkeypatch.setitem(stores.KINDS, "", (lambda stage: store,) * 2)
    folders_of(root).make_folder(root)
    return tier_of(root)


def made(tier: Tier, step: int, data: bytes = b"state") -> Manifest:
    container = ContainerEntry(file="rank-00000.pt", rank=0, nbytes=len(data), index_crc32=0)
    return Manifest(
        format=2,
        step=step,
        sequence=run.next_sequence(tier),
        attempt="01234567",
        created=manifest.now(),
        world_size=1,
        containers=(container,),
    )


class TestDirectory(TierTests):
    @pytest.fixture(autouse=True)
    def _made(self, tier: Tier) -> None:
        self.tier = tier


def test_a_step_that_is_saved_again_gets_a_revision(tier: Tier) -> None:
    for _ in range(2):
        commit(tier, 2)
    assert [one.path.name for one in tier.checkpoints()] == ["step-00000002", "step-00000002.r1"]


def test_nothing_is_found_before_the_first_commit(tier: Tier) -> None:
    pending(tier, 1)
    with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint"):
        newest.find(newest.given(tier.root, is_checkpoint=False))


def pending(tier: Tier, step: int, data: bytes = b"state") -> Uncommitted:
    """A checkpoint whose container is written."""
    begun = tier.pending(tier.root / step_name(step), mark=b"").begin()
    folders_of(tier.root).create(begun.file("rank-00000.pt"), data)
    return begun


def commit(tier: Tier, step: int) -> Location:
    return pending(tier, step).commit(made(tier, step))


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
        begun.commit(wanted)
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
    assert begun.commit(made(tier, 1)) == newest.find(newest.given(tier.root, is_checkpoint=False))


@pytest.mark.parametrize("owners", [["a", "a"], ["a", "b"]], ids=["one process", "two processes"])
def test_a_newer_opening_of_another_process_fences(
    owners: list[str], tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter(owners)
    monkeypatch.setattr(fence, "owner_of", lambda process: next(names))
    first, second = fence.DirectoryOpening.begin(tier.root), fence.DirectoryOpening.begin(tier.root)
    monkeypatch.setattr(fence, "owner_of", lambda process: "neither")
    first = fence.DirectoryOpening.decode(tier.root, first.encode())
    first.begin_to_save()
    begun = tier.pending(tier.root / step_name(1), mark=first.mark).begin()
    folders_of(tier.root).create(begun.file(manifest.container_name(0)), b"state")
    first.refuse_if_fenced()
    second.begin_to_save()
    if owners[0] == owners[1]:
        first.refuse_if_fenced()
        assert begun.commit(made(tier, 1)) == newest.find(newest.given(tier.root, is_checkpoint=False))
        return
    with pytest.raises(FencedError, match="a newer run saves in"):
        first.refuse_if_fenced()
    with pytest.raises(StorageError):
        begun.commit(made(tier, 1))
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
