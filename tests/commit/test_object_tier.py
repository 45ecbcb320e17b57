"""Checkpoints in a store of objects are listed, read under a hold, and go behind a mark."""

from __future__ import annotations

import errno
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import servers
from command import run_json
from object_place import (
    DAY,
    ROOT,
    SHORT,
    WEEK,
    Answers,
    commit,
    made,
    there,
    write,
)

import datastates as ds
from datastates._base.tasks import each
from datastates.commit import manifest, newest, retention, run
from datastates.commit.manifest import FENCE, ContainerEntry, Manifest, container_name
from datastates.commit.names import with_attempt
from datastates.commit.object_tier import ObjectTier
from datastates.commit.tiers import sweep_beside, tier_of
from datastates.errors import CheckpointNotFoundError, CommitError, StorageError
from datastates.kept import Keep
from datastates.providers import HostTensorProvider
from datastates.storage import Location, register, store_of, stores
from datastates.storage.buckets import Buckets
from datastates.testing import TierTests


class TestMemory(TierTests):
    @pytest.fixture(autouse=True)
    def _made(self, store: Answers) -> None:
        self.store = store
        self.tier = tier_of(ROOT)

    def age(self) -> None:
        self.store.age(DAY + 1)


@pytest.fixture(scope="module", params=servers.each("moto", "localbucket", "azurite"))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def environment(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    pytest.importorskip("obstore")
    with servers.server(kind, tmp_path_factory.mktemp(kind)) as environment:
        yield environment


class TestBuckets(TierTests):
    @pytest.fixture(autouse=True)
    def _made(self, kind: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(stores, "KINDS", dict(stores.KINDS))
        root = Location(f"{servers.ROOTS[kind]}/{uuid.uuid4().hex}")
        register(root.scheme, Buckets(patience=1))
        self.tier = tier_of(root)

    def age(self) -> None:
        pytest.skip("a server's clock cannot be set")


def test_names_have_that_of_the_attempt(tier: ObjectTier, store: Answers) -> None:
    commit(tier, 120, "9f86d081")
    below = "step-00000120.9f86d081"
    assert there(store) == [f"{below}/manifest.json", f"{below}/rank-00000.9f86d081.pt"]


def test_a_users_own_name_is_not_changed(tier: ObjectTier, store: Answers) -> None:
    begun = tier.pending(ROOT / "best", "9f86d081").begin()
    store.create(begun.file(container_name(0)), b"state")
    assert begun.commit(made(tier, begun)) == ROOT / "best"
    assert there(store) == ["best/manifest.json", "best/rank-00000.9f86d081.pt"]
    assert tier.of_attempt(ROOT / "best", "9f86d081") == ROOT / "best"


# --- reading and deleting


def test_what_killed_looks_have_left_goes_after_a_day(tier: ObjectTier, store: Answers) -> None:
    for name in (".now-0123456789abcdef", ".trial-0123456789abcdef"):
        store.create(ROOT / name, b"")
    tier.sweep()
    assert len(there(store)) == 2
    store.age(DAY + 1)
    tier.sweep()
    assert there(store) == []


def test_a_hold_lasts_as_long_as_a_read(tier: ObjectTier, store: Answers) -> None:
    path = commit(tier)
    with tier.protect(path), tier.protect(path):  # several ranks have one each
        assert len([name for name in there(store) if re.search(r"\.hold\.[0-9a-f]{16}$", name)]) == 2
        assert not tier.remove(path)
        assert not any(name.endswith(".ended") for name in there(store))
    assert len(there(store)) == 2
    store.age(2 * DAY + 1)
    assert tier.remove(path)


def test_who_reads_beside_a_deletion_is_seen_or_told(
    tier: ObjectTier, store: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = commit(tier), store.create

    def create(at: Location, data: bytes) -> None:
        if at.name.endswith(".ended"):
            real(path.with_name(f"{path.name}.hold.0123456789abcdef"), b"")
        real(at, data)

    monkeypatch.setattr(store, "create", create)
    assert not tier.remove(path)
    assert manifest.open(path).step == 1  # whoever holds it can read it
    assert tier.checkpoints() == []
    with pytest.raises(CheckpointNotFoundError, match="is being deleted"), tier.protect(path):
        pass
    tier.sweep()
    assert manifest.open(path).step == 1
    store.age(2 * DAY + 1)
    ObjectTier(ROOT, SHORT).sweep()
    assert there(store) == [f"{path.name}.ended"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_who_may_not_write_reads_without_a_hold(
    number: int, tier: ObjectTier, store: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = commit(tier)

    def deny(at: Location, data: bytes) -> None:
        raise StorageError(number, "create", str(at))

    monkeypatch.setattr(store, "create", deny)
    with tier.protect(path):
        assert len(there(store)) == 2


def test_a_mark_goes_after_a_week_with_what_came_late(tier: ObjectTier, store: Answers) -> None:
    path = commit(tier)
    assert tier.remove(path)
    late = path / with_attempt(container_name(1), "9f86d081")
    store.create(late, b"late")
    assert tier.debris() == [path]
    tier.sweep()
    assert there(store) == [f"{path.name}.ended"]
    store.age(WEEK - 1)
    tier.sweep()
    assert there(store) == [f"{path.name}.ended"]
    store.age(2)
    tier.sweep()
    assert there(store) == []


def test_a_long_run_finishes_its_deletions(tier: ObjectTier, store: Answers) -> None:
    """It sweeps once only, when it begins to save."""
    held, gone = commit(tier, 1), commit(tier, 2)
    assert tier.remove(gone)
    with tier.protect(held):
        store.create(held.with_name(f"{held.name}.ended"), b"")
        assert tier.remove(commit(tier, 3))
        assert manifest.open(held).step == 1
    store.age(WEEK + 1)
    assert tier.remove(last := commit(tier, 4))
    assert there(store) == sorted(f"{path.name}.ended" for path in (held, last))


def test_what_has_no_attempt_in_its_name_is_never_deleted(tier: ObjectTier, store: Answers) -> None:
    for name in ("step-00000001", "step-00000001.r1", "best"):
        begun = tier.pending(ROOT / name).begin()
        store.create(begun.file(container_name(0)), b"state")
        if name != "best":
            begun.commit(made(tier, begun))
    commit(tier)
    before = there(store)
    store.age(9 * DAY)
    tier.sweep()
    sweep_beside(ROOT / "best")
    retention.retain(tier, Keep(last=1))
    with tier.protect(ROOT / "step-00000001"):
        assert there(store) == before


def test_debris_is_fenced_then_removed(tier: ObjectTier, store: Answers) -> None:
    dead = write(tier)
    key = f"{dead.path('').name}/manifest.json"
    store.age(DAY - 1)
    assert tier.debris() == []
    store.age(2)
    assert tier.debris() == [dead.path("")]
    tier.sweep()
    assert there(store) == [key]
    with pytest.raises(CommitError, match="a clean-up or another process gave it up first"):
        dead.commit(made(tier, dead))
    dead.abandon()
    store.create(dead.path("late"), b"")
    store.age(WEEK)
    tier.sweep()
    assert there(store) == [key], "it was not alone"
    tier.sweep()
    assert there(store) == []


def test_a_sweep_leaves_what_is_committed_meanwhile(tier: ObjectTier, store: Answers) -> None:
    slow = write(tier)
    store.age(DAY + 1)
    (remove,) = tier._left(tier._now())[0].values()
    path = slow.commit(made(tier, slow))
    remove()
    assert newest.find(newest.Given(ObjectTier(ROOT))) == path
    assert len(there(store)) == 2


# --- listing


def test_manifests_are_read_once(tier: ObjectTier, store: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [commit(tier, step) for step in (2, 1, 2)]
    write(tier, 3).path("")
    store.create(ROOT / "step-00000004.0123abcd" / manifest.FILE, FENCE)
    other = ObjectTier(ROOT)
    found = other.checkpoints()
    assert [one.path for one in newest.in_order(found)] == paths
    reads: list[Location] = []
    monkeypatch.setattr(store, "read", lambda path, *_: reads.append(path))
    monkeypatch.setattr(store, "look", lambda path: None)
    assert other.checkpoints(known=True) == other.checkpoints() == found
    assert tier.checkpoints(known=True) == found
    assert reads == []


def test_a_manifest_that_cannot_be_read_is_an_entry(tier: ObjectTier, store: Answers) -> None:
    commit(tier, 1)
    path = commit(tier, 2)
    store.replace(path / manifest.FILE, b"{}")
    other = ObjectTier(ROOT)
    assert [one.sequence for one in other.checkpoints()] == [1, None]
    assert run.next_sequence(other) == 3
    with pytest.raises(ds.DatastatesError, match="not a manifest"):
        manifest.open(path)


def test_on_a_tie_the_attempt_decides(tier: ObjectTier, store: Answers) -> None:
    for attempt in ("bbbbbbbb", "aaaaaaaa"):
        begun = write(tier, 1, attempt)
        begun.commit(made(tier, begun).model_copy(update={"sequence": 5}))
    assert [one.attempt for one in newest.in_order(tier.checkpoints()[::-1])] == ["aaaaaaaa", "bbbbbbbb"]


def test_ls_shows_checkpoints_and_debris(tier: ObjectTier, store: Answers, capsys: pytest.CaptureFixture[str]) -> None:
    dead = write(tier)
    store.age(DAY + 1)
    gone, path = commit(tier, 2), commit(tier, 3)
    with tier.protect(gone):
        store.create(gone.with_name(f"{gone.name}.ended"), b"")
    store.create(ROOT / "step-00000004.0123abcd" / manifest.FILE, FENCE)
    write(tier, 5)
    tier.opening(tier.begin_opening()).begin_to_save()
    with tier.protect(path):
        _, listed = run_json(capsys, "ls", str(ROOT))
    assert [one["name"] for one in listed["checkpoints"]] == [path.name]
    assert listed["debris"] == sorted([dead.path("").name, gone.name])
    assert listed["without_manifest"] == listed["others"] == []


# --- what several ranks wrote is read


def copied(source: Path, root: Location) -> Location:
    """A checkpoint of a directory as one in a store of objects."""
    opened = manifest.open(Location(source))
    new = root / f"step-{opened.step:08d}.{opened.attempt}"

    def named(entry: Any) -> Any:
        return entry and entry.model_copy(update={"file": with_attempt(entry.file, opened.attempt)})

    other = {"containers": tuple(map(named, opened.containers)), "catalog": named(opened.catalog)}
    for path, _ in manifest.files_of(Location(source), opened):
        store_of(new).create(new / with_attempt(path.name, opened.attempt), Path(path).read_bytes())
    store_of(new).create(new / manifest.FILE, manifest.encode(Manifest(**{**dict(opened), **other})))
    return new


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_is_read_under_a_hold(
    ranks: int, store: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def save(rank: int) -> None:
        providers = [HostTensorProvider("part", {f"of {rank}": np.full(1000, rank)})]
        ds.snapshot(providers, tmp_path / "both", rank=rank, world_size=ranks, step=3).wait_committed()

    each(save, range(ranks), 2)
    path = copied(tmp_path / "both", ROOT)
    tier = ObjectTier(ROOT)
    for given in (ROOT, path):
        with ds.open(str(given)) as checkpoint:
            assert [int(checkpoint[f"part/of {rank}"][5]) for rank in range(ranks)] == [*range(ranks)]
            assert not tier.remove(path)
        live = HostTensorProvider("part", {f"of {rank}": np.zeros(1000, int) for rank in range(ranks)})
        ds.restore([live], str(given))
        assert [int(live.tensors()[f"of {rank}"][9]) for rank in range(ranks)] == [*range(ranks)]
        assert ds.load(str(given))["part"].keys() == live.tensors().keys()
    _, shown = run_json(capsys, "inspect", str(path / container_name(0, path.name[-8:])))
    assert shown["containers"][0]["step"] == 3
    assert not any("hold" in name for name in there(store))
    assert tier.remove(path)
    with pytest.raises(CheckpointNotFoundError):
        ds.load(str(path))


def test_a_container_of_another_attempt_is_no_ranks(store: Answers, tmp_path: Path) -> None:
    fields = {"format": 2, "step": 1, "sequence": 1, "attempt": "9f86d081", "created": "", "world_size": 2}
    for attempts, catalog in ((["", ""], "catalog.bin"), (["9f86d081"] * 2, "catalog.9f86d081.bin")):
        entries = tuple(
            ContainerEntry(file=container_name(rank, attempt), rank=rank, nbytes=1, index_crc32=0)
            for rank, attempt in enumerate(attempts)
        )
        for name in ("catalog.bin", "catalog.9f86d081.bin", "catalog.0123abcd.bin"):
            described = manifest.CatalogEntry(file=name, nbytes=1, head_crc32=0)
            if (name == catalog) or (name == "catalog.0123abcd.bin" and catalog == "catalog.bin"):
                Manifest(**fields, containers=entries, catalog=described)
                continue
            with pytest.raises(ValueError, match="named by its rank"):
                Manifest(**fields, containers=entries, catalog=described)
