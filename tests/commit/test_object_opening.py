"""Runs that save in one place in a store of objects fence each other, and try the store first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from aged_store import AgedStore
from object_place import (
    ROOT,
    Answers,
    commit,
    made,
    there,
)

import datastates as ds
from datastates.commit import object_opening
from datastates.commit.object_tier import ObjectTier
from datastates.errors import FencedError, StorageError, UncertainError
from datastates.storage import Location, register

# --- openings


def opened(tier: ObjectTier, owner: str, monkeypatch: pytest.MonkeyPatch) -> object_opening.ObjectOpening:
    monkeypatch.setattr(object_opening, "owner_of", lambda process: owner)
    return tier.opening(tier.begin_opening())


def test_a_newer_run_fences(tier: ObjectTier, store: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (opened(tier, owner, monkeypatch) for owner in "ab")
    swept: list[int] = []
    first.begin_to_save(lambda: swept.append(1))
    first.begin_to_save(lambda: swept.append(2))
    assert swept == [1]
    second.begin_to_save()  # it was opened at the same time, and is newer
    assert [name for name in there(store) if "saving" in name] == [".saving-2"]
    second.refuse_if_fenced()
    with pytest.raises(FencedError, match=r"a newer run saves in mem://bucket/run: process \d+ on host"):
        first.refuse_if_fenced()
    with pytest.raises(FencedError, match="a newer run saves"):
        first.begin_to_save()
    assert opened(tier, "c", monkeypatch)._number == 3


def test_a_fenced_run_deletes_nothing(tier: ObjectTier, store: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    other = ObjectTier(ROOT)
    first = opened(tier, "a", monkeypatch)
    first.begin_to_save()
    path = commit(tier)
    opened(other, "b", monkeypatch).begin_to_save()
    with pytest.raises(FencedError, match="a newer run saves"):
        tier.remove(path)
    assert other.remove(path)


def test_openings_of_one_process_do_not_fence_each_other(tier: ObjectTier, store: Answers) -> None:
    one, two = tier.opening(tier.begin_opening()), tier.opening(tier.begin_opening())
    for opening in (one, two, tier.opening(tier.begin_opening()), one):
        opening.begin_to_save()
    for opening in (one, two):
        opening.refuse_if_fenced()


class Overwriting(AgedStore):
    def create(self, path: Location, data: bytes) -> None:
        self.replace(path, data)


class Unlisted(AgedStore):
    def entries(self, folder: Location, *, deep: bool = False) -> dict[str, ds.storage.Entry]:
        return {name: entry for name, entry in super().entries(folder, deep=deep).items() if ".trial-" not in name}


class Unclear(AgedStore):
    def __init__(self, times: int) -> None:
        super().__init__()
        self._left = times

    def create(self, path: Location, data: bytes) -> None:
        super().create(path, data)
        with self._lock:
            self._left -= 1
            told = self._left < 0
        if not told:
            raise UncertainError(0, "create", str(path), "400 Bad Request")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            Overwriting,
            "mem://bucket/run: the store does not keep its promise: of 5 creates of one object, 5 succeeded",
        ),
        (Unlisted, "does not keep its promise: a list lacks an object that was created"),
        (lambda: Unclear(100), "did not tell whether it makes an object once only, in 5 trials: 400 Bad Request"),
    ],
    ids=["overwrites", "unlisted", "unclear"],
)
def test_a_store_that_breaks_its_promise_is_refused(
    kind: Callable[[], AgedStore], text: str, store: Answers, tmp_path: Path
) -> None:
    register("mem", bad := kind())
    tier = ObjectTier(ROOT)
    opening = tier.opening(tier.begin_opening())
    for _ in range(2):
        with pytest.raises(StorageError, match=text):
            opening.begin_to_save()
    begun = tier.pending(ROOT / "best").begin()
    with pytest.raises(StorageError, match=text):
        begun.commit(made(tier, begun))
    assert bad._objects == {}


def test_a_trial_is_made_once_and_again_where_an_answer_was_lost(store: Answers) -> None:
    register("mem", slow := Unclear(1))
    tier, left = ObjectTier(ROOT), []
    for _ in range(2):
        tier.opening(tier.begin_opening()).begin_to_save()
        left.append(slow._left)
    assert left == [-2, -3]
