"""Each host has a directory of its own: a checkpoint is one if every host has its part, and is restored from there."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from per_host_job import OPTIONS, RANKS, SHAPES, host_of, names, restore, save
from split_state import Split

import datastates as ds
from datastates.commit import manifest
from datastates.commit.spread_tier import SpreadTier
from datastates.errors import CommitError, RestoreError, SettingsError, StorageError, UncertainError
from datastates.storage import Location, folders_of


def test_each_host_keeps_its_part(job: Any, tmp_path: Path) -> None:
    paths = job(save(1, 2))
    assert paths == [[tmp_path / host_of(r) / "run" / f"step-0000000{s}" for s in (1, 2)] for r in range(RANKS)]
    for host, ranks in (("a", (0, 1)), ("b", (2, 3))):
        assert names(tmp_path / host / "run") == ["step-00000001", "step-00000002"]
        files = ["catalog.bin", "manifest.json", *(f"rank-0000{rank}.pt" for rank in ranks)]
        assert names(tmp_path / host / "run" / "step-00000002") == files
    assert job(restore) == [2] * RANKS


def test_ranks_of_any_hosts_may_share_a_directory(job: Any, tmp_path: Path) -> None:
    def mixed(rank: int) -> str:
        return "aba"[rank]

    assert job(save(1), mixed, 3) == [[tmp_path / mixed(rank) / "run" / "step-00000001"] for rank in range(3)]
    files = ["catalog.bin", "manifest.json", "rank-00000.pt", "rank-00002.pt"]
    assert names(tmp_path / "a" / "run" / "step-00000001") == files
    assert job(restore, mixed, 3) == [1] * 3
    assert job(save(2), lambda rank: "c") == [[tmp_path / "c" / "run" / "step-00000002"]] * RANKS


def test_a_directory_that_fails_undoes_the_others(job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = SpreadTier.publish

    def fail(tier: SpreadTier, pending: Any, *rest: Any) -> Any:
        if tier.hosts.leader == 2 and pending.target.name == "step-00000002":
            raise StorageError(5, "write", "here")
        return publish(tier, pending, *rest)

    monkeypatch.setattr(SpreadTier, "publish", fail)
    told = job(save(1, 2, 3))
    assert [str(one[1]) for one in told] == [
        str(told[2][1]) if r == 2 else f"rank 2: {told[2][1]}" for r in range(RANKS)
    ]
    assert [type(one[1]) for one in told] == [CommitError, CommitError, StorageError, CommitError]
    for host in "ab":
        assert names(tmp_path / host / "run") == ["step-00000001", "step-00000003"]
    assert job(restore) == [3] * RANKS


def test_a_directory_that_cannot_undo_leaves_it_open(job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tier: SpreadTier, pending: Any, *rest: Any) -> Any:
        if tier.hosts.leader == 2:
            raise StorageError(5, "write", "here")
        return publish(tier, pending, *rest)

    publish = SpreadTier.publish
    with monkeypatch.context() as patch:
        patch.setattr(SpreadTier, "publish", fail)
        patch.setattr(SpreadTier, "spoil", lambda tier, pending: False)
        told = job(save(1))
    assert [type(one[0]) for one in told] == [UncertainError] * RANKS
    assert names(tmp_path / "a" / "run") == ["step-00000001"]
    assert names(tmp_path / "b" / "run")[0].startswith("step-00000001.partial-")
    assert job(restore) == [1] * RANKS
    assert names(tmp_path / "b" / "run") == ["step-00000001"]


def number(path: Path) -> int:
    return manifest.open(Location(path)).sequence or 0


def test_an_empty_disk_is_told_by_name(job: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job(save(1, 2))
    shutil.rmtree(tmp_path / "b" / "run" / "step-00000002")
    assert job(restore) == [1] * RANKS
    assert "step 2 is passed over: what ranks 2-3 wrote of it is in none of" in caplog.text
    shutil.rmtree(tmp_path / "b")
    assert job(restore) == [None] * RANKS
    # what is saved now is newer than what is not whole. That goes only where a whole one supersedes it
    job(save(1))
    assert names(tmp_path / "a" / "run") == ["step-00000001.r1", "step-00000002"]
    assert names(tmp_path / "b" / "run") == ["step-00000001"]
    assert job(restore) == [1] * RANKS
    # a number is above those of all hosts
    shutil.rmtree(tmp_path / "a")
    job(save(4))
    numbers = [number(tmp_path / host / "run" / "step-00000004") for host in "ab"]
    assert numbers[0] == numbers[1] > number(tmp_path / "b" / "run" / "step-00000001")


def test_what_another_host_has_is_refused_by_name(job: Any, tmp_path: Path) -> None:
    job(save(1))
    for rank, error in enumerate(job(restore, lambda rank: "ba"[rank // 2])):  # the ranks have moved
        assert isinstance(error, RestoreError)
        assert f"rank-0000{rank}.pt of step 1 is needed and is not in" in str(error)
        assert (
            f"but in {socket.gethostname()}:{tmp_path}/{host_of(rank)}/run: start the ranks where they ran, or"
            in str(error)
        )
    for error in job(restore, lambda rank: "cab"[rank], 3):  # rank 0 is on a new host
        assert isinstance(error, RestoreError)
        assert "step 1 is needed and is not in" in str(error)


def test_arrays_that_hosts_hold_alike_are_written_once(
    job: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = [Split.replicas("same", SHAPES, rank, RANKS) for rank in range(RANKS)]
    job(lambda ckpt, _, rank: save(1, 2)(ckpt, [state[rank]], rank))
    assert [one.message for one in caplog.records if "hold some arrays alike" in one.message] == [
        "per_host: ranks of several hosts hold some arrays alike, and one of them writes each. The other hosts "
        "restore them from tiers= only"
    ]
    told = job(lambda ckpt, _, rank: restore(ckpt, [state[rank]], rank))
    assert all(isinstance(error, RestoreError) and "is needed and is not in" in str(error) for error in told)
    tiers = {"tiers": [tmp_path / "far"]}
    job(lambda ckpt, _, rank: (save(4)(ckpt, [state[rank]], rank), ckpt.wait_drained(60)), **tiers)
    assert job(lambda ckpt, _, rank: restore(ckpt, [state[rank]], rank), **tiers) == [4] * RANKS
    caplog.clear()
    job(save(3))
    assert "hold some arrays alike" not in caplog.text


def test_every_directory_deletes_what_rank_0_deletes(job: Any, tmp_path: Path) -> None:
    assert job(save(1, 2, 3, 4), keep_last=2, keep_every=3) == [
        [tmp_path / host_of(rank) / "run" / f"step-0000000{step}" for step in (1, 2, 3, 4)] for rank in range(RANKS)
    ]
    for host in "ab":
        assert names(tmp_path / host / "run") == ["step-00000003", "step-00000004"]
    # a part without the others goes once enough is newer
    shutil.copytree(tmp_path / "b" / "run" / "step-00000003", tmp_path / "kept")
    job(save(5, 6), keep_last=2)
    shutil.copytree(tmp_path / "kept", tmp_path / "b" / "run" / "step-00000003")
    job(save(7), keep_last=2)
    for host in "ab":
        assert names(tmp_path / host / "run") == ["step-00000006", "step-00000007"]


def test_what_hosts_have_drains_to_a_place_that_all_reach(job: Any, tmp_path: Path) -> None:
    def saved(ckpt: ds.Checkpointer, state: list[Any], rank: int) -> Any:
        return save(1, 2)(ckpt, state, rank), ckpt.wait_drained(60)

    tiers = {"tiers": [tmp_path / "far"]}
    assert [paths[1] for paths, _ in job(saved, **tiers)] == [
        tmp_path / host_of(rank) / "run" / "step-00000002" for rank in range(RANKS)
    ]
    assert names(tmp_path / "far") == ["step-00000001", "step-00000002"]
    assert names(tmp_path / "far" / "step-00000002")[2:] == [f"rank-0000{rank}.pt" for rank in range(RANKS)]
    # each container is read from the nearest place: ranks that have moved, and a host without a disk, read from afar
    assert job(restore, lambda rank: "ba"[rank // 2], **tiers) == [2] * RANKS
    assert job(restore, lambda rank: "cab"[rank % 3], **tiers) == [2] * RANKS
    shutil.rmtree(tmp_path / "b")
    assert job(restore, **tiers) == [2] * RANKS
    shutil.rmtree(tmp_path / "far")
    assert job(restore, **tiers) == [None] * RANKS


def test_what_hosts_have_left_is_brought_by_the_next_run(job: Any, tmp_path: Path) -> None:
    """One rank of each host brings the containers that lie there."""
    job(save(1, 2))
    tiers = {"tiers": [tmp_path / "far"]}
    job(lambda ckpt, state, rank: (save(3)(ckpt, state, rank), ckpt.wait_drained(60)), **tiers)
    assert names(tmp_path / "far") == [f"step-0000000{step}" for step in (1, 2, 3)]
    for host in "ab":
        shutil.rmtree(tmp_path / host)
    assert job(lambda ckpt, state, rank: ckpt.restore(state, step=1).step, **tiers) == [1] * RANKS


def test_parts_that_do_not_fit_are_refused(threads: Any, tmp_path: Path) -> None:
    def one(rank: int) -> Any:
        with ds.Checkpointer(tmp_path / "ab"[rank] / "run", **OPTIONS) as ckpt:
            state = [Split.rows("model", SHAPES, 0, 2)]
            taken = ckpt.snapshot(state, step=1)
            ckpt.wait()
            return str(taken.exception()), names(tmp_path / "ab"[rank] / "run")

    assert (
        threads(2, one)
        == [
            (
                "the ranks' parts do not make one state. Their files are on several hosts: "
                "Checkpointer.check() names the keys",
                [],
            )
        ]
        * 2
    )


def test_the_setting_is_the_same_on_all_ranks(threads: Any, tmp_path: Path) -> None:
    for odd, text in ((1, "per_host: rank 1 does not set it, and rank 0 does"), (0, "rank 0 writes to")):
        told = threads(2, lambda rank, odd=odd: ds.Checkpointer(tmp_path / "run", per_host=rank != odd))
        assert [type(one) for one in told] == [CommitError] * 2
        assert text in str(told[0])
    with pytest.raises(SettingsError, match="per_host: ranks cannot meet in a directory that is another one on each"):
        ds.Checkpointer(tmp_path, per_host=True, rank=0, world_size=2)


def kind_of(told: Path | Exception) -> str:
    return "committed" if isinstance(told, Path) else "uncertain" if isinstance(told, UncertainError) else "failed"


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(s, marks=pytest.mark.by_hand) for s in range(3, 12))])
def test_disks_that_fail_at_random_keep_the_promises(
    seed: int, job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was reported as committed is restored by the next run, or a newer step is; what has failed never is."""
    draw, now, most = random.Random(seed), threading.local(), 0.0
    folders = type(folders_of(Location(tmp_path)))

    def failing(owner: Any, name: str) -> None:
        whole = getattr(owner, name)

        def call(self: Any, path: Location, *rest: Any, **named: Any) -> Any:
            if getattr(now, "is_second_phase", False) and draw.random() < most:
                raise StorageError(5, name, str(path))
            return whole(self, path, *rest, **named)

        monkeypatch.setattr(owner, name, call)

    def marking(name: str) -> None:
        whole = getattr(SpreadTier, name)

        def call(self: SpreadTier, *rest: Any) -> Any:
            now.is_second_phase = True
            try:
                return whole(self, *rest)
            finally:
                now.is_second_phase = False

        monkeypatch.setattr(SpreadTier, name, call)

    for name in ("rename", "create", "sync_folder", "remove", "remove_tree"):
        failing(folders, name)
    for name in ("publish", "spoil", "forget"):
        marking(name)
    outcomes: dict[str, set[int]] = {"committed": {0}, "failed": set(), "uncertain": set()}
    for run in range(6):
        most = draw.choice([0.0, 0.05, 0.2, 0.5])

        def do(ckpt: ds.Checkpointer, state: list[Any], rank: int, run: int = run) -> Any:
            found, listed = restore(ckpt, state, rank), ckpt.steps()
            told = save(*(3 * run + number for number in (1, 2, 3)))(ckpt, state, rank)
            return found, listed, [kind_of(one) for one in told]

        told = job(do, keep_last=2)
        assert told == told[:1] * RANKS
        found, listed, kinds = told[0]
        assert (found or 0) >= max(outcomes["committed"])
        assert not outcomes["failed"] & {*listed}
        for number, kind in enumerate(kinds, 1):
            outcomes[kind].add(3 * run + number)


LOOP = """
import os, sys
import torch.distributed as dist
import datastates as ds
from datastates.executor.executor import arm_faults
from datastates.providers import PickledObjectProvider
sys.path.insert(0, sys.argv[1])
from per_host_job import OPTIONS, RANKS, SHAPES, host_of, names, restore, save
from split_state import Split

SHAPES = {"w": (96, 40), "b": (33,), "odd": (7, 3, 5)}
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
loop = {"of": rank}
state = [Split.rows("model", SHAPES, rank, ranks), PickledObjectProvider("loop", loop.copy, loop.update)]
hosts, dead, where, *steps = sys.argv[3:]
ckpt = ds.Checkpointer(os.path.join(sys.argv[2], hosts[rank], "run"), per_host=True, rank_timeout=3, on_error="warn")
found = ckpt.restore(state)
assert found is None or not state[0].wrong(found.step)
print("restored", found and found.step, flush=True)
dist.barrier()
for step in map(int, steps):
    if step == 2 and str(rank) in dead:
        arm_faults(where)
    taken = ckpt.snapshot([state[0].fill(step), *state[1:]], step=step)
    ckpt.wait()
    print(type(taken.exception()).__name__, step, flush=True)
ckpt.close()
sys.stdout.flush()
os._exit(0)
"""

# ranks, where they are killed while they save step 2, and whether the next run has that step
KILLED = [
    ("2", "barrier.post=kill", False),  # before its vote
    ("2", "barrier.wait=kill", True),  # before it hears that all have voted
    ("2", "store.write=kill", True),  # the catalog
    ("2", "store.sync=kill@2", True),  # the manifest
    ("2", "store.rename=kill", True),
    ("2", "store.unlock=kill", True),
    ("2", "barrier.post=kill@2", True),  # before it tells that it has committed
    ("2", "barrier.wait=kill@2", True),
    ("3", "barrier.wait=kill", True),  # leads no host
    ("23", "barrier.wait=kill", True),  # a whole host
    ("0", "barrier.decide=kill", False),  # with all votes
    ("0", "barrier.publish=kill", False),
    ("0", "store.write=kill", None),  # the others may not have heard that all have voted: their store ends, too
    ("0", "store.rename=kill", None),
    ("0", "store.unlock=kill", True),
    ("0", "barrier.decide=kill@2", True),  # all have committed
    ("0", "barrier.publish=kill@2", True),
]


@pytest.mark.by_hand
@pytest.mark.parametrize(
    ("dead", "where", "is_there"),
    [*KILLED[::8], *(pytest.param(*c, marks=pytest.mark.by_hand) for c in KILLED if c not in KILLED[::8])],
)
def test_ranks_are_killed(dead: str, where: str, is_there: bool | None, ranks: Any, tmp_path: Path) -> None:
    """No step that was reported as committed is lost, and one that a host has committed is completed on the others."""
    words = (Path(__file__).parent, tmp_path, "aabb", dead)
    done = ranks(RANKS, LOOP, *words, where, 1, 2, may_fail=[*map(int, dead)])
    assert all(done[int(rank)].returncode == -signal.SIGKILL for rank in dead)
    said = [one.stdout.split("\n") for rank, one in enumerate(done) if str(rank) not in dead]
    assert all(lines[:2] == ["restored None", "NoneType 1"] for lines in said)
    told = {lines[2] for lines in said}
    if is_there is None:
        is_there = any((tmp_path / host / "run" / "step-00000002").is_dir() for host in "ab")
    if is_there:
        assert told <= {"UncertainError 2", "RanksMissingError 2", "UnreachableError 2", "NoneType 2"}
    else:
        assert "NoneType 2" not in told
    done = ranks(RANKS, LOOP, *words, where, 3)
    assert [one.stdout.split("\n")[:2] for one in done] == [[f"restored {1 + is_there}", "NoneType 3"]] * RANKS
    for host in "ab":
        assert names(tmp_path / host / "run") == [f"step-0000000{step}" for step in (1, *([2] if is_there else []), 3)]


RUNS = """
import os, sys
from pathlib import Path
import torch.distributed as dist
import datastates as ds
sys.path[:0] = [sys.argv[1], os.path.join(os.path.dirname(sys.argv[1]), "support")]
from in_ranks import wait_for
from per_host_job import OPTIONS, RANKS, SHAPES, host_of, names, restore, save
from split_state import Split

dist.init_process_group("gloo")
rank, root, is_new = dist.get_rank(), Path(sys.argv[2]), sys.argv[3] == "new"
state = Split.rows("model", {"w": (96, 40)}, rank, 2)
wait_for(lambda: not is_new or (root / "old").exists(), "the other run")
with ds.Checkpointer(root / "ab"[rank] / "run", per_host=True, rank_timeout=20, on_error="warn") as ckpt:
    for step in (2,) if is_new else (1, 3):
        wait_for(lambda: step < 3 or (root / "new").exists(), "the other run")
        taken = ckpt.snapshot([state.fill(step)], step=step)
        ckpt.wait()
        print(step, type(taken.exception()).__name__, flush=True)
        dist.barrier()
        (root / sys.argv[3]).touch()
dist.destroy_process_group()
"""


@pytest.mark.by_hand
def test_a_newer_run_ends_an_older_one_on_every_host(ranks: Any, tmp_path: Path) -> None:
    words = (Path(__file__).parent, tmp_path)
    with ThreadPoolExecutor(2) as pool:
        old, new = (pool.submit(ranks, 2, RUNS, *words, which) for which in ("old", "new"))
    assert [one.stdout.splitlines() for one in old.result()] == [["1 NoneType", "3 FencedError"]] * 2
    assert [one.stdout.splitlines() for one in new.result()] == [["2 NoneType"]] * 2
    for host in "ab":
        assert names(tmp_path / host / "run") == ["step-00000001", "step-00000002"]
