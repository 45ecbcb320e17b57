"""Simulate a commit message by message: the ranks, the coordinator, and the one server of their Store. Pure.

Every call is a request. It takes ``latency`` to reach the server, where it waits for the requests that came before. The
server handles one request at a time. The answer takes ``latency`` to return. What the ranks call, in which order, and
how long they pause follows :mod:`datastates.ranks.board_world`, :mod:`datastates.ranks.store_board`,
:mod:`datastates.ranks.torch_keys` and :mod:`datastates.ranks.polling`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from datastates.ranks.polling import first, slowest

KEYS_AT_ONCE = 64
GROWTH = 1.5


@dataclass(frozen=True)
class Setting:
    """The parameters of a simulated commit, in seconds and bytes.

    Attributes:
        ranks: Number of ranks.
        skew: Time from the first to the last rank that persists. The others persist at random moments in between.
        latency: Network latency, one way.
        request: Server time for each request.
        byte: Additional server time for each byte, in or out.
        key: Additional server time for each key, in a request about many keys.
        vote: Bytes of a vote.
        decide: Time from the last vote in the coordinator's memory until the checkpoint is committed.
    """

    ranks: int
    skew: float
    latency: float
    request: float
    byte: float
    key: float
    vote: int
    decide: float


@dataclass(frozen=True)
class _Sleep:
    seconds: float


@dataclass(frozen=True)
class _Call:
    nbytes: int = 0
    keys: int = 0
    what: Callable[[], Any] = lambda: None


_Process = Generator["_Sleep | _Call", Any, None]


@dataclass
class Outcome:
    """When each event happened, in seconds after the last rank persisted.

    Attributes:
        heard: The coordinator had all votes in memory.
        committed: The checkpoint was committed.
        first, last: The first and the last rank learned of the commit.
        requests: Number of requests that the server answered.
        busy: Seconds for which the server was busy.
    """

    heard: float = 0.0
    committed: float = 0.0
    first: float = 0.0
    last: float = 0.0
    requests: int = 0
    busy: float = 0.0
    told: list[float] = field(default_factory=list, repr=False)


def pauses(ranks: int) -> Iterator[float]:
    """The seconds that a rank sleeps between two looks. They grow up to a limit."""
    longest = slowest(ranks)
    pause = first(longest)
    while True:
        yield min(pause, longest)
        pause *= GROWTH


class _Run:
    def __init__(self, setting: Setting, seed: int) -> None:
        self._setting = setting
        self._random = random.Random(seed)
        self.outcome = Outcome()
        self.now = 0.0
        self._marks = 0
        self._published = False

    def _mark(self) -> None:
        self._marks += 1

    def _publish(self) -> None:
        self._published = True

    def _rank(self, persisted: float) -> _Process:
        yield _Sleep(persisted)
        yield _Call(self._setting.vote)
        yield _Call(what=self._mark)
        for pause in pauses(self._setting.ranks):
            if (yield _Call(what=lambda: self._published)):
                break
            yield _Sleep(pause)
        yield _Call()
        self.outcome.told.append(self.now)
        yield _Call()  # removes its vote
        yield _Call()  # marks that it has read the answer

    def _coordinator(self, persisted: float) -> _Process:
        s = self._setting
        yield _Sleep(persisted)
        for pause in pauses(s.ranks):
            if (yield _Call(what=lambda: self._marks)) >= s.ranks - 1:
                break
            yield _Call()  # asks whether a rank has failed
            yield _Sleep(pause)
        yield _Call(keys=s.ranks - 1)
        for begin in range(1, s.ranks, KEYS_AT_ONCE):
            yield _Call(s.vote * min(KEYS_AT_ONCE, s.ranks - begin))
        yield _Call()  # the gate
        self.outcome.heard = self.now
        yield _Sleep(s.decide)
        self.outcome.committed = self.now
        yield _Call(what=self._publish)
        yield _Call()

    def run(self) -> Outcome:
        s = self._setting
        # the simulation counts time from the first rank that persists
        moments = [0.0, s.skew, *(self._random.uniform(0, s.skew) for _ in range(s.ranks - 2))][: s.ranks]
        self._random.shuffle(moments)
        processes = [self._rank(m) if rank else self._coordinator(m) for rank, m in enumerate(moments)]
        free, numbers = 0.0, itertools.count()
        events: list[tuple[float, int, _Process, _Call | None, Any]] = []
        for process in processes:
            heapq.heappush(events, (0.0, next(numbers), process, None, None))
        while events:
            self.now, _, process, call, answer = heapq.heappop(events)
            if call is not None:  # the call has reached the server
                cost = s.request + call.nbytes * s.byte + call.keys * s.key
                free = max(free, self.now) + cost
                self.outcome.requests += 1
                self.outcome.busy += cost
                heapq.heappush(events, (free + s.latency, next(numbers), process, None, call.what()))
                continue
            try:
                step = process.send(answer)
            except StopIteration:
                continue
            if isinstance(step, _Sleep):
                heapq.heappush(events, (self.now + step.seconds, next(numbers), process, None, None))
            else:
                heapq.heappush(events, (self.now + s.latency, next(numbers), process, step, None))
        o = self.outcome
        o.first, o.last = min(o.told) - s.skew, max(o.told) - s.skew
        o.heard, o.committed = o.heard - s.skew, o.committed - s.skew
        return o


def simulate(setting: Setting, seed: int) -> Outcome:
    """Simulate one commit. The ``seed`` determines when the ranks persist."""
    return _Run(setting, seed).run()
