"""The last snapshot after SIGTERM: taken if it can be durable before the process is killed, on all ranks or on none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from datastates._base import log
from datastates._base.packing import pack, unpack
from datastates._base.waiting import Bell
from datastates._base.workers import start
from datastates.errors import DatastatesError
from datastates.ranks.board_world import DONE
from datastates.ranks.world import World

_NONE = "SIGTERM: no last snapshot: %s. Those in flight are finished"
_ENDED = "the loop has ended"
_STEPS = 2
"""Most steps that a rank does until the snapshot: it ends the one it is in, and another rank may be one ahead."""


_PATIENCE = 2
"""A rank gives up after the grace time by this number: a later answer would come too late."""


class LastSnapshot:
    """Decides about a last snapshot once SIGTERM has come. Thread-safe.

    The training thread takes the snapshot, as only it knows when the state is whole. Meanwhile another thread holds
    SIGTERM back.

    SIGTERM reaches the ranks at different steps. Each rank then votes with the step that it asked about last, and does
    not go on from the next one before the answer is there. Rank 0 answers with a step that no rank has reached.
    """

    def __init__(
        self,
        grace: float | None,
        needed: Callable[[], float | None],
        world: World,
        name: str,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Begin before SIGTERM.

        Args:
            grace: Seconds from SIGTERM until the process is killed. None: no last snapshot is taken.
            needed: Returns the seconds until a snapshot taken now is durable; None if that is not known.
            world: The ranks that save together.
            name: A name for their vote, the same on all ranks.
            clock: Seconds on a monotonic clock.
            wall: Seconds on a clock that all ranks have.
        """
        self._grace = grace
        self._needed = needed
        self._world = world
        self._name = name
        self._clock = clock
        self._wall = wall
        self._asked: tuple[int, float, float] | None = None  # the last step, when it was, and how long it took
        self._end: float | None = None  # when the process is killed, while SIGTERM is held back
        self._answer: dict[str, int | None] = {}  # the first step to save at; setdefault() keeps the first answer
        self._is_told = self._is_settled = False
        self._bell = Bell()

    def is_due(self, step: int) -> bool:
        """On the training thread, whether to take the last snapshot after ``step``."""
        now = self._clock()
        self._asked = step, now, now - self._asked[1] if self._asked else 0.0
        if (end := self._end) is None:  # looked at after the step was noted: a vote that was cast before has it
            return False
        self._bell.wait_for(lambda: self._answer, max(0.0, end - now))
        at = self._answer.get("step")
        if at is None or step < at:
            return False
        if self._is_told:
            self.settle()  # the loop took no snapshot after the answer
            return False
        self._is_told = True
        self._bell.ring()
        return True

    def settle(self) -> None:
        """Tell that the last snapshot is in flight. Does nothing before :meth:`is_due` has said that it is due."""
        if self._is_told:
            self._is_settled = True
            self._bell.ring()

    def end(self) -> None:
        """On the training thread, tell that no step follows: a last snapshot that was announced is not taken."""
        if self._end is None or self._is_settled:
            return
        if not self._answer:
            self._hear(None, _ENDED)
        elif self._answer["step"] is not None:
            log.warning(_NONE, _ENDED)
        self._is_told = self._is_settled = True
        self._bell.ring()

    def hold(self, finish: Callable[[], None]) -> None:
        """Once SIGTERM has come, wait until the last snapshot is in flight, or is not taken; then call ``finish``."""
        if self._grace is None:
            finish()
            return
        self._end = end = self._clock() + self._grace
        step, _, pace = self._asked or (None, 0.0, 0.0)  # read after the end was set: a later step waits for the answer
        needed = self._needed()
        vote = DONE + pack([step, pace, needed, self._grace, self._wall()])
        try:
            start(threading.Thread(target=self._vote, args=[vote], name="datastates-last", daemon=True))
        except DatastatesError as error:
            self._hear(None, str(error))
        # the other ranks may not have got SIGTERM at all
        if not self._bell.wait_for(lambda: self._answer, self._grace / _PATIENCE):
            self._hear(None, "the other ranks did not answer in time")
        if self._answer["step"] is not None and needed is not None:
            if self._bell.wait_for(lambda: self._is_told, max(0.0, end - needed - self._clock())):
                self._bell.wait_for(lambda: self._is_settled, max(0.0, end - self._clock()))
            else:
                log.warning("SIGTERM: no last snapshot: due() was not called in time")
        finish()
        self._end = None

    def _vote(self, vote: bytes) -> None:
        try:
            step, why = unpack(self._world.agree(self._name, vote, _decide))
        except DatastatesError as error:
            step, why = None, str(error)
        self._hear(step, why)

    def _hear(self, step: int | None, why: str) -> None:
        if self._answer:
            return
        if step is None:
            log.warning(_NONE, why)
        else:
            log.warning("SIGTERM: a last snapshot from step %d on: %s", step, why)
        self._answer.setdefault("step", step)  # after the line, as the process may end once it is there
        self._bell.ring()


def _decide(votes: Mapping[int, bytes]) -> bytes:
    """On rank 0: the first step to save at, None for no last snapshot, and the reason."""
    steps, paces, needs, graces, came = zip(*(unpack(vote[1:]) for vote in votes.values()), strict=True)
    if None in steps:
        return pack([None, "due() was not called yet"])
    if None in needs:
        return pack([None, "no snapshot was measured yet"])
    needed, pace, grace = max(needs), max(paces), min(graces)
    if (apart := max(came) - min(came)) > 0.8 * grace / _PATIENCE:  # else a rank may have given up by now
        return pack([None, f"SIGTERM reached the ranks {apart:.1f} s apart"])
    step = max(steps) + 1 if needed + _STEPS * pace <= grace else None
    return pack([step, f"it needs {needed:.1f} s, and a step {pace:.1f} s, of {grace:.1f} s"])
