"""In whatever order a writer names a kept container that is there, and others delete what names it, none lacks data.

And each rule is needed: without it, a listed checkpoint lacks its kept container.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from interleavings import DAY, Interleavings, Script, State

from datastates.commit import manifest, object_kept
from datastates.commit.decision import Patience
from datastates.commit.manifest import FENCE, CatalogEntry, ContainerEntry, Manifest, container_name, kept_name
from datastates.commit.names import kept_folder
from datastates.commit.object_kept import KeptFolders
from datastates.commit.object_pending import ObjectPending
from datastates.commit.object_tier import ObjectTier
from datastates.errors import CommitError, StorageError
from datastates.storage import Location

ROOT = Location("mem://bucket/run")
FIRST, SECOND = "9f86d081", "0a1b2c3d"
FOLDER = ROOT / kept_folder(1, FIRST)
KEPT = FOLDER / kept_name(0)
PATIENCE = Patience(commit=1, fence=0, pause=1, longest=1)


def made(step: int, attempt: str) -> Manifest:
    """A checkpoint of one rank that names the kept container of the first one."""
    own = ContainerEntry(file=container_name(0, attempt), rank=0, nbytes=5, index_crc32=0)
    kept = {"step": 1, "attempt": FIRST, "folder": FOLDER.name}
    return Manifest(
        format=3,
        step=step,
        sequence=step,
        attempt=attempt,
        created="",
        world_size=1,
        containers=(own, ContainerEntry(file=KEPT.name, rank=0, nbytes=5, index_crc32=0, **kept)),
        catalog=CatalogEntry(file=f"catalog.{attempt}.bin", nbytes=5, head_crc32=0),
    )


THERE = {
    str(KEPT): b"state",
    str(ROOT / f"step-00000001.{FIRST}" / container_name(0, FIRST)): b"state",
    str(ROOT / f"step-00000001.{FIRST}" / manifest.FILE): manifest.encode(made(1, FIRST)),
}
"""The first checkpoint."""


class Actors:
    def __init__(self, store: Script, pending: type[ObjectPending] = ObjectPending) -> None:
        self.store, self._pending = store, pending

    def writer(self) -> None:
        """Saves a checkpoint that has the kept container of the first one."""
        tier = ObjectTier(ROOT, PATIENCE)
        begun = self._pending(tier, ROOT / "step-00000002", SECOND, b"").begin()
        try:
            begun.link(KEPT)
            self.store.replace(begun.file(container_name(0)), b"state")
            begun.commit(made(2, SECOND))
        except (CommitError, StorageError):
            self.store.say("in full")

    def deleter(self) -> None:
        """Deletes the first checkpoint, and sweeps twice."""
        tier = ObjectTier(ROOT, PATIENCE)
        for call in (lambda: tier.remove(ROOT / f"step-00000001.{FIRST}"), tier.sweep, tier.sweep):
            with contextlib.suppress(StorageError):  # an answer was lost
                call()

    def drain(self) -> None:
        """Brings a checkpoint of another tier, whose kept container bears the name of the first one."""
        tier = ObjectTier(ROOT, PATIENCE)
        begun = ObjectPending(tier, ROOT / "step-00000002", SECOND, b"").begin()
        file = begun.kept(KEPT.name, 1, FIRST)
        with contextlib.suppress(CommitError, StorageError):
            if not self.store.is_file(file):
                self.store.replace(file, b"state")
            self.store.replace(begun.file(container_name(0)), b"state")
            brought = made(2, SECOND)
            if file != KEPT:
                entry = brought.containers[1].model_copy(update={"folder": file.parent.name})
                brought = brought.model_copy(update={"containers": (brought.containers[0], entry)})
            begun.commit(brought)

    def sweeps(self) -> None:
        for _ in range(2):
            with contextlib.suppress(StorageError):
                ObjectTier(ROOT, PATIENCE).sweep()

    def other_sweep(self) -> None:
        ObjectTier(ROOT, PATIENCE).sweep()


def lacks(state: State) -> bool:
    """Whether a listed checkpoint lacks its kept container."""
    there = {name: data for name, data, _ in state.objects}
    for path in (ROOT / f"step-00000001.{FIRST}", ROOT / f"step-00000002.{SECOND}"):
        data = there.get(str(path / manifest.FILE), FENCE)
        if data != FENCE and f"{path}.ended" not in there:
            named, _ = manifest.files_of(path, manifest.decode(data, ""))[1]
            if str(named) not in there:
                return True
    return False


def states(script: Script, actors: Actors, faults: int = 0) -> Iterator[State]:
    return Interleavings(
        script,
        {name: getattr(actors, name) for name in ("writer", "deleter")},
        faults=faults,
        decides=lambda name: name.endswith((manifest.FILE, ".ended")),
        passes=(2 * DAY, 9 * DAY),
        objects=THERE,
    ).states()


@pytest.mark.parametrize("faults", [0, pytest.param(1, marks=pytest.mark.by_hand)])
def test_no_checkpoint_lacks_what_it_names(faults: int, script: Script) -> None:
    seen = [(lacks(state), state) for state in states(script, Actors(script), faults)]
    assert not any(is_lacking for is_lacking, _ in seen)
    assert len(seen) > 1000
    ends = [{name for name, _, _ in state.objects} for _, state in seen if set(state.at) == {-1}]
    assert any(str(KEPT) not in there for there in ends)  # and it goes, where nobody names it
    assert any(str(ROOT / f"step-00000002.{SECOND}" / manifest.FILE) in there for there in ends)


MARKED = {str(KEPT): b"state", f"{FOLDER}.ended": b"ended\n"}
"""What nobody names, behind its mark."""


def drained(script: Script, names: str) -> Iterator[State]:
    actors = Actors(script)
    return Interleavings(
        script,
        {name: getattr(actors, name) for name in names.split()},
        decides=lambda name: False,
        passes=(9 * DAY,),
        objects=MARKED,
    ).states()


def test_a_drain_takes_no_name_that_others_may_still_clear(script: Script) -> None:
    seen = list(drained(script, "drain sweeps other_sweep"))
    assert not any(map(lacks, seen))
    assert any(str(KEPT) not in {name for name, _, _ in state.objects} for state in seen)


def test_the_mark_must_outlast_what_is_cleared(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_kept, "end_again", lambda folder: None)
    assert any(map(lacks, drained(script, "drain sweeps other_sweep")))


class LooksForNoMark(ObjectPending):
    """Names what is there without a look for its mark."""

    def link(self, kept: Location) -> Location:
        return kept


RULES: dict[str, tuple[type[ObjectPending], Callable[[pytest.MonkeyPatch], Any]]] = {
    "who names a container looks for its mark": (LooksForNoMark, lambda patch: None),
    "behind a mark others have time to commit": (
        ObjectPending,
        lambda patch: patch.setattr(object_kept, "LOOKED", -1),
    ),
    "an attempt ends": (ObjectPending, lambda patch: patch.setattr(ObjectPending, "_is_in_time", lambda self: True)),
    "what is named stays": (
        ObjectPending,
        lambda patch: patch.setattr(KeptFolders, "_named_by", lambda self, name: frozenset()),
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_needed(rule: str, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    pending, change = RULES[rule]
    change(monkeypatch)
    assert any(map(lacks, states(script, Actors(script, pending))))
