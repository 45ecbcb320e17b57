"""In whatever order writers, a sweeper, a deleter and a reader ask a store of objects, four promises hold.

- No listed manifest lacks data.
- No reader that holds a checkpoint loses data.
- What was said to have failed is never listed.
- What was said to be committed stays listed until its deletion has begun.

And each rule is needed: without it, one of these breaks.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from interleavings import DAY, Interleavings, Script, State
from short import first

from datastates.commit import manifest, object_pending, object_tier
from datastates.commit.decision import Patience, decide
from datastates.commit.manifest import FENCE, ContainerEntry, Manifest, container_name
from datastates.commit.object_pending import ObjectPending
from datastates.commit.object_tier import ObjectTier
from datastates.errors import CheckpointNotFoundError, CommitError, StorageError, UncertainError
from datastates.storage import Location, store_of

ROOT = Location("mem://bucket/run")
ATTEMPT = "9f86d081"
TARGET = ROOT / "step-00000001"
PATH = ROOT / f"step-00000001.{ATTEMPT}"
KEY = str(PATH / manifest.FILE)
DATA = str(PATH / container_name(0, ATTEMPT))
ENDED = f"{PATH}.ended"
PATIENCE = Patience(commit=1, fence=0, pause=1, longest=1)
"""A manifest is tried twice, all else once."""


def made(sequence: int) -> Manifest:
    container = ContainerEntry(file=container_name(0, ATTEMPT), rank=0, nbytes=5, index_crc32=0)
    fields = {"format": 2, "step": 1, "sequence": sequence, "attempt": ATTEMPT, "created": "", "world_size": 1}
    return Manifest(**fields, containers=(container,))


class Actors:
    """Those who use one place. ``tier`` and ``pending`` are the classes of the package, or ones that lack a rule."""

    def __init__(
        self, store: Script, tier: type[ObjectTier] = ObjectTier, pending: type[ObjectPending] = ObjectPending
    ) -> None:
        self.store, self._tier, self._pending = store, tier, pending

    def _begin(self) -> tuple[ObjectTier, ObjectPending]:
        tier = self._tier(ROOT, PATIENCE)
        begun = self._pending(tier, TARGET, ATTEMPT, b"").begin()
        self.store.replace(begun.file(container_name(0)), b"state")
        return tier, begun

    def writer(self, sequence: int = 1) -> None:
        _, begun = self._begin()
        try:
            begun.commit(made(sequence))
        except UncertainError:
            self.store.say("unknown")
            begun.leave()
        except CommitError:
            self.store.say("failed")
        else:
            self.store.say("committed")
            return
        begun.abandon()

    def other_writer(self) -> None:
        self.writer(2)

    def quitter(self) -> None:
        """A writer that fails before it commits."""
        self._begin()[1].abandon()

    def sweeper(self) -> None:
        with contextlib.suppress(StorageError):  # an answer was lost
            self._tier(ROOT, PATIENCE).sweep()

    def two_sweeps(self) -> None:
        self.sweeper()
        self.sweeper()

    def deleter(self) -> None:
        tier = self._tier(ROOT, PATIENCE)
        if tier.checkpoints():
            tier.remove(PATH)

    def reader(self) -> None:
        try:
            with self._tier(ROOT, PATIENCE).protect(PATH):
                try:
                    self.store.read_all(Location(DATA))
                except StorageError:
                    self.store.say("lost")
        except CheckpointNotFoundError:
            pass


LACKS, LOST, BACK, GONE = (
    "a listed manifest lacks data",
    "a reader lost data",
    "what had failed is listed",
    "what was committed has vanished",
)


def broken(state: State) -> set[str]:
    """The promises that a state breaks."""
    there = {name: data for name, data, _ in state.objects}
    words = {word for _, word in state.said}
    is_listed = there.get(KEY, FENCE) != FENCE and ENDED not in there
    breaks = {
        LACKS: is_listed and DATA not in there,
        LOST: "lost" in words,
        BACK: is_listed and "failed" in words,
        GONE: "committed" in words and not is_listed and ".ended" not in words,
    }
    return {promise for promise, is_broken in breaks.items() if is_broken}


def gone_through(script: Script, actors: Actors, names: str, **options: Any) -> Iterator[set[str]]:
    """The promises that each state breaks."""
    every = Interleavings(
        script,
        {name: getattr(actors, name) for name in names.split()},
        decides=lambda name: name == KEY,
        marks=".ended",
        **options,
    )
    return map(broken, every.states())


SMALL = "a deleter beside a reader"
SCENES = {
    "two writers and a sweeper": ("writer other_writer sweeper", {"faults": 2, "passes": (2 * DAY,)}),
    "a writer that gives up beside another": ("writer quitter sweeper", {"faults": 2, "passes": (2 * DAY,)}),
    "a writer and sweeps over weeks": ("writer two_sweeps", {"faults": 3, "passes": (2 * DAY, 8 * DAY)}),
    SMALL: ("writer deleter reader", {"faults": 1}),
    "a deletion that sweeps finish": ("writer deleter two_sweeps", {"faults": 2, "passes": (8 * DAY,)}),
    "two writers, a deleter and a reader": ("writer other_writer deleter reader", {"faults": 1}),
    "a reader, a deleter and a sweeper": ("writer deleter reader sweeper", {"faults": 1, "passes": (DAY,)}),
}


@pytest.mark.parametrize("scene", [s if s == SMALL else pytest.param(s, marks=pytest.mark.by_hand) for s in SCENES])
def test_the_promises_hold(scene: str, script: Script) -> None:
    names, options = SCENES[scene]
    count = Counter(frozenset(breaks) for breaks in gone_through(script, Actors(script), names, **options))
    assert [*count] == [frozenset()]
    assert count.total() > 1000


class Hasty(ObjectPending):
    """Removes its files after a commit whose outcome it does not know."""

    def commit(self, made: Manifest, ready: Callable[[], None] = lambda: None) -> Location:
        files = list(self._files)
        try:
            return super().commit(made, ready)
        except UncertainError:
            store_of(PATH).discard(files)
            raise


class Alone(ObjectPending):
    """Removes its files as if no other process could commit them."""

    def abandon(self) -> None:
        self._is_alone = True
        super().abandon()


class Late(ObjectPending):
    """Reports that its time is up without a fence."""

    def commit(self, made: Manifest, ready: Callable[[], None] = lambda: None) -> Location:
        if not self._is_in_time():
            raise CommitError("too late")
        return super().commit(made, ready)


class Later(int):
    """The time when it is used."""

    tier: ObjectTier

    def __sub__(self, before: int) -> int:
        return ObjectTier._now(self.tier) - before


class ListsBeforeItsTime(ObjectTier):
    """Judges what it has listed by a later time."""

    def _now(self) -> int:
        now = Later()
        now.tier = self
        return now


class ListsFirst(ObjectTier):
    """Looks for holds before it makes the mark, not after."""

    def remove(self, path: Location) -> bool:
        if self._is_held(path.name, self.names(), self._now):
            return False
        decide(Location(ENDED), b"ended\n", 0, PATIENCE)
        self._clear(path)
        return True


class IgnoresHolds(ObjectTier):
    """Does not look for holds."""

    def _is_held(self, *words: object) -> bool:
        return False


class LooksFirst(ObjectTier):
    """Looks for the mark before it makes a hold."""

    @contextlib.contextmanager
    def protect(self, path: Location) -> Iterator[None]:
        if manifest.look(path) is None or store_of(path).is_file(Location(ENDED)):
            raise CheckpointNotFoundError
        self._hold(path)
        yield


Change = Callable[[pytest.MonkeyPatch], None]


def without_fences(module: ModuleType) -> Change:
    """Let fences be taken for made that are not made."""

    def unasked(path: Location, data: bytes, *rest: Any) -> bytes:
        return data if data == FENCE else decide(path, data, *rest)

    return lambda patch: patch.setattr(module, "decide", unasked)


RULES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a create overwrites nothing": ("two writers and a sweeper", BACK, {"overwrites": True}),
    "who gives up makes a fence": (
        "a writer and sweeps over weeks",
        BACK,
        {"change": without_fences(object_pending)},
    ),
    "a sweep makes a fence": (
        "two writers and a sweeper",
        LACKS,
        {"change": without_fences(object_tier)},
    ),
    "nothing is removed before its key was read": (
        "a writer and sweeps over weeks",
        LACKS,
        {"pending": Hasty},
    ),
    "who abandons an attempt that another may commit makes a fence": (
        "a writer that gives up beside another",
        LACKS,
        {"pending": Alone},
    ),
    "an attempt ends": (
        "a writer and sweeps over weeks",
        LACKS,
        {"change": lambda patch: patch.setattr(ObjectPending, "_is_in_time", lambda self: True)},
    ),
    "whose time is up makes a fence": ("two writers and a sweeper", BACK, {"pending": Late}),
    "a fence stays for a week": (
        "a writer and sweeps over weeks",
        BACK,
        {"change": lambda patch: patch.setattr(object_tier, "KEPT", -1)},
    ),
    "the mark comes before the list": (SMALL, LOST, {"tier": ListsFirst}),
    "who deletes looks for holds": (SMALL, LOST, {"tier": IgnoresHolds}),
    "the hold comes before the look": (SMALL, LOST, {"tier": LooksFirst}),
    "a list is judged by an earlier time": ("a deletion that sweeps finish", LACKS, {"tier": ListsBeforeItsTime}),
    "a mark stays for a week": (
        "a deletion that sweeps finish",
        LACKS,
        {"change": lambda patch: patch.setattr(object_tier, "KEPT", -1)},
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_needed(rule: str, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, promise, words = RULES[rule]
    words.get("change", lambda patch: None)(monkeypatch)
    names, options = SCENES[scene]
    actors = Actors(script, words.get("tier", ObjectTier), words.get("pending", ObjectPending))
    states = gone_through(script, actors, names, **options, overwrites="overwrites" in words)
    assert any(promise in breaks for breaks in states)


# --- a checkpoint of another tier, which a run and a process by hand bring

TWICE = "one checkpoint is listed twice"


class Drains(Actors):
    """Those who bring one checkpoint of another tier to the place, beside others."""

    def drain(self) -> None:
        tier = self._tier(ROOT, PATIENCE)
        for _ in range(2):
            try:
                found = tier.arriving(TARGET, ATTEMPT, b"")
                if not isinstance(found, Location):
                    self.store.replace(found.begin().named(container_name(0)), b"state")
                    found.commit(made(1))
            except (CommitError, StorageError):  # a later try goes on
                continue
            self.store.say("committed")
            return

    by_hand = drain

    def remover(self) -> None:
        tier = self._tier(ROOT, PATIENCE)
        for one in tier.checkpoints():
            tier.remove(one.path)


def broken_by_drains(state: State) -> set[str]:
    """The promises that a state breaks, under whatever name the checkpoint lies."""
    there = {name: data for name, data, _ in state.objects}
    keys = [name for name, data in there.items() if name.endswith("/manifest.json") and data != FENCE]
    listed = [path for path in (key.rpartition("/")[0] for key in keys) if f"{path}.ended" not in there]
    words = {word for _, word in state.said}
    breaks = {
        LACKS: any(f"{path}/{container_name(0, ATTEMPT)}" not in there for path in listed),
        GONE: "committed" in words and not listed and ".ended" not in words,
        TWICE: len(listed) > 1,
    }
    return {promise for promise, is_broken in breaks.items() if is_broken}


DRAINS = {
    "two drains": ("drain by_hand", {"faults": 2}),
    "two drains and a sweeper": ("drain by_hand sweeper", {"faults": 1, "passes": (2 * DAY,)}),
    "a drain and sweeps over weeks": ("drain two_sweeps", {"faults": 2, "passes": (2 * DAY, 8 * DAY)}),
    "two drains and a deleter": ("drain by_hand remover", {"faults": 1}),
}


def drained(script: Script, scene: str, tier: type[ObjectTier] = ObjectTier, **more: Any) -> Iterator[set[str]]:
    names, options = DRAINS[scene]
    drains = Drains(script, tier)
    actors = {name: getattr(drains, name) for name in names.split()}
    every = Interleavings(script, actors, decides=_is_key, marks=".ended", **options, **more)
    return map(broken_by_drains, every.states())


def _is_key(name: str) -> bool:
    return name.endswith("/manifest.json")


@pytest.mark.parametrize("scene", first(sorted(DRAINS, key="two drains".__ne__), rest=pytest.mark.by_hand))
def test_the_promises_of_drains_hold(scene: str, script: Script) -> None:
    count = Counter(frozenset(breaks) for breaks in drained(script, scene))
    assert [*count] == [frozenset()]


class LooksBeforeItsTime(ObjectTier):
    """Counts the time of an attempt from its begin, not from before the look at its key."""

    def arriving(self, target: Location, attempt: str, mark: bytes) -> Any:
        found = super().arriving(target, attempt, mark)
        if isinstance(found, ObjectPending):
            found._looked = None
        return found


@pytest.mark.by_hand
@pytest.mark.parametrize(
    ("scene", "words"),
    [
        ("a drain and sweeps over weeks", {"tier": LooksBeforeItsTime}),
        ("a drain and sweeps over weeks", {"change": lambda patch: patch.setattr(object_tier, "KEPT", -1)}),
        pytest.param("two drains and a sweeper", {"change": without_fences(object_tier)}, marks=pytest.mark.by_hand),
    ],
    ids=["the time counts from before the look", "a fence stays for a week", "a sweep makes a fence"],
)
def test_each_rule_of_drains_is_needed(
    scene: str, words: dict[str, Any], script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    words.get("change", lambda patch: None)(monkeypatch)
    assert any(LACKS in breaks for breaks in drained(script, scene, words.get("tier", ObjectTier)))
