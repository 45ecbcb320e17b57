"""Which checkpoints are outdated: the choice from a list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
from object_place import ROOT, SHORT, Answers, commit

import datastates as ds
from datastates.commit import manifest, retention
from datastates.commit.object_tier import ObjectTier
from datastates.commit.tier import Committed
from datastates.commit.tiers import tier_of
from datastates.kept import Keep
from datastates.providers import HostTensorProvider
from datastates.storage import Location

WHOLE, DAMAGED, UNREADABLE, LINK = "whole", "damaged", "unreadable", "link"


class One(NamedTuple):
    """A checkpoint for a list that is in the order of age."""

    step: int
    metric: float | None = None
    state: str = WHOLE


def outdated(every: Sequence[One], keep: Keep) -> tuple[list[int], list[int]]:
    """The places of the outdated ones in a list, and of those that were looked at."""
    listed = [
        Committed(
            sequence=None if one.state == UNREADABLE else at + 1,
            step=one.step,
            revision=at,
            attempt="",
            path=Location(f"/run/{at}"),
            changed=at + 1,
            metric=None if one.state == UNREADABLE else one.metric,
        )
        for at, one in enumerate(every)
    ]
    looks: list[int] = []

    def is_whole(one: Committed) -> bool:
        looks.append(int(one.path.name))
        return every[looks[-1]].state != DAMAGED

    found = retention.outdated_of(listed[::-1], keep, is_whole, lambda one: every[int(one.path.name)].state == LINK)
    return [int(one.path.name) for one in found], looks


def reference(every: Sequence[One], keep: Keep) -> list[int]:
    """The same, from what is said of each checkpoint alone: those that count before it, and how many."""

    def is_superseded(at: int) -> bool:
        later = every[at + 1 :]
        return every[at].state != LINK and any(o.step == every[at].step and o.state == WHOLE for o in later)

    def is_better(one: One, than: One) -> bool:
        assert one.metric is not None
        assert than.metric is not None
        return one.metric < than.metric if keep.mode == "min" else one.metric > than.metric

    def is_kept(at: int) -> bool:
        one = every[at]
        counting = [(i, o) for i, o in enumerate(every) if o.state == WHOLE and not is_superseded(i)]
        if one.state == LINK or (keep.last, keep.best) == (None, None):
            return True
        if sum(i > at for i, _ in counting) < (keep.last or 1) or (keep.every and one.step % keep.every == 0):
            return True
        if keep.best is None or one.metric is None or one.state == UNREADABLE:
            return False
        measured = [(i, o) for i, o in counting if o.metric is not None]
        return sum(is_better(o, one) or (not is_better(one, o) and i > at) for i, o in measured) < keep.best

    superseded = [at for at in range(len(every)) if is_superseded(at)]
    return superseded + [at for at in range(len(every)) if at not in superseded and not is_kept(at)]


KEEPS = [
    *(Keep(last, every) for last, every in product((None, 1, 2), (None, 2))),
    *(Keep(last, every, best) for last, every, best in product((None, 1, 2), (None, 2), (1, 2))),
    Keep(best=1, mode="max"),
]
ONES = [
    *(One(0, metric, state) for metric, state in product((None, 1.0, 2.0), (WHOLE, DAMAGED))),
    *(One(0, 1.0, state) for state in (UNREADABLE, LINK)),
]


@pytest.mark.parametrize("steps", [(1, 2, 3), (2, 1, 2), (3, 3, 3)], ids=str)
def test_it_is_what_is_said_of_each(steps: tuple[int, ...]) -> None:
    for keep, ones in product(KEEPS, product(ONES, repeat=len(steps))):
        every = [one._replace(step=step) for one, step in zip(ones, steps, strict=True)]
        found, looks = outdated(every, keep)
        assert found == reference(every, keep), (keep, every)
        assert max(Counter(looks).values(), default=0) <= 1


METRICS = (3.0, 1.0, None, 2.0, 1.0, 4.0)


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (Keep(best=1), [4, 5]),
        (Keep(best=2), [1, 4, 5]),
        (Keep(best=3), [1, 3, 4, 5]),
        (Keep(best=9), [0, 1, 3, 4, 5]),
        (Keep(best=1, mode="max"), [5]),
        (Keep(best=2, mode="max"), [0, 5]),
        (Keep(last=4, best=1), [2, 3, 4, 5]),
        (Keep(last=1, every=3, best=1), [0, 3, 4, 5]),
    ],
    ids=str,
)
def test_the_best_stay_beside_the_newest(keep: Keep, kept: list[int]) -> None:
    every = [One(step, metric) for step, metric in enumerate(METRICS)]
    found, _ = outdated(every, keep)
    assert sorted({*range(len(every))} - {*found}) == kept


def test_no_more_is_looked_at_than_is_needed() -> None:
    every = [One(step, metric) for step, metric in enumerate(METRICS)]
    assert outdated(every, Keep(best=2)) == ([0, 2, 3], [5, 4, 1])
    assert outdated(every, Keep(last=2, best=2)) == ([0, 2, 3], [5, 4, 1])
    assert outdated(every, Keep(last=5, every=1, best=2))[1] == [5, 4, 3, 2, 1]
    assert outdated(every, Keep(last=6, best=1)) == ([], [])
    assert outdated(every, Keep()) == ([], [])
    every[4] = every[4]._replace(state=DAMAGED)
    assert outdated(every, Keep(best=2)) == ([0, 2], [5, 4, 1, 3])


def test_what_a_store_holds_is_looked_at_once(
    tier: ObjectTier, store: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step, metric in enumerate(METRICS):
        commit(tier, step, metric=metric)
    real, looked = retention.health.problem, []

    def problem(path: Location) -> str | None:
        looked.append(int(path.name[5:13]))
        return real(path)

    monkeypatch.setattr(retention.health, "problem", problem)
    other = ObjectTier(ROOT, SHORT)
    for _ in range(2):
        retention.retain(other, Keep(best=2))
    assert [one.step for one in other.checkpoints()] == [1, 4, 5]
    assert sorted(looked) == [1, 4, 5]


def test_a_manifest_that_is_garbled_once_does_not_pass_for_the_newest(
    tier: ObjectTier, store: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place in the order is a guess. It is whole when its files are looked at, a moment later."""
    paths = [commit(tier, step) for step in (1, 2, 3)]
    real, garbled = store.read, list[Location]()

    def flip(path: Location, offset: int, nbytes: int) -> bytes:
        data = real(path, offset, nbytes)
        if path != paths[0] / manifest.FILE or garbled:
            return data
        garbled.append(path)
        return bytes([data[0] ^ 1]) + data[1:]

    monkeypatch.setattr(store, "read", flip)
    other = ObjectTier(ROOT, SHORT)
    retention.retain(other, Keep(last=1))
    assert [one.path for one in other.checkpoints()] == [paths[0], paths[2]]
    retention.retain(other, Keep(last=1))
    assert [one.path for one in other.checkpoints()] == paths[2:]


def test_what_is_committed_while_it_looks_is_deleted_only_if_nobody_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots may be committed in another order than they were taken."""
    for step in (1, 2):
        ds.snapshot([HostTensorProvider("a", {})], tmp_path / f"step-{step:08d}", step=step).wait_committed()
    tier = tier_of(Location(tmp_path))
    lists = [every := tier.checkpoints(), every[1:]]
    monkeypatch.setattr(tier, "checkpoints", lambda **words: lists.pop() if len(lists) > 1 else lists[0])
    retention.retain(tier, Keep(last=1), stay=lambda every: [one.path for one in every])
    retention.retain(tier, Keep(last=1), stay=lambda every: [one.path for one in every])
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000002"]
