"""A job of two ranks on each of two hosts, which are threads here, with a directory for each host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from split_state import Split

import datastates as ds
from datastates.commit import hosts
from datastates.providers import PickledObjectProvider

SHAPES = {"w": (96, 40), "b": (33,), "odd": (7, 3, 5)}
RANKS = 4
OPTIONS: dict[str, Any] = {"host_cache": "8MiB", "block": "1MiB", "on_error": "warn", "per_host": True}


def host_of(rank: int) -> str:
    return "ab"[rank // 2]


@pytest.fixture
def job(threads: Any, tmp_path: Path) -> Callable[..., list[Any]]:
    """Run a function with a checkpointer and a state on each rank: two ranks on each of two hosts."""

    def run(do: Callable[..., Any], hosts: Callable[[int], str] = host_of, ranks: int = RANKS, **options: Any) -> Any:
        ended = threading.Barrier(ranks)

        def one(rank: int) -> Any:
            loop = {"of": rank}
            state = [Split.rows("model", SHAPES, rank, ranks), PickledObjectProvider("loop", loop.copy, loop.update)]
            with ds.Checkpointer(tmp_path / hosts(rank) / "run", **OPTIONS, **options) as ckpt:
                try:
                    return do(ckpt, state, rank)
                finally:  # one process has made all openings here, and its first close() ends them
                    ended.wait(60)

        return threads(ranks, one)

    return run


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each directory be on a machine of its own."""
    find = hosts.find

    def found(world: Any, name: str, root: Any, beside: str) -> hosts.Hosts:
        told = find(world, name, root, beside)
        places = [place.partition(":")[2] for place in told.places]
        return hosts.Hosts(told.rank, told.leaders, [f"{Path(one).parent.name}:{one}" for one in places])

    monkeypatch.setattr("datastates.commit.spread_opening.find", found)


def save(*steps: int) -> Callable[..., Any]:
    def do(ckpt: ds.Checkpointer, state: list[Any], rank: int) -> list[Any]:
        taken = []
        for step in steps:
            taken.append(ckpt.snapshot([state[0].fill(step), *state[1:]], step=step))
            ckpt.wait()
        return [one.exception() or one.path for one in taken]

    return do


def restore(ckpt: ds.Checkpointer, state: list[Any], rank: int) -> Any:
    found = ckpt.restore(state)
    if found is not None:
        assert not state[0].wrong(found.step)
    return found and found.step


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".openings"))
