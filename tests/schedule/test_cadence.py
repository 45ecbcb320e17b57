"""How often to save: the interval, the steps that it means, and the steps that all ranks agree on."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count, pairwise

import pytest

from datastates.config import Settings
from datastates.errors import SettingsError
from datastates.executor.timeline import TRAINING_THREAD, Span
from datastates.ranks.world import SoloWorld
from datastates.saving.snapshot import Snapshot, reach
from datastates.schedule.due import Costs, Due, best_interval, steps_to_wait

HOUR = 3600.0


def useful(interval: float, cost: float, mtbf: float) -> float:
    """The share of time that is not lost, up to a factor that does not depend on the interval."""
    return (interval - cost) / math.expm1(interval / mtbf)


@pytest.mark.parametrize("mtbf", [0.1 * HOUR, 6 * HOUR, 1000 * HOUR])
@pytest.mark.parametrize("cost", [0.001, 0.1, 3.0, 60.0])
def test_no_other_interval_loses_less(cost: float, mtbf: float) -> None:
    found = best_interval(cost, mtbf, 0.0)
    best = max((cost + mtbf * 1.01**-n for n in range(2500)), key=lambda t: useful(t, cost, mtbf))
    assert found == pytest.approx(best, rel=0.03)
    assert useful(found, cost, mtbf) >= 0.9999 * useful(best, cost, mtbf)


def test_it_begins_as_youngs() -> None:
    assert best_interval(0.001, HOUR, 0.0) == pytest.approx(math.sqrt(2 * 0.001 * HOUR), rel=1e-3)


def test_it_is_no_shorter_than_a_snapshot_takes_to_be_durable() -> None:
    assert best_interval(0.001, HOUR, 10.0) == 10.0
    assert best_interval(10.0, HOUR, 10.0) > 10.0


def test_where_saving_costs_more_than_a_failure_it_is_rare() -> None:
    assert best_interval(3 * HOUR, HOUR, 0.0) == 4 * HOUR


@pytest.mark.parametrize(
    ("elapsed", "steps", "wait"),
    [(10.0, 10, 72), (82.0, 82, 14), (94.0, 94, 4), (95.0, 95, 0), (200.0, 1, 0), (60.0, 1, 1), (70.0, 1, 0)],
)
def test_the_clock_is_looked_at_before_an_interval_is_over(elapsed: float, steps: int, wait: int) -> None:
    assert steps_to_wait(elapsed, steps, 100.0) == wait


def test_without_an_interval_the_distance_doubles() -> None:
    assert [steps_to_wait(1.0, steps, None) for steps in (1, 2, 4)] == [1, 2, 4]


class Clock:
    """A clock that each step moves on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def due_steps(due: Due, steps: range, clock: Clock, seconds: Callable[[int], float] = lambda step: 1.0) -> list[int]:
    found = []
    for step in steps:
        clock.now += seconds(step)
        if due(step):
            found.append(step)
    return found


def automatic(**more: object) -> Settings:
    return Settings.of({"every": "auto", "mtbf": "1h", **more})


def test_multiples_of_a_number_of_steps_are_due() -> None:
    due = Due(Settings.of({"every": 100}), lambda mtbf: None, SoloWorld(), "due")
    assert [step for step in range(250, 501) if due(step)] == [300, 400, 500]


def test_without_the_setting_nothing_is_due() -> None:
    with pytest.raises(SettingsError, match=r"every: due\(\) needs it"):
        Due(Settings.of({}), lambda mtbf: None, SoloWorld(), "due")(1)


def test_the_first_step_is_due_and_then_one_in_each_interval() -> None:
    clock = Clock()
    due = Due(automatic(), lambda mtbf: 100.0 if clock.now > 130 else None, SoloWorld(), "due", clock)
    found = due_steps(due, range(1, 1000), clock)
    assert found[0] == 1
    assert all(95 <= after - before <= 100 for before, after in pairwise(found))
    assert len(found) == 11


def test_steps_may_become_slower() -> None:
    clock = Clock()
    due = Due(automatic(), lambda mtbf: 1000.0, SoloWorld(), "due", clock)
    found = due_steps(due, range(1, 5000), clock, lambda step: 1.0 if step < 500 else 2.0)
    assert found[:3] == [1, 801, 1281]  # after 1102 and 960 s


def test_after_a_roll_back_an_interval_begins() -> None:
    clock = Clock()
    due = Due(automatic(), lambda mtbf: 100.0, SoloWorld(), "due", clock)
    assert due_steps(due, range(1, 150), clock) == [1, pytest.approx(98, abs=3)]
    assert due_steps(due, range(50, 130), clock) == []
    assert due_steps(due, range(130, 160), clock) == [pytest.approx(148, abs=3)]


def committed(begin: float, stalls: tuple[float, ...], durable: float, nbytes: int = 1000) -> Snapshot:
    snapshot = Snapshot(1, nbytes, begin)
    snapshot._spans += [Span("stall", TRAINING_THREAD, begin, begin + seconds, 0) for seconds in stalls]
    reach(snapshot, "committed", at=begin + durable)
    return snapshot


def test_costs_are_those_of_the_last_snapshots() -> None:
    costs = Costs(2, lambda: 100.0)
    assert costs.interval(HOUR) is None
    assert costs.seconds_until_durable() is None
    for begin, durable in zip(count(), (9.0, 2.0, 2.0, 4.0, 2.0, 2.0)):
        costs.note(committed(float(begin), (1.0, 0.5), durable))
    assert costs.interval(HOUR) == best_interval(1.5, HOUR, 2.0)
    assert costs.seconds_until_durable() == 4.0
    costs.note(Snapshot(7, 500, 98.5))
    costs.note(Snapshot(8, 1000, 95.0))
    assert costs.seconds_until_durable() == 4.5
    assert costs.interval(HOUR) == best_interval(1.5, HOUR, 2.0)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"every": "auto"}, "mtbf: every="),
        ({"every": 5, "mtbf": "6h"}, "mtbf: every="),
        ({"every": 0}, "every: "),
        ({"every": "often"}, "every: "),
        ({"every": "auto", "mtbf": "6 hours"}, "mtbf: "),
        ({"every": "auto", "mtbf": 0}, "mtbf: "),
        ({"every": "auto", "mtbf": "inf"}, "mtbf: "),
        ({"every": 5, "grace": 30}, "grace: it needs handle_sigterm=True"),
        ({"handle_sigterm": True, "grace": 30}, "grace: it needs .* every"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, object], match: str) -> None:
    with pytest.raises(SettingsError, match=match):
        Settings.of(options)


@pytest.mark.parametrize(
    ("text", "seconds"), [("6h", 21600), ("90 s", 90), ("1.5min", 90), ("2d", 172800), (5, 5), ("5", 5), (0.5, 0.5)]
)
def test_durations(text: object, seconds: float) -> None:
    assert Settings.of({"every": "auto", "mtbf": text}).mtbf == seconds
