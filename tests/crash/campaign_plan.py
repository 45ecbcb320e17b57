"""What happens in one round, drawn from its seed and printable."""

from __future__ import annotations

import dataclasses
import errno
import random
from typing import Any

from campaign_state import CHANGES
from steps import OPERATIONS

FAILURES = [errno.EIO, errno.ENOSPC]

READ_FAULTS = ["read=short", "read=eintr", "read=fail:5", "store.read=fail:5"]


@dataclasses.dataclass(frozen=True)
class Save:
    """One snapshot, and what comes after it."""

    number: int
    """The number of the save in the round. The state's contents are drawn from it."""
    step: int
    """Usually higher than the step before; sometimes the same, or lower as after a roll-back."""
    structure: int
    """The seed of the state's structure. If the save before has the same, the arrays stay and their contents change."""
    fault: str
    """The fault that is armed just before the save, as in DATASTATES_FAULTS; "" for none."""
    change: str
    """How the state changes once the call has returned; "" for no change, "step" for an optimizer's step."""
    gated: bool
    """Whether the change waits for the gate."""
    wait: str
    """What to wait for before the next save: "captured", "committed", or "" for nothing."""


@dataclasses.dataclass(frozen=True)
class Life:
    """One process: it restores the newest checkpoint, saves, and ends."""

    options: dict[str, Any]
    read_fault: str
    """The fault that is armed just before the restore."""
    saves: tuple[Save, ...]
    end: str
    """How it ends: "close"; "leave" (it exits at once); "kill" or "terminate" (a signal at an event)."""
    event: int
    """The number of the report at which the signal is sent."""


@dataclasses.dataclass(frozen=True)
class Round:
    """Some lives in one directory."""

    seed: int
    keep_last: int | None
    lives: tuple[Life, ...]


def draw(seed: int) -> Round:
    """The round of a seed."""
    rng = random.Random(seed)
    numbers = iter(range(seed * 100 + 1, seed * 100 + 100))
    step, lives = 0, []
    keep_last = rng.choice([None, None, 1, 2, 3])
    incremental = rng.random() < 0.5
    for _ in range(rng.randint(1, 3)):
        saves = []
        structure = rng.randrange(1 << 30)
        for _ in range(rng.randint(1, 4)):
            step = max(1, step + rng.choice([0, 1, 1, 1, 3, -2]))
            structure = rng.randrange(1 << 30) if rng.random() < 0.2 else structure
            saves.append(_save(rng, next(numbers), step, structure))
        end = rng.choice(["close", "close", "leave", "kill", "terminate"])
        options = {
            "host_cache": rng.choice(["2MiB", "4MiB"]),
            "block": "1MiB",
            "keep_last": keep_last,
            "io_backend": rng.choice(["auto", "pwrite"]),
            "direct_io": rng.random() < 0.7,
            "queue_depth": rng.choice([1, 2, 8]),
            "io_threads": rng.choice([1, 4]),
            "max_in_flight": rng.choice([1, 2, 3]),
            "handle_sigterm": end == "terminate",
            "on_error": "warn",
            "incremental": incremental,
        }
        read_fault = rng.choice(
            [*["" for _ in range(5)], "read=short", "read=eintr", "read=fail:5", "store.read=fail:5"]
        )
        lives.append(Life(options, read_fault, tuple(saves), end, rng.randint(1, 3 * len(saves) + 1)))
    return Round(seed, keep_last, tuple(lives))


def _save(rng: random.Random, number: int, step: int, structure: int) -> Save:
    change = rng.choice([*CHANGES, "step"]) if rng.random() < 0.6 else ""
    gated = rng.random() < 0.4
    fault = _fault(rng) if rng.random() < 0.3 else ""
    if change and not gated and rng.random() < 0.5:
        fault = f"write=delay:{rng.choice([5, 20])}@{rng.randint(1, 3)}"  # the change comes before the capture ends
    return Save(number, step, structure, fault, change, gated, wait=rng.choice(["", "", "captured", "committed"]))


def _fault(rng: random.Random) -> str:
    nth = rng.choice([1, 1, 2, 3, 5])
    point = rng.choice(["write", "write", "open", "sync", "close", "allocate"])
    action = rng.choice(["kill", "fail", "fail", "short" if point == "write" else "eintr"])
    if action in ("kill", "fail") and rng.random() < 0.5:
        point = f"store.{rng.choice(OPERATIONS)}"
    return f"{point}={action}{f':{rng.choice(FAILURES)}' * (action == 'fail')}@{nth}"
