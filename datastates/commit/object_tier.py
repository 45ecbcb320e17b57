"""The tier of a store of objects: creating a manifest commits, a mark announces a deletion, and a hold a reader.

Beside a checkpoint ``NAME`` lie ``NAME.ended``, once its deletion has begun, and ``NAME.hold.TOKEN`` for each reader. A
reader makes its hold before it looks for the mark, and who deletes makes the mark before it looks for holds. So one of
them sees the other. Only what has the name of an attempt is deleted.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from typing_extensions import override

from datastates._base import log
from datastates._base.tasks import each
from datastates.commit import manifest, object_kept, object_opening, object_pending
from datastates.commit.decision import DENIED, Patience, decide
from datastates.commit.manifest import FENCE, Manifest
from datastates.commit.names import BESIDE, ENDED, KEPT_FOLDER, OF_ATTEMPT, PASSING, STEP, mark_of
from datastates.commit.object_kept import MARKED, Deletions, KeptFolders
from datastates.commit.object_opening import ObjectOpening
from datastates.commit.object_pending import ObjectPending
from datastates.commit.tier import Committed, Tier, Uncommitted
from datastates.errors import CheckpointNotFoundError, FormatError, StorageError
from datastates.storage import Entry, Store, store_of
from datastates.storage.location import Location
from datastates.storage.objects import AT_ONCE, absent

_DAY = 86_400 * 10**9
HOLD = 2 * _DAY
"""Nanoseconds for which a hold counts."""
SWEEP = _DAY
"""Nanoseconds after which an attempt without a decision is taken for dead. See :attr:`Patience.attempt`."""
KEPT = 7 * _DAY
"""Nanoseconds for which a fence and a mark stay: a request that was sent before may arrive."""

_Now = Callable[[], int]


class ObjectTier(Tier):
    """The checkpoints below one place in a store of objects. See :class:`ObjectPending` for how one of them appears."""

    def __init__(self, root: Location, patience: Patience | None = None) -> None:
        """Remember the place; nothing is read yet."""
        super().__init__(root)
        self.patience = patience or Patience()
        self.whole = set()
        self._known: dict[str, Committed | None] = {}  # None: fenced
        self._under_way: set[str] = set()
        self._openings: list[ObjectOpening] = []
        self._sharing = _Sharing()
        self._kept = KeptFolders(root)

    # --- listing

    def names(self, *, anew: bool = False) -> dict[str, Entry]:
        """What lies in the place; within :meth:`listed_once`, as this thread has listed it, unless ``anew``."""
        if anew or self._sharing.names is None:
            found = store_of(self.root).entries(self.root)
            if self._sharing.depth:
                self._sharing.names = found
            return found
        return self._sharing.names

    @override
    @contextlib.contextmanager
    def listed_once(self) -> Iterator[None]:
        self._sharing.depth += 1
        try:
            yield
        finally:
            self._sharing.depth -= 1
            if not self._sharing.depth:
                self._sharing.names = None

    @override
    def checkpoints(self, *, certain: bool = False, known: bool = False) -> list[Committed]:
        names = self.names()
        steps = sorted(n for n, e in names.items() if e.kind == "folder" and STEP.match(n) and n + ENDED not in names)
        under_way = self._under_way.copy() if known else set()
        new = [n for n in steps if n not in under_way and not (n in self._known and (known or _attempt(n)))]
        looked = dict(zip(new, each(partial(self._look, certain=certain), new, AT_ONCE), strict=True))
        absent = {n for n, one in looked.items() if one is None and n not in self._known}
        if absent and not known and self._lacks(absent):
            return self.checkpoints(certain=certain)  # a run has deleted one meanwhile, and may have committed a newer
        every = {n: looked[n] if n in looked else self._known.get(n) for n in steps}
        return [one for one in every.values() if one is not None]

    def _lacks(self, absent: set[str]) -> bool:
        """Whether some of what was listed has been deleted since."""
        names = self.names(anew=True)
        return any(name not in names or name + ENDED in names for name in absent)

    def _look(self, name: str, *, certain: bool) -> Committed | None:
        """Look at one checkpoint; None if it is none. What cannot change is known from then on."""
        path, match = self.root / name, STEP.match(name)
        assert match is not None
        facts = manifest.Facts()
        try:
            with contextlib.suppress(FormatError):  # reported to whoever opens it, as other errors are
                facts = _facts(store_of(path), path) if _attempt(name) else _facts_of_copy(path)
        except CheckpointNotFoundError as error:
            if isinstance(error, manifest.DecidedAgainstError):
                self._known[name] = None
            return None
        except StorageError:
            if certain:
                raise
        found = Committed(facts.sequence, int(match[1]), int(match[2] or 0), facts.attempt, path, 0, facts.metric)
        if found.sequence is not None:
            self._known[name] = found
        return found

    @override
    def hidden(self) -> set[str]:
        with self.listed_once():
            listed = {one.path.name for one in self.checkpoints(known=True)}
            return {name for name in self.names() if _attempt(name)} - listed

    def begun(self, one: ObjectPending) -> None:
        """A checkpoint is under way: lists need not look at it."""
        self._under_way.add(one.directory.name)

    def ended(self, one: ObjectPending, made: Manifest | None = None) -> None:
        """A checkpoint is under way no more; ``made`` is its manifest if it is committed."""
        self._under_way.discard(one.directory.name)
        if made is not None and _attempt(name := one.directory.name):
            assert self.whole is not None
            self.whole.add(one.directory)
            self._known[name] = Committed(made.sequence, made.step, 0, made.attempt, one.directory, 0, made.metric)
            if self._sharing.names is not None:
                self._sharing.names[name] = Entry("folder", 0, 0, None)

    # --- writing

    @override
    def make(self) -> None:
        """Do nothing: the list of :meth:`begin_opening` tells whether the bucket is there."""

    @override
    def begin_opening(self) -> bytes:
        return object_opening.begin(self)

    @override
    def opening(self, told: bytes) -> ObjectOpening:
        self._openings.append(opening := ObjectOpening(self, told))
        return opening

    @override
    def is_taken(self, target: Location) -> bool:
        store = store_of(target)
        return store.is_file(target) or not all(map(OF_ATTEMPT.match, store.names(target)))

    @override
    def pending(self, target: Location, attempt: str | None = None, mark: bytes | None = None) -> ObjectPending:
        return ObjectPending(self, target, attempt, mark)

    @override
    def committing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @override
    def of_attempt(self, target: Location, attempt: str) -> Location | None:
        for path in (target.with_name(f"{target.name}.{attempt}"), target):
            with contextlib.suppress(CheckpointNotFoundError, FormatError):
                if manifest.open(path).attempt == attempt:
                    return path
        return None

    @override
    def arriving(self, target: Location, attempt: str, mark: bytes) -> Uncommitted | Location:
        """As :meth:`Tier.arriving`. A key that is decided stays so: behind a fence or a mark, other names are taken."""
        before, names = object_pending.now(), self.names()
        for number in itertools.count():
            other = hashlib.blake2b(f"{attempt}/{number}".encode(), digest_size=4).hexdigest()
            path = target.with_name(f"{target.name}.{other if number else attempt}")
            if path.name + ENDED in names:
                continue
            try:
                if path.name in names and manifest.open(path).attempt == attempt:
                    return path
            except manifest.DecidedAgainstError:
                continue
            except CheckpointNotFoundError:
                pass
            return ObjectPending(self, target, attempt, mark, (path, before))
        raise AssertionError("names do not end")

    # --- reading

    @override
    @contextlib.contextmanager
    def protect(self, path: Location) -> Iterator[None]:
        held = self._hold(path) if _attempt(path.name) else []
        try:
            if manifest.look(path) is None:
                raise CheckpointNotFoundError(f"{path} is not a committed checkpoint: it has no {manifest.FILE}")
            if _attempt(path.name) and store_of(path).is_file(mark_of(path)):
                raise CheckpointNotFoundError(f"{path} is being deleted")
            yield
        finally:
            with contextlib.suppress(StorageError):  # it counts for two days only
                store_of(path).discard(held)

    def _hold(self, path: Location) -> list[Location]:
        """Make a hold; none if this process may not write there."""
        hold = path.with_name(f"{path.name}.hold.{secrets.token_hex(8)}")
        try:
            decide(hold, b"hold\n", self.patience.fence, self.patience)
        except StorageError as error:
            if error.errno in DENIED:
                return []
            raise
        return [hold]

    def _is_held(self, name: str, names: Mapping[str, Entry], now: _Now) -> bool:
        begin = f"{name}.hold."
        holds = [entry.changed for other, entry in names.items() if other.startswith(begin)]
        return bool(holds) and now() - max(holds) < HOLD

    def _now(self) -> int:
        """The time by the store's clock, also where an answer is lost."""
        store, path = store_of(self.root), self.root / f".now-{secrets.token_hex(8)}"
        decide(path, b"now", self.patience.fence, self.patience)
        found = store.look(path)
        store.discard([path])
        if found is None:
            raise absent("stat", path)
        return found.changed

    # --- deleting

    @override
    def remove(self, path: Location) -> bool:
        names, name = self.names(), path.name
        for opening in self._openings.copy():
            opening.refuse_if_fenced()
        if name not in names:
            return True
        if not _attempt(name) or self._is_held(name, names, self._now):
            return False
        decide(mark_of(path), MARKED, self.patience.fence, self.patience)
        names = self.names(anew=True)
        newest = max((entry.changed for entry in names.values()), default=0)  # a time before that list, at no request
        due = self._deletions(names, newest)
        for one in due.ended:
            self._clear(one)
        self._finish(due)
        return not self._is_held(name, names, lambda: newest)  # else a later call deletes it

    def _deletions(self, names: Mapping[str, Entry], now: int) -> Deletions:
        """Of the deletions in a list of the place: what nobody holds any more, and other objects that must go.

        ``now`` is a time before the list: what is absent there behind an old mark does not come any more.
        """
        ended, ending, outlived = self._kept.unnamed(names, now)
        for name in sorted(names):
            match, age = BESIDE.match(name), now - names[name].changed
            if PASSING.match(name):
                outlived += [self.root / name] if age > SWEEP else []
            elif match is not None and match[2] != "ended":
                outlived += [self.root / name] if age > HOLD else []
            elif match is not None and match[1] not in names:
                outlived += [self.root / name] if age > KEPT else []
            elif match is not None and not self._is_held(match[1], names, lambda: now):
                ended.append(self.root / match[1])
        return Deletions(ended, ending, outlived)

    def _finish(self, due: Deletions) -> None:
        store_of(self.root).discard(due.outlived)
        for one in due.ending:
            object_kept.end(one, self.patience)

    def _clear(self, path: Location) -> None:
        """Remove all objects behind a mark, or of an attempt that is fenced; the manifest last."""
        if KEPT_FOLDER.match(path.name):
            object_kept.end_again(path)
        files = {path / name for name in store_of(path).entries(path, deep=True)}
        key = path / manifest.FILE
        store_of(path).discard(sorted(files - {key}))
        store_of(path).discard(sorted(files & {key}))

    @override
    def debris(self, targets: re.Pattern[str] = STEP) -> list[Location]:
        del targets
        left, due = self._left(time.time_ns())  # nothing rides on this machine's clock here
        return sorted([*left, *due.outlived])

    @override
    def sweep(self, targets: re.Pattern[str] = STEP) -> None:
        del targets
        left, due = self._left(self._now())
        for path, remove in left.items():
            is_debris = not KEPT_FOLDER.match(path.name)
            what = "the debris of an interrupted run" if is_debris else "what no checkpoint names any more"
            log.warning("removing %s: %s", what, path)
            try:
                remove()
            except StorageError as error:
                if error.errno not in DENIED:
                    raise
                log.warning("it is another user's, and is left: %s", error)
        self._finish(due)

    def _left(self, now: int) -> tuple[dict[Location, Callable[[], None]], Deletions]:
        """What nobody needs any more, each with the call that removes it, and the rest of what is to be deleted.

        ``now`` is a time before this call.
        """
        with self.listed_once():
            committed = {one.path for one in self.checkpoints(known=True)}
            names = self.names()
        due = self._deletions(names, now)
        left: dict[Location, Callable[[], None]] = {path: partial(self._clear, path) for path in due.ended}
        for name in sorted(names):
            path = self.root / name
            if _attempt(name) and names[name].kind == "folder" and name + ENDED not in names and path not in committed:
                remove = self._dead(path, now)
                left |= {} if remove is None else {path: remove}
        return left, due

    def _dead(self, path: Location, now: int) -> Callable[[], None] | None:
        """The call that removes what an attempt has left; None if it may be alive, or needs nothing."""
        store, key = store_of(path), path / manifest.FILE
        found = store.entries(path, deep=True)
        decided = found.pop(manifest.FILE, None)
        files = [path / name for name in sorted(found)]
        if decided is None:
            if not found or now - max(entry.changed for entry in found.values()) <= SWEEP:
                return None
            return partial(self._fence, key, files)
        if manifest.look(path) is not None:
            return None
        if files:
            return partial(store.discard, files)
        return partial(store.discard, [key]) if now - decided.changed > KEPT else None

    def _fence(self, key: Location, files: list[Location]) -> None:
        """Let nobody commit an attempt any more, then remove its files. If it is committed now, leave it."""
        if manifest.is_fence(decide(key, FENCE, self.patience.fence, self.patience)):
            store_of(key).discard(files)


class _Sharing(threading.local):
    """A thread's blocks of :meth:`ObjectTier.listed_once`: how many, and the list that they share."""

    depth = 0
    names: dict[str, Entry] | None = None


@functools.lru_cache(maxsize=1 << 16)
def _facts(store: Store, path: Location) -> manifest.Facts:
    """The facts in a manifest that never changes. No error is cached."""
    del store
    return manifest.facts_in(path)


def _facts_of_copy(path: Location) -> manifest.Facts:
    """As :func:`_facts`, of a copy of a directory, which may be copied again."""
    if (file := manifest.look(path)) is None:
        raise CheckpointNotFoundError(f"{path} is not a committed checkpoint: it has no {manifest.FILE}")
    return manifest.facts_of(path, file.version)


def _attempt(name: str) -> str:
    """The attempt in the name of a checkpoint; empty without one."""
    match = STEP.match(name)
    return "" if match is None else match[3] or ""
