"""Brings the checkpoints of a run into one further tier, in the background, the newest first."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from datastates._base import log, workers
from datastates._base.waiting import Bell
from datastates._base.workers import Workers
from datastates.commit import health, manifest, retention
from datastates.commit.names import step_name
from datastates.commit.run import Run
from datastates.commit.tier import Committed, Identity, Tier, Uncommitted
from datastates.config import Keep
from datastates.draining.bring import Part, bring
from datastates.errors import (
    CheckpointNotFoundError,
    ClosedError,
    DatastatesError,
    FencedError,
    StorageError,
    ThreadStartError,
    said,
)
from datastates.storage.location import Location

_SHORTEST, _LONGEST = 0.2, 30.0
"""Seconds between two tries: each pause is twice the one before."""
_PIECE = 8 << 20
"""Bytes that are sent between two looks at the snapshots in flight."""
_AHEAD = 10.0
"""Seconds for which the first commit waits for the target's answer."""
_ASIDE = 1.0
"""Seconds for which a piece waits at most while a snapshot is in flight."""


class Around(NamedTuple):
    """The run around a drain.

    Attributes:
        rank: The rank of this process.
        patience: Seconds for which :meth:`Drain.close` waits for other ranks.
        is_busy: Whether a snapshot is in flight: it comes first.
        stay: As for :class:`Run`, of the target.
        arrived: Called when a checkpoint has been brought: earlier tiers need to keep it no more.
    """

    rank: int
    patience: float
    is_busy: Callable[[], bool]
    stay: Callable[[Sequence[Committed]], Collection[Location]]
    arrived: Callable[[], None]


class Drain:
    """Brings checkpoints into one tier from the tiers before it. Thread-safe.

    Each rank copies its own container of each checkpoint of the run. Rank 0 commits, once all containers are there. It
    also finds what earlier runs have left to do, by the lists of the tiers, and does it alone. A target that fails
    costs the run nothing: it is asked again.
    """

    def __init__(self, before: Sequence[Tier], target: Tier, keep: Keep, around: Around) -> None:
        """Prepare; nothing is read or written yet.

        Args:
            before: The tiers before the target, the first one first.
            target: The tier that the checkpoints are brought to.
            keep: The checkpoints that it keeps.
            around: The run.
        """
        self.target = target
        self.failure = ""
        """Why the last try has failed; empty if it has not."""
        self._before, self._keep, self._around = before, keep, around
        self._threads = Workers("datastates-drain", 1)
        self._bell, self._lock = Bell(), threading.Lock()
        self._works = self._is_called = self._closing = self._asked = self._late = self._fenced = False
        self._hurries = False
        self._ends: float | None = None  # when close() gives up to wait for other ranks
        self._pause = _SHORTEST
        self._sent = 0
        self._now: Location | None = None  # what is being brought
        self._own: dict[Location, None] = {}  # what this run has committed and is due, the oldest first
        self._known: set[Identity] = set()  # what is in the target
        self._lost: set[Identity] = set()  # what is damaged wherever it lies
        self._unwanted: set[Identity] = set()  # what the target would not keep
        self._newest: int | None = None  # the highest sequence number that was found in the target at first
        self._run: Run | None = None  # on rank 0, the run's saves in the target
        _drains.add(self)

    # --- for the run

    def begin(self) -> None:
        """Begin to ask the target what it has, on rank 0, if that is not done yet."""
        if self._around.rank == 0 and not (self._asked or self._works):
            self._call()

    def add(self, path: Location) -> None:
        """Note a checkpoint of this run, which is committed in the first tier."""
        self._own[path] = None
        self._call()

    def newest(self) -> int:
        """A number above which new checkpoints are newer than all in the target.

        Waits for the target, but not for long. Where it could not be asked in time, and turns out to be ahead, the
        checkpoints of this run that were numbered meanwhile get higher numbers there, and later ones everywhere.
        """
        self.begin()
        if not self._late:
            self._bell.wait_for(lambda: self._asked or self._newest is not None, _AHEAD)
        if self._newest is None:
            self._late = True
            return 0
        return 2 * self._newest if self._late else self._newest

    def has(self, identity: Identity) -> bool:
        """Whether a checkpoint is known to be in the target."""
        return identity in self._known

    def needs(self, one: Committed) -> bool:
        """Whether a checkpoint is still to be brought to the target."""
        if self._fenced or one.sequence is None:
            return False
        return all((one.step, one.attempt) not in these for these in (self._known, self._lost, self._unwanted))

    def delete(self) -> None:
        """Delete the checkpoints of the target that are not kept, once the run saves there."""
        if self._run is not None:
            self._run.delete()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is due; False if something is after ``timeout`` seconds.

        Raises:
            FencedError: A newer run has begun to save in the target.
        """
        is_done = self._bell.wait_for(lambda: not self._works, timeout)
        if self._fenced:
            raise FencedError(self.failure)
        return is_done

    def hurry(self) -> None:
        """Bring nothing but the newest checkpoint of this run from now on, and give up at the first failure."""
        self._hurries = True
        self._bell.ring()

    def close(self) -> None:
        """Bring what is due, and end. What fails now is left to a later run. Can be repeated."""
        self._closing = True
        self._bell.ring()
        self._threads.stop()
        self._threads.join()
        if self._run is not None and self._run.opening is not None:
            self._run.opening.close()

    # --- on the thread

    def _call(self) -> None:
        with self._lock:
            self._is_called = True
            begins = not (self._works or self._closing)
            self._works |= begins
        try:
            if begins:
                self._threads.do(self._work)
        except (ThreadStartError, ClosedError) as error:  # the checkpoint is committed all the same
            self._works = False
            log.warning("checkpoints wait to be brought to %s: %s", self.target.root, error)
        self._bell.ring()

    def _work(self) -> None:
        while True:
            self._is_called = False
            pause = self._round()
            was_last = self._is_last()
            with self._lock:
                if pause is None and not self._is_called:
                    self._works = False
                    break
            if pause:
                self._bell.wait_for(lambda: self._is_called or self._is_last() != was_last, pause)  # noqa: B023
        self._bell.ring()

    def _is_last(self) -> bool:
        return self._closing or self._hurries or workers.is_ending()

    def _round(self) -> float | None:
        """Bring one checkpoint; returns the seconds until the next call, None if nothing is left to do."""
        try:
            rest = self._bring_own() if self._around.rank else self._bring_next()
            self.failure = ""
        except FencedError as error:
            log.error("nothing is brought to %s any more: %s", self.target.root, error)
            self.failure, self._fenced = said(error), True
            return None
        except _DroppedError:
            return 0.0
        except Exception as error:  # also what a store raises against its contract
            return self._failed(said(error) or type(error).__name__)
        finally:
            self._asked = True
            self._bell.ring()
        if rest:
            self._pause = _SHORTEST
            return 0.0
        return None if rest is None else self._wait_for_ranks()

    def _failed(self, text: str) -> float | None:
        if self._is_last():
            log.warning(
                "not all checkpoints are in %s: a later run or datastates drain goes on: %s", self.target.root, text
            )
            return None
        if text != self.failure:
            log.warning("checkpoints wait to be brought to %s: %s", self.target.root, text)
        self.failure = text
        return self._next_pause()

    def _wait_for_ranks(self) -> float | None:
        if self._is_last():
            self._ends = self._ends or time.monotonic() + self._around.patience
            if time.monotonic() > self._ends:
                return self._failed("other ranks have not sent their containers")
        return self._next_pause()

    def _next_pause(self) -> float:
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST)
        return pause

    def _bring_own(self) -> bool | None:
        """On another rank than 0: copy one container. True: there may be more; None: nothing is left."""
        path = self._own_newest()
        if path is None:
            return None
        try:
            self._now = path
            self.target.make()
            made = manifest.open(path)
            found = self.target.arriving(self.target.root / step_name(made.step), made.attempt, b"")
            if not isinstance(found, Location):
                bring(path, found, Part((self._around.rank,), commits=False, pace=self._pace_of))
        except CheckpointNotFoundError:
            log.info("%s was deleted before it was brought to %s", path, self.target.root)
        self._own.pop(path)
        return None if self._hurries else True

    def _bring_next(self) -> bool | None:
        """On rank 0: bring the newest checkpoint that is due. False: other ranks are still copying all that is due."""
        run = self._run = self._run or self._opened()
        run.begin()
        assert run.opening is not None
        with self.target.listed_once():
            due = self._due()
            found = [
                self.target.arriving(self.target.root / step_name(one.step), one.attempt, run.opening.mark)
                for one, *_ in due
            ]
        newest = self._own_newest()
        for copies, there in zip(due, found, strict=True):
            self._now = copies[0].path
            if self._hurries and self._now != newest:
                continue
            if isinstance(there, Location) or self._bring(run, copies, there):
                return (len(due) > 1 and not self._hurries) or None
        return False if due and not (self._hurries and newest is None) else None

    def _opened(self) -> Run:
        self.target.make()
        opening = self.target.opening(self.target.begin_opening())
        return Run(self.target, opening, self._keep, stay=self._around.stay)

    def _due(self) -> list[list[Committed]]:
        """The checkpoints that are to be brought, the newest first, each as it lies in the tiers before the target."""
        there = self.target.checkpoints(certain=True, known=True)
        self._known = {(one.step, one.attempt) for one in there}
        if self._newest is None:
            self._newest = max((one.sequence or 0 for one in there), default=0)
            self._bell.ring()
        found: dict[Identity, list[Committed]] = {}
        for tier in self._before:
            for one in tier.checkpoints(known=True):
                if one.sequence is not None and (one.step, one.attempt) not in self._known | self._lost:
                    found.setdefault((one.step, one.attempt), []).append(one)
        arriving = [copies[0]._replace(sequence=self._number(copies[0])) for copies in found.values()]
        outdated = retention.outdated_of([*there, *arriving], self._keep, self._is_whole)
        self._unwanted = {(one.step, one.attempt) for one in outdated} & set(found)
        for identity in self._unwanted:
            self._own.pop(found[identity][0].path, None)
        due = [one for one in arriving if (one.step, one.attempt) not in self._unwanted]
        due.sort(key=lambda one: one.sequence or 0, reverse=True)
        return [found[one.step, one.attempt] for one in due]

    def _own_newest(self) -> Location | None:
        return next(reversed(self._own), None)

    def _is_whole(self, one: Committed) -> bool:
        return one.path.parent != self.target.root or retention.is_whole(self.target, one)

    def _bring(self, run: Run, copies: list[Committed], found: Uncommitted) -> bool:
        """Bring one checkpoint from the first of its places where it is whole; False if other ranks still copy."""
        assert run.opening is not None
        identity = copies[0].step, copies[0].attempt
        ranks = (self._around.rank,) if copies[0].path in self._own else None
        part = Part(ranks, True, self._number(copies[0]), run.opening.refuse_if_fenced, self._pace_of)
        for one in copies:
            try:
                if bring(one.path, found, part) is None:
                    return False
                self._own.pop(copies[0].path, None)
                self._known.add(identity)
                with self.target.listed_once():
                    run.retain()
                self._around.arrived()
                return True
            except CheckpointNotFoundError:
                log.info("%s was deleted before it was brought to %s", one.path, self.target.root)
            except DatastatesError as error:
                if not health.is_damage(error) or not _is_of(error, one.path):
                    raise
                log.error("%s is not brought to %s: %s", one.path, self.target.root, error)
        self._own.pop(copies[0].path, None)
        self._lost.add(identity)
        return True

    def _number(self, one: Committed) -> int:
        """The sequence number in the target: as in the first tier, unless it was given before the target was asked."""
        number, ahead = one.sequence or 1, self._newest or 0
        return number + ahead if self._late and number <= ahead and one.path in self._own else number

    def _pace_of(self, nbytes: int) -> None:
        """Let snapshots in flight go first, but never for long: there may always be one."""
        if self._hurries and self._now != self._own_newest():
            raise _DroppedError
        self._sent += nbytes
        if self._sent >= _PIECE:
            self._sent = 0
            if self._around.is_busy():
                self._bell.wait_for(lambda: not self._around.is_busy() or self._is_last(), _ASIDE)


class _DroppedError(DatastatesError):
    """Ends the copying of a checkpoint that a newer one must not wait for."""


def _is_of(error: BaseException, path: Location) -> bool:
    """Whether an error is about a checkpoint, and not about the place that it is brought to."""
    return not isinstance(error, StorageError) or Location(str(error.filename)).is_relative_to(path)


_drains: weakref.WeakSet[Drain] = weakref.WeakSet()


def _after_fork() -> None:
    for drain in list(_drains):  # the thread is the parent's
        drain._lock, drain._works = threading.Lock(), False


os.register_at_fork(after_in_child=_after_fork)
