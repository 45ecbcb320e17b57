"""A checkpoint in a store of objects is committed by its manifest, whatever answers are lost."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from aged_store import AgedStore
from object_place import (
    DENIED,
    DROPPED,
    LOST,
    MADE,
    ROOT,
    SHORT,
    Answers,
    commit,
    made,
    there,
    write,
)

from datastates.commit import manifest, newest, object_pending
from datastates.commit.manifest import FENCE, container_name
from datastates.commit.object_tier import ObjectTier
from datastates.errors import CheckpointNotFoundError, CommitError, StorageError, UncertainError
from datastates.storage import Location

# --- the commit


@pytest.mark.parametrize(
    "said", [[MADE], [LOST], [DROPPED, MADE], [DROPPED, DROPPED, LOST], [DROPPED, DENIED, MADE]], ids="-".join
)
def test_what_was_created_is_committed(said: list[str], store: Answers) -> None:
    tier = ObjectTier(ROOT, SHORT._replace(commit=60, pause=0))
    store.said = said
    path = commit(tier)
    assert newest.find(newest.Given(ObjectTier(ROOT))) == path


def test_the_formats_page_has_a_fences_bytes() -> None:
    page = Path(__file__).parents[2] / "docs" / "format.md"
    assert f"`{FENCE.decode()[:-1]}` and a line feed" in page.read_text()


def test_a_denial_is_told_at_once(tier: ObjectTier, store: Answers) -> None:
    begun = write(tier)
    store.said = [DENIED]
    with pytest.raises(StorageError, match="Permission denied"):
        begun.commit(made(tier, begun))
    begun.abandon()
    assert there(store) == []


def test_what_is_given_up_never_appears(tier: ObjectTier, store: Answers) -> None:
    begun = write(tier)
    wanted = made(tier, begun)
    tier.patience = SHORT._replace(commit=0)
    store.said = [DROPPED, MADE]
    with pytest.raises(CommitError, match=r"never will be: the store did not tell.*the connection was closed"):
        begun.commit(wanted)
    store.said = [MADE]
    with pytest.raises(StorageError, match="File exists"):  # it comes late
        store.create(begun.path(manifest.FILE), manifest.encode(wanted))
    begun.abandon()
    assert there(store) == [f"{begun.path(manifest.FILE).parent.name}/manifest.json"]
    assert tier.checkpoints() == tier.debris() == []
    with pytest.raises(CheckpointNotFoundError, match="says that none will be here"):
        manifest.open(begun.path(""))


def test_a_create_that_comes_late_commits(tier: ObjectTier, store: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = write(tier)
    wanted = made(tier, begun)
    tier.patience = SHORT._replace(commit=0)
    store.said = [DROPPED, MADE]
    real, tries = store.create, []

    def create(path: Location, data: bytes) -> None:
        tries.append(data)
        if data == FENCE:
            AgedStore.create(store, path, tries[0])  # the first one, by a slow way
        real(path, data)

    monkeypatch.setattr(store, "create", create)
    assert begun.commit(wanted) == newest.find(newest.Given(ObjectTier(ROOT)))


def test_without_any_answer_nothing_is_removed(tier: ObjectTier, store: Answers) -> None:
    begun = write(tier)
    store.said = [DROPPED]
    with pytest.raises(UncertainError, match=r"may be committed, now or later, or not.*closed"):
        begun.commit(made(tier, begun))
    begun.abandon()
    assert len(there(store)) == 1
    assert tier.of_attempt(begun.target, begun.attempt) is None


def test_an_attempt_that_another_process_commits_is_committed(tier: ObjectTier, store: Answers) -> None:
    first, second = write(tier, 1, "9f86d081"), tier.pending(ROOT / "step-00000001", "9f86d081", b"").begin()
    second.file(container_name(0))
    wanted = made(tier, first)
    assert first.commit(wanted) == second.commit(wanted.model_copy(update={"sequence": 7}))
    with pytest.raises(CommitError, match="another attempt's"):
        second.commit(
            wanted.model_copy(update={"containers": (wanted.containers[0].model_copy(update={"nbytes": 6}),)})
        )
    second.abandon()
    assert len(there(store)) == 2
    assert len(tier.checkpoints()) == 1


def test_beside_a_manifest_that_cannot_be_read_nothing_is_removed(tier: ObjectTier, store: Answers) -> None:
    begun = write(tier)
    wanted = made(tier, begun)
    store.replace(begun.path(manifest.FILE), b"{}")
    with pytest.raises(CommitError, match="another attempt's"):
        begun.commit(wanted)
    begun.abandon()
    assert len(there(store)) == 2


def test_an_old_attempt_is_not_committed(tier: ObjectTier, store: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = write(tier)
    begin = object_pending.now()
    monkeypatch.setattr(object_pending, "now", lambda: begin + 13 * 3600)
    with pytest.raises(CommitError, match="12 hours"):
        begun.commit(made(tier, begun))
    begun.abandon()
    assert there(store) == [f"{begun.path('').name}/manifest.json"]


def test_a_catalog_that_an_answer_was_lost_of(
    tier: ObjectTier, store: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, real = write(tier), AgedStore.create

    def lost(self: AgedStore, path: Location, data: bytes) -> None:
        real(self, path, data)
        raise StorageError(errno.EEXIST, "create", str(path))

    monkeypatch.setattr(AgedStore, "create", lost)
    assert begun.add("catalog.bin", b"all").name == f"catalog.{begun.attempt}.bin"
    monkeypatch.setattr(AgedStore, "create", real)
    with pytest.raises(CommitError, match="another attempt"):
        begun.add("catalog.bin", b"else")
