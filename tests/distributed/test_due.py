"""Ranks whose clocks differ save at the same steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import datastates as ds
from datastates import _calls
from datastates.config import Settings
from datastates.errors import CommitError
from datastates.providers import HostTensorProvider
from datastates.saving.due import Due
from datastates.storage.location import Location

AUTO: dict[str, Any] = {"every": "auto", "mtbf": "1h"}


def due_of(rank: int, name: str) -> tuple[Due, list[float]]:
    """One rank's Due with an interval of 500 s, and its clock."""
    now = [0.0]
    world = _calls.open_world(Settings.of({}), Location(name))
    return Due(Settings.of(AUTO), lambda mtbf: 500.0, world, "due", lambda: now[0]), now


def test_all_ranks_save_at_the_same_steps_and_meet_rarely(threads: Any) -> None:
    def one(rank: int) -> tuple[list[int], int]:
        due, now = due_of(rank, "run")
        found = []
        for step in range(1, 2000):
            now[0] += 1.0 + rank
            if due(step):
                found.append(step)
        return found, due._asked

    outcomes = threads(3, one)
    assert outcomes == [outcomes[0]] * 3
    found, asked = outcomes[0]
    assert len(found) == 5
    assert asked < 6 * len(found)


def test_ranks_that_ask_about_different_steps_are_refused(threads: Any) -> None:
    def one(rank: int) -> bool:
        due, _ = due_of(rank, "run")
        return due(1 + rank) and due(2 + rank)

    for outcome in threads(2, one):
        assert isinstance(outcome, CommitError)
        assert "the ranks asked due() about different steps: step 2 on rank 0, step 3 on rank 1" in str(outcome)


def test_a_loop_that_saves_when_it_is_due(threads: Any, tmp_path: Path) -> None:
    def one(rank: int) -> tuple[list[int], list[int]]:
        state, found = np.zeros(1000), []
        with ds.Checkpointer(tmp_path, **AUTO) as ckpt:
            for step in range(1, 100):
                if ckpt.due(step):
                    ckpt.snapshot([HostTensorProvider(f"s{rank}", {"w": state})], step=step)
                    found.append(step)
            ckpt.wait()
            return found, ckpt.steps()

    (first, saved), (second, _) = threads(2, one)
    assert first == second == saved
    assert first[0] == 1


def test_several_ranks_take_no_last_snapshot(ranks: Any, tmp_path: Path) -> None:
    script = """
import os, sys
import datastates as ds
from datastates.errors import SettingsError
try:
    ds.Checkpointer(sys.argv[1], every=5, grace=30, handle_sigterm=True, rank=int(os.environ["RANK"]), world_size=2)
except SettingsError as error:
    print(error)
"""
    done = ranks(2, script, tmp_path)
    assert {d.stdout for d in done} == {"grace: only a single rank can take a last snapshot: leave it out\n"}
