"""What happens in one round of the campaign with tiers, drawn from its seed and printable."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

RUN, DRAIN, FETCH = "run", "drain", "fetch"


@dataclasses.dataclass(frozen=True)
class Save:
    """One snapshot. Its number is the order in time, and determines its contents."""

    number: int
    step: int
    wait: str
    """What to wait for before the next one: "committed", "drained", or "" for nothing."""


@dataclasses.dataclass(frozen=True)
class Process:
    """One process of a stage."""

    what: str
    """A rank of a run, or the command ``drain`` or ``fetch``."""
    rank: int = 0
    kill_at: int = 0
    """The request to a store at which it is killed; 0 for none."""
    after: int = 0
    """The number of reports after which a command begins; it begins at the latest when all others have ended."""
    step: int | None = None
    """The step that a command is asked for; None for all, or for the newest."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """Processes beside each other: the ranks of one run, commands, or both."""

    disk: int
    """The number of the first place: another one is a disk that is fresh, or comes back."""
    empties: bool
    """Whether the disk is emptied before."""
    processes: tuple[Process, ...]
    saves: tuple[Save, ...]
    restores: bool
    dead: tuple[int, int]
    """The requests of a process to the far place, from one to before another, that fail."""
    end: str
    """How the run ends by itself: "close" or "leave" (it exits at once)."""
    signal: str
    """The signal that the parent sends: "KILL", "TERM" or ""."""
    victim: int
    """The process that gets it."""
    event: int
    """The report of any process at which it is sent."""

    @property
    def harms(self) -> bool:
        """Whether some process may end early, or a request fail."""
        return bool(self.signal or self.dead[1] or self.end == "leave" or any(p.kill_at for p in self.processes))


@dataclasses.dataclass(frozen=True)
class Round:
    """Some stages with one far place, and a last one that nothing harms."""

    seed: int
    ranks: int
    memory: bool
    """Whether the first place is taken for memory, which holds few that are due."""
    keep: tuple[int | None, int | None]
    """``keep_last`` in the first place and in the far one."""
    incremental: bool
    """Whether what does not change is shared."""
    full_every: int | None
    """After how many saves all is written again."""
    stages: tuple[Stage, ...]

    @property
    def options(self) -> dict[str, Any]:
        """The settings of its runs that share bytes."""
        return {"incremental": True, "full_every": self.full_every} if self.incremental else {}


def draw(seed: int) -> Round:
    """The round of a seed."""
    rng = random.Random(seed)
    ranks = rng.choice([1, 1, 2])
    numbers = iter(range(seed * 100 + 1, seed * 100 + 100))
    step, disk, stages = 0, 0, []
    for _ in range(rng.randint(1, 4)):
        saves = []
        for _ in range(rng.randint(1, 4)):
            step = max(1, step + rng.choice([0, 1, 1, 1, 1, 3, -2]))
            saves.append(Save(next(numbers), step, rng.choice(["", "", "committed", "committed", "drained"])))
        stages.append(_stage(rng, ranks, disk, saves))
        disk = rng.choice([disk, disk, disk, 0, 1])
    last = Save(next(numbers), step + 1, "drained")
    every = tuple(Process(RUN, rank) for rank in range(ranks))
    stages.append(Stage(disk, rng.random() < 0.3, every, (last,), True, (0, 0), "close", "", 0, 0))
    memory = rng.random() < 0.2
    keep = rng.choice([None, 1, 1, 2]), rng.choice([None, None, None, 1, 2])
    return Round(seed, ranks, memory, keep, rng.random() < 0.5, rng.choice([None, None, 2, 3]), tuple(stages))


def _stage(rng: random.Random, ranks: int, disk: int, saves: list[Save]) -> Stage:
    what = rng.choice(["run", "run", "run", "beside", "beside", "commands"])
    every = [Process(RUN, rank) for rank in range(ranks)] if what != "commands" else []
    for _ in range({"run": 0, "beside": rng.randint(1, 2), "commands": rng.randint(1, 3)}[what]):
        step = rng.choice([None, None, None, rng.choice(saves).step])
        after = rng.choice([0, rng.randint(1, 3 * ranks * len(saves) + 1)]) if what == "beside" else 0
        every.append(Process(rng.choice([DRAIN, DRAIN, FETCH]), after=after, step=step))
    how = rng.choice(["", "request", "request", "request", "KILL", "KILL", "TERM"])
    if how == "request":
        victim = rng.randrange(len(every))
        every[victim] = dataclasses.replace(every[victim], kill_at=int(rng.choice([30, 150, 600]) * rng.random()) + 1)
    start = rng.choice([1, 1, 5, 20, 60])
    dead = (start, rng.choice([start + 3, start + 30, 10**9])) if rng.random() < 0.25 else (0, 0)
    return Stage(
        disk,
        rng.random() < 0.25,
        tuple(every),
        tuple(saves) if what != "commands" else (),
        rng.random() < 0.85,
        dead,
        rng.choice(["close", "close", "leave"]),
        how if how in ("KILL", "TERM") else "",
        rng.randrange(len(every)),
        rng.randint(1, 4 * len(saves) + 2),
    )
