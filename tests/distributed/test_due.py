"""Ranks whose clocks differ, or that SIGTERM reaches at different steps, save at the same steps."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import datastates as ds
from datastates import api
from datastates.config import Settings
from datastates.errors import CommitError
from datastates.providers import HostTensorProvider
from datastates.schedule.due import Due
from datastates.schedule.termination import LastSnapshot
from datastates.storage.location import Location

AUTO: dict[str, Any] = {"every": "auto", "mtbf": "1h"}


def due_of(rank: int, name: str) -> tuple[Due, list[float]]:
    """One rank's Due with an interval of 500 s, and its clock."""
    now = [0.0]
    world = api.open_world(Settings.of({}), Location(name))
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


@pytest.mark.parametrize("needed", [3.0, 2000.0])
def test_ranks_that_sigterm_reaches_at_different_steps_take_one_last_snapshot(
    needed: float, threads: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def one(rank: int) -> list[int]:
        world = api.open_world(Settings.of({}), Location("run"))
        last, found = LastSnapshot(1000, lambda: needed if rank == 2 else 1.0, world, "last"), []
        held = threading.Thread(target=last.hold, args=[lambda end: None], daemon=True)
        step = 0
        while held.ident is None or held.is_alive():
            step += 1
            if step == 5 + 3 * rank:
                held.start()
            if last.is_due(step):
                found.append(step)
                last.settle()
        return found

    first, *others = threads(3, one)
    assert others == [first, first]
    assert len(first) == (1 if needed == 3.0 else 0)
    assert all(step >= 11 for step in first)
    said = {line.partition(":")[2].partition(":")[0] for line in caplog.messages}
    assert said == {f" a last snapshot from step {first[0]} on" if first else " no last snapshot"}


def test_a_rank_that_sigterm_does_not_reach_keeps_nobody(threads: Any) -> None:
    def one(rank: int) -> list[bool]:
        world = api.open_world(Settings.of({}), Location("run"))
        last = LastSnapshot(0.2, lambda: 0.0, world, "last")
        if rank == 0:
            return []
        found = [last.is_due(1)]
        last.hold(lambda end: found.append(True))
        return [*found, last.is_due(2)]

    assert threads(2, one)[1] == [False, True, False]


@pytest.mark.parametrize("apart", [100.0, 600.0])
def test_a_rank_that_sigterm_reaches_after_another_gave_up_takes_no_last_snapshot_alone(
    apart: float, threads: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank gives up after half of the grace time of 1000 s."""

    def one(rank: int) -> bool:
        world = api.open_world(Settings.of({}), Location("run"))
        last = LastSnapshot(1000, lambda: 1.0, world, "last", wall=lambda: apart * rank)
        assert not last.is_due(1)
        held = threading.Thread(target=last.hold, args=[lambda end: None], daemon=True)
        held.start()
        while last._end is None and held.is_alive():
            pass
        found = last.is_due(2)
        last.settle()
        held.join(60)
        return found

    assert threads(2, one) == [apart == 100.0] * 2
    assert ("100" if apart == 100.0 else "SIGTERM reached the ranks 600.0 s apart") in caplog.messages[0]


@pytest.mark.long
def test_ranks_take_a_last_snapshot(ranks: Any, tmp_path: Path) -> None:
    script = """
import os, signal, sys
import numpy as np
import datastates as ds
from datastates.providers import HostTensorProvider
from datastates.ranks.world import open_world

rank = int(os.environ["RANK"])
called = []
signal.signal(signal.SIGTERM, lambda *_: called.append(True))
options = dict(rank=rank, world_size=2, host_cache="4MiB", block="1MiB")
with ds.Checkpointer(sys.argv[1], every=10**6, grace="10min", handle_sigterm=True, **options) as ckpt:
    def save(step):
        return ckpt.snapshot([HostTensorProvider(f"s{rank}", {"w": np.full(1000, step)})], step=step)
    save(1).wait_committed()
    step = 1
    while not called:
        step += 1
        if step == 5 + 10 * rank:
            os.kill(os.getpid(), signal.SIGTERM)
        if ckpt.due(step):
            save(step)
            print(step, flush=True)
"""
    first, second = ranks(2, script, tmp_path / "run")
    assert first.stdout == second.stdout
    assert int(first.stdout) >= 15
    assert sorted(p.name for p in (tmp_path / "run").glob("step-*")) == [
        "step-00000001",
        f"step-{int(first.stdout):08}",
    ]
