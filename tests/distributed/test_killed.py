"""One of four ranks is killed in some phase: the others name it, all agree on the commit, and a new run goes on."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from datastates.cli import commands
from datastates.commit import fence, newest
from datastates.commit.tiers import tier_of

LOOP = Path(__file__).with_name("rank_loop.py")
RANKS = 4
SECONDS = 2.5
AT_ONCE = 8
"""Runs at the same time. They wait most of the time."""

# rank, where it is killed while it saves step 2, and whether that step is committed all the same
CASES = [
    (2, "die", False),  # while its state is captured
    (2, "write=kill", False),
    (2, "sync=kill", False),
    (2, "store.sync_directory=kill", False),
    (2, "barrier.post=kill", False),  # before its vote
    (2, "barrier.wait=kill", True),  # after its vote
    (0, "die", False),
    (0, "barrier.decide=kill", False),  # with all votes
    (0, "store.write=kill", False),  # the catalog
    (0, "store.sync=kill@2", False),  # the manifest
    (0, "store.rename=kill", False),
    (0, "store.unlock=kill", True),
    (0, "store.sync_directory=kill@3", True),
    (0, "barrier.publish=kill", True),  # before it has told
]


def options(**changed: object) -> str:
    return json.dumps(changed)


@pytest.fixture
def killed(ranks: Any, reports: Any, tmp_path: Path) -> Callable[[tuple[int, str, bool]], tuple[Path, Any]]:
    """Kill a rank while all ranks save step 2. Where that is committed, let the others try another step."""

    def run(case: tuple[int, str, bool]) -> tuple[Path, Any]:
        rank, where, committed = case
        root = tmp_path / f"{rank}-{where}"
        words = ["1", f"2/{where}", *(["3"] if committed else [])]
        variables = {"CONFUSED": str(rank), "OPTIONS": options(rank_timeout=SECONDS)}
        done = ranks(RANKS, LOOP, root, *words, may_fail=[rank], **variables)
        assert done[rank].returncode == -signal.SIGKILL, done[rank].stderr
        return root, reports(done)

    return run


@pytest.mark.by_hand
def test_a_rank_is_killed(killed: Any, ranks: Any) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ended = dict(zip(CASES, pool.map(killed, CASES), strict=True))
    for (dead, where, committed), (root, told) in ended.items():
        found = newest.committed(tier_of(root))
        assert list(found) == ([1, 2] if committed else [1]), where
        assert [rank["1"]["committed"] for rank in told] == ["step-00000001"] * RANKS
        for rank in set(range(RANKS)) - {dead}:
            said = told[rank][f"2/{where}"]
            # rank 0 may have begun to decide: then the others wait for its answer once more
            assert said["seconds"] < (2 * SECONDS if dead == 0 else SECONDS) + 1, where
            if committed:
                assert said["committed"] == found[2].name, where
                said = told[rank]["3"]
            assert said["error"] == "RanksMissingError", where
            assert f"rank {dead}" in said["text"], where
            assert told[rank]["close"]["seconds"] < SECONDS + 1, where

    # new ranks go through the directories one after the other, each with what its run has left
    roots = [root for root, _ in ended.values()]
    ranks(RANKS, LOOP, ":".join(map(str, roots)), 4, OPTIONS=options(rank_timeout=20))
    for (_, where, committed), root in zip(CASES, roots, strict=True):
        steps = [1, 2, 4] if committed else [1, 4]
        found = [path for path in sorted(root.iterdir()) if path.name != fence.FOLDER]
        assert [path.name for path in found] == [f"step-{step:08d}" for step in steps], where
        for path in found:
            assert commands.main(["verify", str(path)]) == 0
            assert not (path / ".lock").exists() or committed


@pytest.mark.long
def test_a_rank_is_killed_under_torch(ranks: Any, tmp_path: Path) -> None:
    """The ranks meet in the Store of torch.distributed, which rank 0's process hosts."""
    script = """
        import os, sys
        import torch.distributed as dist
        import datastates as ds
        from datastates._base import faults
        from datastates.errors import DatastatesError
        from datastates.providers import HostTensorProvider
        import torch

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        state = {f"layer {rank}": torch.zeros(1000)}
        dist.barrier()
        # what the provider holds belongs to one pipeline stage each: different keys on different ranks
        ckpt = ds.Checkpointer(sys.argv[1], rank_timeout=2, on_error="warn")
        for step in (1, 2, 3):
            if step == 2 and rank == 2:
                faults.arm(faults.Fault("barrier.post", "kill"))
            try:
                ckpt.snapshot([HostTensorProvider("model", state)], step=step).wait_committed()
                print(step, "committed")
            except DatastatesError as error:
                print(step, error)
        ckpt.close()
        sys.stdout.flush()
        os._exit(0)  # the process group cannot be left without all ranks
    """
    done = ranks(RANKS, script, tmp_path / "run", may_fail=[2])
    assert done[2].returncode == -signal.SIGKILL
    missing = [f"{n + 1} checkpointer/snapshot/{n}: no answer from rank 2 within 1.6 s" for n in (1, 2)]
    for rank in (0, 1, 3):
        assert done[rank].stdout.splitlines() == ["1 committed", *missing]
    assert list(newest.committed(tier_of(tmp_path / "run"))) == [1]
