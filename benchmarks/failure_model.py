"""Simulate a training job that fails at random moments and goes on from its last durable snapshot. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Setting:
    """The parameters of a simulated job, in seconds.

    Attributes:
        cost: Time for which training waits for each snapshot.
        durable: Time from the call until a snapshot is durable. The next one waits for it.
        mtbf: Mean time between failures.
        restart: Time from a failure until training goes on.
    """

    cost: float
    durable: float
    mtbf: float
    restart: float


def lives(mtbf: float, count: int, seed: int) -> Any:
    """The times from each restart to the next failure, exponential with mean ``mtbf``.

    There is one in each of ``count`` ranges of equal probability, so that few of them tell small differences.
    """
    ranges = np.arange(count) + np.random.default_rng(seed).random(count)
    return -mtbf * np.log1p(-ranges / count)


def useful(setting: Setting, interval: float, times: Any) -> float:
    """The share of the time whose work was not lost.

    Args:
        setting: The job.
        interval: Seconds from one snapshot to the next.
        times: The times of :func:`lives`.
    """
    interval = max(interval, setting.durable)
    work = interval - setting.cost  # of each interval; its snapshot begins at the end of the work
    durable = np.floor((times - work - setting.durable) / interval) + 1
    total = float(times.sum()) + len(times) * setting.restart
    return float(np.maximum(durable, 0).sum()) * work / total


def best(setting: Setting, times: Any, *, step: float = 1.01) -> float:
    """The interval with the largest share of useful time, of all that are ``step`` times as long as the one before."""
    shortest, longest = max(setting.durable, 1.001 * setting.cost), 4 * setting.mtbf
    count = int(np.log(longest / shortest) / np.log(step)) + 1
    intervals = shortest * step ** np.arange(count)
    shares = np.array([useful(setting, interval, times) for interval in intervals.tolist()])
    top = int(shares.argmax())
    if 0 < top < count - 1:  # shares differ little near the best one: a parabola through all of those tells its place
        near = np.flatnonzero(shares > shares[top] - (1 - shares[top]) * 0.02)
        bent, slope, _ = np.polyfit(np.log(intervals[near]), shares[near], 2)
        return float(np.exp(-slope / (2 * bent)))
    return float(intervals[top])
