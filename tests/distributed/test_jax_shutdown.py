"""jax.distributed.shutdown() in the middle of snapshots and between them: each is committed or not, and is told so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax_meshes
import pytest
from jax_ranks import HEAD, RANKS, Reports, reports

import datastates as ds

SHUTDOWNS = f"""{HEAD}
OPTIONS["rank_timeout"] = 600  # far longer than this test may take: whoever waits for its end fails


def again(word):
    '''Begin a new run at the same address, while the checkpointer of the old one is still open.'''
    global client, ckpt
    report(f"between {{word}}", **outcome(lambda: take(ckpt, 8).wait_committed()))
    ended = DIRECTORY.with_name(f"ended {{word}}")
    if RANK == 0:  # which has the service: its shutdown() has stopped it
        ended.touch()
    while not ended.exists():  # else this process could join the run that ends
        time.sleep(0.01)
    client = start()
    report(f"old {{word}}", **outcome(lambda: take(ckpt, 9).wait_committed()))
    report(f"old restore {{word}}", **outcome(lambda: ckpt.restore([state()])))
    all_are_here(client, "before the close")
    report(f"old close {{word}}", **outcome(ckpt.close))
    ckpt = ds.Checkpointer(DIRECTORY, **OPTIONS)
    restore(ckpt, f"restore {{word}}")


def take_late(step, late):
    if RANK == late:
        ds._native.arm_fault("sync", "delay", 60_000, 1, 1)
    return take(ckpt, step)


ckpt = ds.Checkpointer(DIRECTORY, **OPTIONS)
save(ckpt, 1)
for step, leaving in ((2, 1), (3, 0)):
    pending = take_late(step, 1 - leaving)
    if RANK == leaving:
        client.key_value_set("leaving", "yes")
        jax.distributed.shutdown()  # which waits for the other process
    else:
        client.blocking_key_value_get("leaving", SECONDS * 1000)
        ds._native.clear_faults()
    report(f"one {{leaving}}", **outcome(pending.wait_committed))
    if RANK != leaving:
        jax.distributed.shutdown()
    again(f"one {{leaving}}")
for step, late in ((4, 1), (5, 0)):
    pending = take_late(step, late)
    jax.distributed.shutdown()
    ds._native.clear_faults()
    report(f"both {{late}}", **outcome(pending.wait_committed))
    again(f"both {{late}}")
save(ckpt, 6)
"""

ALONE = f"""{HEAD}
tree = jax_meshes.tree((8,))
jax.distributed.shutdown()


def saved(tree, name, **options):
    ds.snapshot([from_pytree("s", tree)], DIRECTORY.with_name(name), **options).wait_committed()


report("alone", **outcome(lambda: saved(tree, f"alone {{RANK}}")))
report("whole", **outcome(lambda: saved({{"alike": tree["alike"]}}, f"whole {{RANK}}")))
with ds.Checkpointer(DIRECTORY.with_name(f"by steps {{RANK}}"), **OPTIONS) as ckpt:
    report("by steps", **outcome(lambda: ckpt.snapshot([from_pytree("s", tree)], step=1)))
report("together", **outcome(lambda: saved(tree, "together", rank=RANK, world_size=SIZE)))
"""

WORDS = ["one 1", "one 0", "both 1", "both 0"]


@dataclass(frozen=True)
class Run:
    """What a run has told, and its directory."""

    root: Path
    told: Reports


@pytest.fixture(scope="module")
def run(module_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("jax") / "ckpts"
    return Run(root, reports(module_ranks(2, SHUTDOWNS, root, **RANKS)))


@pytest.mark.long
@pytest.mark.parametrize("leaving", [1, 0])
def test_a_process_that_shuts_down_early_still_commits(leaving: int, run: Run) -> None:
    assert [told[f"one {leaving}"]["error"] for told in run.told] == [None, None]


@pytest.mark.parametrize("late", [1, 0])
def test_without_the_service_a_snapshot_fails_and_says_so(late: int, run: Run) -> None:
    for told in run.told:
        assert told[f"both {late}"]["error"] == "UnreachableError"
        assert "JAX's coordination service" in told[f"both {late}"]["text"]


@pytest.mark.parametrize("word", WORDS)
def test_the_checkpointer_of_an_ended_run_names_the_shutdown(word: str, run: Run) -> None:
    """So it does, too, while another run has a service at the same address: a call there would end the process."""
    for rank, told in enumerate(run.told):
        assert [told[f"{when} {word}"]["error"] for when in ("between", "old")] == ["UnreachableError"] * 2
        for when in ("between", "old", "old restore"):
            assert f"rank {rank} has left JAX's coordination service by jax.dist" in told[f"{when} {word}"]["text"]
        assert told[f"old close {word}"]["error"] is None


def test_the_next_run_restores_the_last_commit_and_goes_on(run: Run) -> None:
    for told in run.told:
        assert [told[f"restore {word}"]["step"] for word in WORDS] == [2, 3, 3, 3]
        assert [told[f"restore {word}"]["wrong"] for word in WORDS] == [[]] * 4
        assert told["save 6"]["error"] is None
    assert [path.name for path in sorted(run.root.iterdir()) if path.name[0] != "."] == [
        f"step-{step:08}" for step in (1, 2, 3, 6)
    ]
    assert set(ds.load(run.root)) == {"model", "alike"}


def test_a_part_of_an_array_is_not_saved_alone(ranks: Any, tmp_path: Path) -> None:
    for rank, told in enumerate(reports(ranks(2, ALONE, tmp_path / "ckpts", **RANKS))):
        for word in ("alone", "by steps"):
            assert told[word]["error"] == "ProviderError"
            assert "'s/columns' is held only in part by this process, which saves alone" in told[word]["text"]
        assert not (tmp_path / f"alone {rank}").exists()
        assert list(ds.load(tmp_path / f"whole {rank}")["s"]) == ["alike"]
    assert set(ds.load(tmp_path / "together")["s"]) == {*jax_meshes.VALUES, "step"}
