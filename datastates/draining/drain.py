"""Brings the checkpoints of a run into one further tier, in the background, the newest first."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from typing_extensions import override

from datastates._base import log
from datastates.commit import manifest
from datastates.commit.names import step_name
from datastates.commit.run import Run
from datastates.commit.tier import Committed, Tier, Uncommitted
from datastates.draining.backlog import Backlog
from datastates.draining.bring import Part, bring, is_damage_of
from datastates.draining.rounds import Rounds
from datastates.errors import CheckpointNotFoundError, DatastatesError, FencedError, said
from datastates.kept import Keep
from datastates.storage.location import Location

_AHEAD = 10.0
"""Seconds for which the first commit waits for the target's answer."""


class Around(NamedTuple):
    """The run around a drain.

    Attributes:
        rank: The rank of this process.
        leads: Whether it brings what earlier runs have left in its directory: rank 0, or one of each host.
        patience: Seconds for which :meth:`Drain.close` waits for other ranks.
        stay: As for :class:`Run`, of the target.
        arrived: Called when a checkpoint has been brought: earlier tiers need to keep it no more.
    """

    rank: int
    leads: bool
    patience: float
    stay: Callable[[Sequence[Committed]], Collection[Location]]
    arrived: Callable[[], None]


class Drain(Rounds):
    """Brings checkpoints into one tier from the tiers before it. Thread-safe.

    Each rank copies its own container of each checkpoint of the run. Rank 0 commits, once all containers are there. It
    also does what earlier runs have left to do; with ``per_host``, one rank of each host copies what is there. A target
    that fails costs the run nothing: it is asked again.
    """

    def __init__(
        self, before: Sequence[Tier], target: Tier, keep: Keep, around: Around, is_busy: Callable[[], bool]
    ) -> None:
        """Prepare; nothing is read or written yet.

        Args:
            before: The tiers before the target, the first one first.
            target: The tier that the checkpoints are brought to.
            keep: The checkpoints that it keeps.
            around: The run.
            is_busy: Whether a snapshot is in flight: it comes first.
        """
        super().__init__(target.root, is_busy)
        self.target = target
        self.backlog = Backlog(before, target, keep)
        self._keep, self._around = keep, around
        self._asked = self._awaited = self._hurries = False
        self._fenced = ""  # why nothing is brought any more
        self._ends: float | None = None  # when close() gives up to wait for other ranks
        self._now: Location | None = None  # what is being brought
        self._left: list[list[Committed]] | None = None  # on a rank that leads a host, what earlier runs have left
        self._run: Run | None = None  # on rank 0, the run's saves in the target

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

    @override
    def wait(self, timeout: float | None = None) -> bool:
        """As :meth:`Rounds.wait`.

        Raises:
            FencedError: A newer run has begun to save in the target.
        """
        is_done = self._bell.wait_for(lambda: not (self._works or self._hurries), timeout) and not self.failure
        if self._fenced:
            raise FencedError(self._fenced)
        return is_done

    def hurry(self) -> None:
        """Bring nothing but the newest checkpoint of this run until :meth:`go_on`, and give up at the first failure."""
        self._hurries = True
        self._bell.ring()

    def wait_hurried(self, timeout: float) -> None:
        """Wait until the newest is there, or was given up, for ``timeout`` seconds at most."""
        self._bell.wait_for(lambda: not self._works, timeout)

    def go_on(self) -> None:
        """Bring all that is due again, as the process lives on."""
        self._call(self._hurry_no_more)

    @override
    def _fork(self) -> None:
        super()._fork()
        self._hurries = False

    def _hurry_no_more(self) -> None:
        self._hurries = False

    @override
    def close(self) -> None:
        super().close()
        if self._run is not None and self._run.opening is not None:
            self._run.opening.close()

    # --- on the thread

    @override
    def _is_last(self) -> bool:
        return self._hurries or super()._is_last()

    @override
    def _round(self) -> bool | None:
        """Bring one checkpoint."""
        try:
            return self._bring_own() if self._around.rank else self._bring_next()
        except FencedError as error:
            log.error("nothing is brought to %s any more: %s", self.target.root, error)
            self._fenced = said(error)
            return None
        except _DroppedError:
            return True
        finally:
            self._asked = True

    @override
    def _later(self) -> float | None:
        """Other ranks are still copying."""
        if self._is_last():
            self._ends = self._ends or time.monotonic() + self._around.patience
            if time.monotonic() > self._ends:
                return self._failed("other ranks have not sent their containers")
        return super()._later()

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
            self._bring(path, found, Part((self._around.rank,), commits=False, pace=self._pace_of))
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
            self._bring(one.path, found, Part(self.backlog.held(one), commits=False, pace=self._pace_of))
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
                part = Part(ranks, True, run.opening.refuse_if_fenced, self._pace_of)
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

    @override
    def _pace_of(self, nbytes: int) -> None:
        if self._hurries and self._now != self.backlog.own_newest():
            raise _DroppedError
        super()._pace_of(nbytes)


class _DroppedError(DatastatesError):
    """Ends the copying of a checkpoint that a newer one must not wait for."""
