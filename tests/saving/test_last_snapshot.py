"""The last snapshot after SIGTERM: taken if it can be durable in time, and the log says which."""

from __future__ import annotations

import threading

import pytest

from datastates.saving.last_snapshot import LastSnapshot


class Held:
    """A LastSnapshot whose SIGTERM has come, with a thread that holds it back."""

    def __init__(self, grace: float, needed: float | None) -> None:
        self.asked, self.finished = threading.Event(), threading.Event()
        self.needed = needed
        self.last = LastSnapshot(grace, self._needed)
        self.thread = threading.Thread(target=self.last.hold, args=[self.finished.set], daemon=True)
        self.thread.start()

    def _needed(self) -> float | None:
        self.asked.set()
        return self.needed

    def __enter__(self) -> Held:
        assert self.asked.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.join(60)
        assert self.finished.is_set()
        assert self.last.is_due(99) is None  # a handler that returns lets training go on


def test_before_sigterm_it_says_nothing() -> None:
    last = LastSnapshot(30, lambda: 1.0)
    assert last.is_due(1) is None
    last.settle()
    assert last.is_due(2) is None


def test_it_is_due_once_and_then_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with Held(1000, 3.0) as held:
        assert held.last.is_due(7) is True
        assert not held.finished.is_set()
        held.last.settle()  # the snapshot is in flight
    (line,) = caplog.messages
    assert line.startswith("SIGTERM: a last snapshot after step 7: it needs 3.0 s, ")


def test_a_loop_that_takes_no_snapshot_after_the_answer_is_not_waited_for() -> None:
    with Held(1000, 3.0) as held:
        assert held.last.is_due(7) is True
        assert held.last.is_due(8) is False


@pytest.mark.parametrize(("needed", "why"), [(2000.0, "it needs 2000.0 s, "), (None, "none was measured yet")])
def test_what_is_not_durable_in_time_is_not_taken(
    needed: float | None, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Held(1000, needed):
        pass
    (line,) = caplog.messages
    assert line.startswith(f"SIGTERM: no last snapshot: {why}")
    assert line.endswith("Those in flight are finished")


def test_while_those_in_flight_are_finished_nothing_is_due() -> None:
    asked, go_on = threading.Event(), threading.Event()
    last = LastSnapshot(1000, lambda: None)

    def finish() -> None:
        asked.set()
        go_on.wait(60)

    thread = threading.Thread(target=last.hold, args=[finish], daemon=True)
    thread.start()
    assert asked.wait(60)
    assert last.is_due(3) is False
    go_on.set()
    thread.join(60)
    assert last.is_due(4) is None


def test_a_loop_that_asks_too_late_is_not_waited_for() -> None:
    times = iter([0.0, 0.0, 28.0])  # SIGTERM; there is time; it is over
    done: list[bool] = []
    last = LastSnapshot(30, lambda: 29.999, lambda: next(times, 30.0))
    last.hold(lambda: done.append(True))
    assert done == [True]


def test_without_a_grace_time_nothing_waits() -> None:
    done: list[bool] = []
    last = LastSnapshot(None, pytest.fail)
    last.hold(lambda: done.append(True))
    assert (done, last.is_due(1)) == ([True], None)
