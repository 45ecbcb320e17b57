"""SIGTERM handling: commits the snapshots in flight before the process ends, and a last one if that can be durable."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from datastates._base import log
from datastates._base.packing import pack, unpack
from datastates._base.waiting import Bell
from datastates._base.workers import start
from datastates.errors import DatastatesError
from datastates.ranks.board_world import DONE
from datastates.ranks.world import World

_AGAIN_SECONDS = 0.1


class Termination:
    """Holds SIGTERM back until the snapshots in flight have ended, then passes it to the previous handler.

    The handler itself never waits, because the code that it interrupts may hold any lock. It wakes a thread. That
    thread waits for the snapshots, then sends the signal again. The handler then runs once more in the main thread, and
    passes the signal to the previous handler.

    A scheduler sends SIGTERM to the program's children, too. The workers of torch's data loaders that are forked
    meanwhile ignore it, so that the loop has batches until the last snapshot. They end with the program. Other workers
    die, and the loader's handler of SIGCHLD then raises that, anywhere in the main thread. That error is held back
    together with the signal, so that the step is finished.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        """Install the handler; call it in the main thread. ``wait`` returns once the snapshots in flight have ended."""
        self._wait = wait
        self._process = 0  # the process that has the thread: a forked child has none
        self._came: queue.SimpleQueue[bool] = queue.SimpleQueue()  # its put() may be called in a signal handler
        self._is_over = False  # the snapshots that the signal waits for have ended
        self._has_come = self._is_given = False
        self._of_children: Any = None  # the handler of SIGCHLD, while SIGTERM is held back
        self._failure: Exception | None = None  # that it has raised since
        self._previous: Any = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, self._handle)

    def watch(self) -> None:
        """Begin to hold SIGTERM back. Call this before a snapshot is taken."""
        if self._process != os.getpid():
            if self._process:  # this is a forked child
                self._came = queue.SimpleQueue()
            start(threading.Thread(target=self._watch, name="datastates-sigterm", daemon=True))
            self._process = os.getpid()

    def _watch(self) -> None:
        if not self._came.get():
            self._came.put(False)  # ends a second such thread, too, which an interrupted call may have started
        else:
            try:
                self._wait()
            except Exception as error:  # the signal must take effect nevertheless
                log.error("SIGTERM: the snapshots in flight are not waited for", of=error)
            self._is_over = True
            main = threading.main_thread().ident
            assert main is not None
            while not self._is_given:
                # interrupts a system call that the main thread may be blocked in; repeated, because the signal may come
                # just before the system call
                signal.pthread_kill(main, signal.SIGTERM)
                time.sleep(_AGAIN_SECONDS)

    def _handle(self, number: int, frame: Any) -> None:
        if self._process == os.getpid() and not self._is_over:
            if not self._has_come and callable(before := signal.getsignal(signal.SIGCHLD)):
                self._of_children = before
                signal.signal(signal.SIGCHLD, self._handle_child)
            self._has_come = True
            self._came.put(True)
            return
        self._is_given = True
        self._give_back()
        if callable(self._previous):
            self._previous(number, frame)
            if self._failure is not None:
                raise self._failure
        elif self._previous != signal.SIG_IGN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _handle_child(self, number: int, frame: Any) -> None:
        try:
            self._of_children(number, frame)
        except Exception as error:
            self._failure = self._failure or error

    def end(self) -> None:
        """Stop holding SIGTERM back, once no snapshot is in flight. A signal that was held back is passed on here."""
        self._is_over = True
        self._came.put(False)
        self._failure = None  # the loop has ended without it
        if self._has_come and not self._is_given:
            self._handle(signal.SIGTERM, None)
        self._give_back()

    def _give_back(self) -> None:
        """Restore the previous handlers, unless others have been installed since."""
        if signal.getsignal(signal.SIGCHLD) == self._handle_child:
            signal.signal(signal.SIGCHLD, self._of_children)
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)


def _after_fork() -> None:
    if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), Termination) and _is_loader_s():
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_heed, args=[os.getppid()], name="datastates-sigterm", daemon=True).start()


def _is_loader_s() -> bool:
    """Whether torch's data loader has forked this process, as its worker."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.utils.data.dataloader":
        frame = frame.f_back
    return frame is not None


def _heed(parent: int) -> None:
    """In a worker, end at a SIGTERM of its own program, or once that has ended; ignore a scheduler's."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent and os.getppid() == parent:
        pass
    os._exit(0)


os.register_at_fork(after_in_child=_after_fork)


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

    def hold(self, finish: Callable[[float | None], None]) -> None:
        """Once SIGTERM has come, wait until the last snapshot is in flight, or is not taken; then call ``finish``.

        Its argument is when the process is killed, in seconds on the monotonic clock; None if that is not known.
        """
        if self._grace is None:
            finish(None)
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
        finish(end)
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
