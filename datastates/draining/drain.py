"""Brings the checkpoints of a run into one further tier, in the background, the newest first."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from datastates._base import log, workers
from datastates._base.waiting import Bell
from datastates._base.workers import Workers
from datastates.commit import manifest
from datastates.commit.names import step_name
from datastates.commit.run import Run
from datastates.commit.tier import Committed, Tier, Uncommitted
from datastates.config import Keep
from datastates.draining.backlog import Backlog
from datastates.draining.bring import Part, bring, is_damage_of
from datastates.draining.pace import Pace
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
_AHEAD = 10.0
"""Seconds for which the first commit waits for the target's answer."""


class Around(NamedTuple):
    """The run around a drain.

    Attributes:
        rank: The rank of this process.
        leads: Whether it brings what earlier runs have left in its directory: rank 0, or one of each host.
        patience: Seconds for which :meth:`Drain.close` waits for other ranks.
        is_busy: Whether a snapshot is in flight: it comes first.
        stay: As for :class:`Run`, of the target.
        arrived: Called when a checkpoint has been brought: earlier tiers need to keep it no more.
    """

    rank: int
    leads: bool
    patience: float
    is_busy: Callable[[], bool]
    stay: Callable[[Sequence[Committed]], Collection[Location]]
    arrived: Callable[[], None]


class Drain:
    """Brings checkpoints into one tier from the tiers before it. Thread-safe.

    Each rank copies its own container of each checkpoint of the run. Rank 0 commits, once all containers are there. It
    also does what earlier runs have left to do; with ``per_host``, one rank of each host copies what is there. A target
    that fails costs the run nothing: it is asked again.
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
        self.backlog = Backlog(before, target, keep)
        self._keep, self._around = keep, around
        self._threads = Workers("datastates-drain", 1)
        self._bell, self._lock = Bell(), threading.Lock()
        self._pace_of = Pace(around.is_busy, self._bell, self._is_last)
        self._works = self._is_called = self._closing = self._asked = self._awaited = self._fenced = self._hurries = (
            False
        )
        self._ends: float | None = None  # when close() gives up to wait for other ranks
        self._pause = _SHORTEST
        self._told: tuple[object, ...] = ()  # the kind of the last failure
        self._now: Location | None = None  # what is being brought
        self._left: list[list[Committed]] | None = None  # on a rank that leads a host, what earlier runs have left
        self._run: Run | None = None  # on rank 0, the run's saves in the target
        _drains.add(self)

    # --- for the run

    def begin(self) -> None:
        """Begin to ask the target what it has, on rank 0, if that is not done yet."""
        if self._around.rank == 0 and not (self._asked or self._works):
            self._call()

    def add(self, path: Location) -> None:
        """Note a checkpoint of this run, which is committed in the first tier."""
        self.backlog.add(path)
        self._call()

    def newest(self) -> int:
        """A number above which new checkpoints are newer than all in the target; 0 if it could not be asked yet.

        Waits for the target's first answer, but not for long, and only once.
        """
        self.begin()
        if not self._awaited:
            self._bell.wait_for(lambda: self._asked or self.backlog.newest is not None, _AHEAD)
            self._awaited = True
        return self.backlog.newest or 0

    def needs(self, one: Committed) -> bool:
        """Whether a checkpoint is still to be brought to the target."""
        return not self._fenced and self.backlog.needs(one)

    def delete(self) -> None:
        """Delete the checkpoints of the target that are not kept, once the run saves there."""
        if self._run is not None:
            self._run.delete()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is due; False if something is after ``timeout`` seconds, or was given up.

        Raises:
            FencedError: A newer run has begun to save in the target.
        """
        has_ended = self._bell.wait_for(lambda: not (self._works or self._hurries), timeout)
        if self._fenced:
            raise FencedError(self.failure)
        return has_ended and not self.failure

    def hurry(self) -> None:
        """Bring nothing but the newest checkpoint of this run until :meth:`go_on`, and give up at the first failure."""
        self._hurries = True
        self._bell.ring()

    def wait_hurried(self, timeout: float) -> None:
        """Wait until the newest is there, or was given up, for ``timeout`` seconds at most."""
        self._bell.wait_for(lambda: not self._works, timeout)

    def go_on(self) -> None:
        """Bring all that is due again, as the process lives on."""
        self._call(hurries=False)

    def close(self) -> None:
        """Bring what is due, and end. What fails now is left to a later run. Can be repeated."""
        self._closing = True
        self._bell.ring()
        self._threads.stop()
        self._threads.join()
        if self._run is not None and self._run.opening is not None:
            self._run.opening.close()

    # --- on the thread

    def _call(self, *, hurries: bool = True) -> None:
        with self._lock:
            self._is_called = True
            begins = not (self._works or self._closing)
            self._works |= begins
            self._hurries &= hurries  # not before it works: who waits would take this for the end
        try:
            if begins:
                self._threads.do(self._work)
        except (ThreadStartError, ClosedError) as error:  # the checkpoint is committed all the same
            self._works, self.failure = False, said(error)
            log.warning("checkpoints wait to be brought to %s: %s", self.target.root, error)
        self._bell.ring()

    def _work(self) -> None:
        while self._goes_on():
            pass
        self._bell.ring()

    def _goes_on(self) -> bool:
        """Bring one checkpoint, and wait until the next try; False if nothing is left to do."""
        self._is_called, was_last = False, self._is_last()
        pause = self._round()
        with self._lock:
            if pause is None and not self._is_called:
                self._works = False
                return False
        if pause:
            self._bell.wait_for(lambda: self._is_called or self._is_last() != was_last, pause)
        return True

    def _is_last(self) -> bool:
        return self._closing or self._hurries or workers.is_ending()

    def _round(self) -> float | None:
        """Bring one checkpoint; returns the seconds until the next call, None if nothing is left to do."""
        try:
            rest = self._bring_own() if self._around.rank else self._bring_next()
            self.failure, self._told = "", ()
        except FencedError as error:
            log.error("nothing is brought to %s any more: %s", self.target.root, error)
            self.failure, self._fenced = said(error), True
            return None
        except _DroppedError:
            return 0.0
        except BaseException as error:  # also what a store raises against its contract, and obstore's panics
            is_new, self._told = _kind(error) != self._told, _kind(error)
            return self._failed(said(error) or type(error).__name__, is_new=is_new)
        finally:
            self._asked = True
            self._bell.ring()
        if rest:
            self._pause = _SHORTEST
            return 0.0
        return None if rest is None else self._wait_for_ranks()

    def _failed(self, text: str, *, is_new: bool = True) -> float | None:
        self.failure = text
        if self._is_last():
            log.warning(
                "not all checkpoints are in %s: a later run or datastates drain goes on: %s", self.target.root, text
            )
            return None
        if is_new:
            log.warning("checkpoints wait to be brought to %s: %s", self.target.root, text)
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
        self.backlog.drop_outdated()
        path = self._now = self.backlog.own_newest()
        if path is None:
            return self._bring_left()
        self.target.make()
        with contextlib.suppress(CheckpointNotFoundError):
            made = manifest.open(path)
            found = self.target.arriving(self.target.root / step_name(made.step), made.attempt, b"")
            self._bring(path, found, Part((self._around.rank,), commits=False, pace=self._paced))
        self.backlog.drop(path)
        return None if self._hurries else True

    def _bring_left(self) -> bool | None:
        """On a rank that leads a host: copy what is here of a checkpoint of an earlier run. As :meth:`_bring_own`."""
        if self._left is None:
            self._left = self.backlog.due() if self._around.leads else []
        if not self._left or self._hurries:
            return None
        (one, *_), found = self._left[0], self.backlog.arriving(self._left[0][0], b"")
        with contextlib.suppress(CheckpointNotFoundError):
            self._bring(one.path, found, Part(self.backlog.held(one), commits=False, pace=self._paced))
        self._left.pop(0)
        return True

    def _bring_next(self) -> bool | None:
        """On rank 0: bring the newest checkpoint that is due. False: other ranks are still copying all that is due."""
        run = self._run = self._run or self._opened()
        run.begin()
        assert run.opening is not None
        with self.target.listed_once():
            due = self.backlog.due()
            self._bell.ring()
            found = [self.backlog.arriving(one, run.opening.mark) for one, *_ in due]
        newest = self.backlog.own_newest()
        for copies, there in zip(due, found, strict=True):
            self._now = copies[0].path
            if self._hurries and self._now != newest:
                continue
            if self._bring_whole(run, copies, there):
                return (len(due) > 1 and not self._hurries) or None
        waits = due and (not self._is_last() or any(self.backlog.is_own(copies[0].path) for copies in due))
        return False if waits and not (self._hurries and newest is None) else None

    def _opened(self) -> Run:
        self.target.make()
        opening = self.target.opening(self.target.begin_opening())
        return Run(self.target, opening, self._keep, stay=self._around.stay)

    def _bring_whole(self, run: Run, copies: list[Committed], found: Uncommitted | Location) -> bool:
        """Bring one checkpoint from the first of its places where it is whole; False if other ranks still copy."""
        assert run.opening is not None
        is_own = self.backlog.is_own(copies[0].path)
        for one in copies:
            with contextlib.suppress(CheckpointNotFoundError):
                ranks = [self._around.rank] if is_own else self.backlog.held(one)
                part = Part(ranks, True, run.opening.refuse_if_fenced, self._paced)
                if (is_there := self._bring(one.path, found, part)) is None:
                    continue
                if is_there:
                    self.backlog.brought(copies)
                    with self.target.listed_once():
                        run.retain()
                    self._around.arrived()
                return is_there
        self.backlog.lose(copies)
        return True

    def _bring(self, path: Location, found: Uncommitted | Location, part: Part) -> bool | None:
        """Bring one checkpoint, or a part of it; returns whether it is committed, None if it is damaged or gone."""
        if isinstance(found, Location):
            return True
        try:
            return bring(path, found, part) is not None
        except CheckpointNotFoundError:
            log.info("%s was deleted before it was brought to %s", path, self.target.root)
        except DatastatesError as error:
            if not is_damage_of(path, error):
                raise
            log.error("%s is not brought to %s: %s", path, self.target.root, error)
        return None

    def _paced(self, nbytes: int) -> None:
        if self._hurries and self._now != self.backlog.own_newest():
            raise _DroppedError
        self._pace_of(nbytes)


class _DroppedError(DatastatesError):
    """Ends the copying of a checkpoint that a newer one must not wait for."""


def _kind(error: BaseException) -> tuple[object, ...]:
    """What failures have in common that need to be told once, whatever the names in them."""
    return type(error), *((error.errno, error.operation) if isinstance(error, StorageError) else ())


_drains: weakref.WeakSet[Drain] = weakref.WeakSet()


def _after_fork() -> None:
    for drain in list(_drains):  # the thread is the parent's
        drain._lock, drain._works, drain._hurries = threading.Lock(), False, False


os.register_at_fork(after_in_child=_after_fork)
