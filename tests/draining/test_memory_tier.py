"""Memory as the first tier: it outlives the process, holds few checkpoints, and refuses what does not fit."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from far_store import FarStore, Held

import datastates as ds
from datastates.commit import run
from datastates.commit.tiers import tier_of
from datastates.errors import StorageError
from datastates.providers import from_state_dict
from datastates.storage import Location
from datastates.testing import equal

SHM = Path("/dev/shm")
LOOP = """
import os, signal, sys
import numpy as np
import datastates as ds
from datastates.providers import from_state_dict
checkpointer = ds.Checkpointer(sys.argv[1], tiers=sys.argv[2])
state = {"w": np.full(100_000, 7.0, np.float32), "step": 7}
checkpointer.snapshot([from_state_dict("model", state)], step=7).wait_committed()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def memory() -> Iterator[Path]:
    if not tier_of(Location(SHM)).in_memory:
        pytest.skip("/dev/shm is not in memory here")
    place = SHM / f"datastates-{uuid.uuid4().hex}"
    yield place
    subprocess.run(["rm", "-rf", str(place)], check=True)


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(100_000, step, np.float32), "step": step}


def save(checkpointer: ds.Checkpointer, step: int) -> ds.Snapshot:
    taken = checkpointer.snapshot([from_state_dict("model", state(step))], step=step)
    taken.wait_committed()
    return taken


def steps_in(place: Path) -> list[int]:
    return sorted(one.step for one in tier_of(Location(place)).checkpoints())


def test_what_is_in_memory_outlives_the_process(memory: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    (tmp_path / "file").write_bytes(b"")  # a tier that cannot be made: nothing is brought there
    killed = subprocess.run([sys.executable, "-c", LOOP, str(memory), str(tmp_path / "file" / "x")], check=False)
    assert killed.returncode == -signal.SIGKILL
    with ds.Checkpointer(memory, tiers=disk) as checkpointer:
        live = state(0)
        restored = checkpointer.restore([from_state_dict("model", live)])
        assert restored is not None
        assert restored.path == memory / "step-00000007"
        assert equal(live, state(7))
        save(checkpointer, 8)
    assert steps_in(memory) == [8]
    assert steps_in(disk) == [7, 8]


def test_memory_holds_the_newest_and_few_that_are_due(memory: Path, store: FarStore) -> None:
    store.before = held = Held("upload")
    with ds.Checkpointer(memory, tiers="far://bucket/run") as checkpointer:
        save(checkpointer, 1)
        assert held.reached.wait(60)
        for step in range(2, 7):
            save(checkpointer, step)
        assert steps_in(memory) == [1, 5, 6]  # the first is being read
        held.go.set()
        checkpointer.wait_drained()
        assert steps_in(memory) == [6]
        assert not checkpointer._place.drains._every[0].backlog._own  # nor does it remember what has gone
    assert sorted(one.step for one in tier_of(Location("far://bucket/run")).checkpoints()) == [1, 5, 6]


def test_memory_alone_keeps_what_it_is_told(memory: Path) -> None:
    with ds.Checkpointer(memory) as checkpointer:
        for step in (1, 2, 3):
            save(checkpointer, step)
    assert steps_in(memory) == [1, 2, 3]


def test_what_does_not_fit_into_memory_is_refused(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "host_memory", lambda: 300_000)
    with ds.Checkpointer(memory, on_error="warn") as checkpointer:
        taken = checkpointer.snapshot([from_state_dict("model", state(1))], step=1)
        with pytest.raises(StorageError, match=r"needs 4.*KB of memory, and 300 KB are free") as caught:
            taken.wait_committed()
        assert caught.value.errno == errno.ENOSPC
        assert not checkpointer.steps()


def test_a_disk_is_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if tier_of(Location(tmp_path)).in_memory:
        pytest.skip("temporary files are in memory here")
    monkeypatch.setattr(run, "host_memory", lambda: 0)
    with ds.Checkpointer(tmp_path / "disk") as checkpointer:
        assert save(checkpointer, 1).committed
