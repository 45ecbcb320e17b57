"""What one rank does by itself changes nothing for what all do together afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.by_hand
def test_a_rank_that_saves_something_for_itself_stays_in_step(
    ranks: Any, prelude: str, reports: Any, tmp_path: Path
) -> None:
    script = f"""{prelude}
if RANK == 0:
    alone = directory.with_name("alone")
    ds.snapshot([PickledObjectProvider("x", lambda: 1, print)], alone, rank=0, world_size=1).wait_committed()
with ds.Checkpointer(directory, **OPTIONS, rank_timeout=15) as ckpt:
    ckpt.snapshot([state.fill(1)], step=1).wait_committed()
    tell("end", lambda: {{"steps": ckpt.steps()}})
"""
    told = reports(ranks(2, script, tmp_path / "run"))
    assert [rank["end"]["steps"] for rank in told] == [[1], [1]]


OPEN = """
import torch.distributed as dist

from datastates import checkpointer
from datastates.errors import DatastatesError

dist.init_process_group("gloo")
# far longer than this test may take: whoever waits for its end fails
OPTIONS = {**OPTIONS, "rank_timeout": 600, "rank": None, "world_size": None}


def attempt(name, **options):
    try:
        with ds.Checkpointer(directory, **{**OPTIONS, **options}) as ckpt:
            step = len(ckpt.steps())
            ckpt.snapshot([state.fill(step)], step=step).wait_committed()
        said = {"steps": step}
    except Exception as error:
        said = {"error": type(error).__name__, "text": str(error)}
    tell(name, lambda: said)


def leave():
    dist.barrier()
    os._exit(0)  # threads of torch that are left abort a process at times that ends by itself
"""

EARLY = {
    "a setting": 'attempt("first", **({"nonsense": 1} if RANK == FAILING else {}))',
    "the executor": """
made = checkpointer.make_executor
def fail(*_):
    raise OSError("no memory")
checkpointer.make_executor = fail if RANK == FAILING else made
attempt("first")
checkpointer.make_executor = made
""",
}


@pytest.mark.long
@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("early", EARLY)
def test_a_rank_that_cannot_open_a_checkpointer_is_told_of_and_may_try_again(
    early: str, failing: int, ranks: Any, prelude: str, reports: Any, tmp_path: Path
) -> None:
    script = f"""{prelude}{OPEN}
FAILING = {failing}
{EARLY[early]}
attempt("second")
attempt("third")
leave()
"""
    told = reports(ranks(3, script, tmp_path / "run"))
    for rank, said in enumerate(told):
        own = {"a setting": ("SettingsError", "nonsense"), "the executor": ("OSError", "no memory")}[early]
        error, text = own if rank == failing else ("CommitError", f"rank {failing}: ")
        assert said["first"]["error"] == error
        assert text in said["first"]["text"]
        assert (said["second"]["steps"], said["third"]["steps"]) == (0, 1)


@pytest.mark.long
@pytest.mark.parametrize("failing", [0, 1])
def test_ranks_that_were_left_alone_may_open_again(
    failing: int, ranks: Any, prelude: str, reports: Any, tmp_path: Path
) -> None:
    """One rank did not come at all. The others time out, and their second opening meets its first."""
    script = f"""{prelude}{OPEN}
if RANK != {failing}:
    attempt("first", rank_timeout=1)
dist.barrier()
attempt("second")
leave()
"""
    told = reports(ranks(3, script, tmp_path / "run"))
    assert [said["second"]["steps"] for said in told] == [0, 0, 0]
    others = [said["first"] for rank, said in enumerate(told) if rank != failing]
    assert [said["error"] for said in others] == ["RanksMissingError"] * 2
