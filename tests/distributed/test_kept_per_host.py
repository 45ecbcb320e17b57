"""Kept containers on the disks of several hosts: each is linked where it lies, and goes with its rank's own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from per_host_job import RANKS, host_of

import datastates as ds
from datastates.providers import from_state_dict

pytestmark = pytest.mark.usefixtures("links", "linking")


def base_of(rank: int, scale: float = 1.0) -> ds.StateProvider:
    return from_state_dict(f"base{rank}", {"frozen": torch.arange(100_000.0) * scale + rank * scale})


def save(ckpt: ds.Checkpointer, state: list[Any], rank: int) -> list[str]:
    whys = []
    for step in range(1, 4):
        taken = ckpt.snapshot([state[0].fill(step), *state[1:], base_of(rank)], step=step)
        ckpt.wait()
        whys.append(taken.report.executor["in_full"])
        if ckpt.settings.peers or ckpt.settings.tiers:
            ckpt.wait_drained(50)
    return whys


def restore(ckpt: ds.Checkpointer, state: list[Any], rank: int) -> int:
    frozen = torch.zeros(100_000)
    found = ckpt.restore([*state, from_state_dict(f"base{rank}", {"frozen": frozen})])
    assert found is not None
    assert not state[0].wrong(found.step)
    assert torch.equal(frozen, torch.arange(100_000.0) + rank)
    return found.step


def links_of(tmp_path: Path, host: str) -> dict[str, int]:
    return links_in(tmp_path / host / "run")


def links_in(place: Path) -> dict[str, int]:
    files = sorted((place / "step-00000003").glob("*.kept.pt"))
    return {file.name: file.stat().st_nlink for file in files}


def test_each_host_links_its_own(job: Any, tmp_path: Path) -> None:
    for whys in job(save, incremental=True):
        assert [bool(why) for why in whys] == [True, True, False]
    for host, ranks in (("a", (0, 1)), ("b", (2, 3))):
        assert links_of(tmp_path, host) == {f"rank-0000{rank}.kept.pt": 2 for rank in ranks}
    assert job(restore) == [3] * RANKS


def test_ranks_that_have_moved_get_what_they_need(job: Any, tmp_path: Path) -> None:
    job(save, incremental=True)
    assert job(restore, lambda rank: "ba"[rank // 2]) == [3] * RANKS
    assert len(links_of(tmp_path, "a")) == RANKS


@pytest.mark.usefixtures("machines")
def test_a_lost_host_loses_nothing(job: Any, tmp_path: Path) -> None:
    job(save, incremental=True, peers=1)
    twice = {f"rank-0000{rank}.kept.pt": 2 for rank in range(RANKS)}
    assert links_of(tmp_path, "a") == links_of(tmp_path, "b") == twice  # what is copied takes memory once, too
    shutil.rmtree(tmp_path / host_of(RANKS - 1) / "run")
    assert job(restore) == [3] * RANKS


def test_they_drain_to_a_place_that_all_reach(job: Any, tmp_path: Path) -> None:
    job(save, incremental=True, tiers=[tmp_path / "shared"])
    assert links_in(tmp_path / "shared") == {f"rank-0000{rank}.kept.pt": 2 for rank in range(RANKS)}
    for host in "ab":
        shutil.rmtree(tmp_path / host / "run")
    found = ds.load(tmp_path / "shared", step=3)
    assert all(torch.equal(found[f"base{r}"]["frozen"], torch.arange(100_000.0) + r) for r in range(RANKS))
