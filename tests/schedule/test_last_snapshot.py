"""The last snapshot after SIGTERM: taken if it can be durable in time, and the log says which."""

from __future__ import annotations

import threading

import pytest

from datastates.ranks.world import SoloWorld
from datastates.schedule.termination import LastSnapshot


class Held:
    """A LastSnapshot whose SIGTERM has come after step 6, with a thread that holds it back."""

    def __init__(self, grace: float, needed: float | None, *, pace: float = 1.0, asked: int = 2) -> None:
        self.now, self.go_on, self.finished = 0.0, threading.Event(), threading.Event()
        self.last = LastSnapshot(grace, lambda: needed, SoloWorld(), "last", lambda: self.now)
        for step in range(7 - asked, 7):
            assert not self.last.is_due(step)
            self.now += pace
        self.thread = threading.Thread(target=self.last.hold, args=[self._finish], daemon=True)
        self.thread.start()
        while self.last._end is None:
            pass

    def _finish(self, end: float | None) -> None:
        self.finished.set()
        self.go_on.wait(60)

    def end(self) -> None:
        """Let the signal go."""
        assert self.finished.wait(60)
        self.go_on.set()
        self.thread.join(60)
        assert not self.thread.is_alive()


def test_before_sigterm_nothing_is_due() -> None:
    last = LastSnapshot(30, lambda: 1.0, SoloWorld(), "last")
    assert not last.is_due(1)
    last.settle()
    assert not last.is_due(2)


def test_it_is_due_once_and_then_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    held = Held(1000, 3.0)
    assert held.last.is_due(7)
    assert not held.finished.is_set()
    held.last.settle()  # the snapshot is in flight
    held.end()
    assert caplog.messages == ["SIGTERM: a last snapshot from step 7 on: it needs 3.0 s, and a step 1.0 s, of 1000.0 s"]
    assert not held.last.is_due(8)  # a handler that returns lets training go on


def test_a_loop_that_takes_no_snapshot_after_the_answer_is_not_waited_for() -> None:
    held = Held(1000, 3.0)
    assert [held.last.is_due(step) for step in (7, 8)] == [True, False]
    held.end()


@pytest.mark.parametrize(
    ("needed", "pace", "asked", "why"),
    [
        (999.0, 0.1, 2, None),
        (999.0, 1.0, 2, "it needs 999.0 s, and a step 1.0 s, of 1000.0 s"),
        (None, 1.0, 2, "no snapshot was measured yet"),
        (3.0, 1.0, 0, "due() was not called yet"),
    ],
)
def test_what_is_not_durable_in_time_is_not_taken(
    needed: float | None, pace: float, asked: int, why: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    held = Held(1000, needed, pace=pace, asked=asked)
    assert held.last.is_due(7) is (why is None)
    held.last.settle()
    held.end()
    (line,) = caplog.messages
    if why is not None:
        assert line == f"SIGTERM: no last snapshot: {why}. Those in flight are finished"


def test_a_loop_that_asks_too_late_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 1.0, 1.0])  # two steps; SIGTERM
    last = LastSnapshot(30, lambda: 3.0, SoloWorld(), "last", lambda: next(times, 30.0))
    assert [last.is_due(1), last.is_due(2)] == [False, False]
    done: list[bool] = []
    last.hold(lambda end: done.append(True))
    assert done == [True]
    assert caplog.messages[-1] == "SIGTERM: no last snapshot: due() was not called in time"


def test_a_loop_that_ends_before_it_is_told(caplog: pytest.LogCaptureFixture) -> None:
    held = Held(1000, 3.0)
    held.last._bell.wait_for(lambda: held.last._answer)
    held.last.end()
    held.end()
    assert caplog.messages[-1] == "SIGTERM: no last snapshot: the loop has ended. Those in flight are finished"
    held.last.end()
    assert len(caplog.messages) == 2


def test_without_a_grace_time_nothing_waits() -> None:
    done: list[bool] = []
    last = LastSnapshot(None, lambda: 1.0, SoloWorld(), "last")
    last.hold(lambda end: done.append(True))
    assert done == [True]
    assert not last.is_due(1)
