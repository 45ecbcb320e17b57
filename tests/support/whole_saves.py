"""Saves of a small state, and a comparison of each checkpoint with what was saved."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import datastates as ds
from datastates.commit.carry import every
from datastates.container.file import open_container
from datastates.formats import own
from datastates.providers import from_state_dict
from datastates.storage import Location


def a_state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    large = {f"large.{i}": torch.randn(150_000 + 1000 * i) for i in range(4)}
    return large | {f"small.{i}": torch.randn(50) for i in range(6)} | {"count": 1}


def copy_of(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def blank(state: dict[str, Any]) -> dict[str, Any]:
    """The same state with zeros in it."""
    return {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0 for key, value in state.items()}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        same = torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
        assert same, key


def assert_whole(root: Path, expected: dict[int, dict[str, Any]]) -> None:
    """Each checkpoint restores, torch opens its files, and every byte is as its checksums say."""
    for step, state in expected.items():
        live = blank(state)
        with ds.Checkpointer(root) as checkpointer:
            checkpointer.restore([from_state_dict("state", live)], step=step)
        assert_equal(live, state)
        (path,) = root.glob(f"step-{step:08d}*")
        assert_equal(ds.load(path)["state"], state)
        assert list(own.open(Location(path)).verify(lambda nbytes: None)) == []
        kept = {}
        for file in sorted(path.glob("rank-*.pt")):  # a kept one comes first
            found = torch.load(file, weights_only=True)["state"]
            if ".kept." in file.name:
                kept = found
            else:
                assert_equal(found | kept, state)
            assert sum(map(len, every(open_container(Location(file))))) == file.stat().st_size


def save(checkpointer: ds.Checkpointer, state: dict[str, Any], step: int) -> dict[str, Any]:
    """Save a state; returns the executor's figures."""
    snapshot = checkpointer.snapshot([from_state_dict("state", state)], step=step)
    snapshot.wait_committed()
    return snapshot.report.executor


def links_in(root: Path, step: int) -> dict[str, int]:
    """How many names each file of a checkpoint's ranks has."""
    (path,) = root.glob(f"step-{step:08d}*")
    return {file.name: file.stat().st_nlink for file in path.glob("rank-*.pt")}


def kept_at_step_2(root: Path) -> tuple[dict[str, Any], Path]:
    """Save three steps, of which the last two share a kept container; returns the state and that file of step 2."""
    state = a_state()
    with ds.Checkpointer(root, incremental=True) as checkpointer:
        for step in range(3):
            state["large.0"] += 1
            save(checkpointer, state, step)
    return state, root / "step-00000002" / "rank-00000.kept.pt"


def views() -> dict[str, Any]:
    """Arrays that share memory, in other orders than the row-major one, or with repeated elements."""
    memory = torch.randn(60_000)
    return {
        "all": memory,
        "square": memory[:40_000].view(200, 200).T,
        "channels": torch.randn(2, 30, 30, 16).contiguous(memory_format=torch.channels_last),
        "wide": torch.randn(200, 1).expand(200, 300),
    }


def assert_as_they_lay(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Arrays are equal, with the same strides, and :func:`views` share memory again."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value), key
            assert found[key].stride() == value.stride(), key
    assert found["all"].untyped_storage().data_ptr() == found["square"].untyped_storage().data_ptr()


def as_two_ranks(rank: Callable[[int], None]) -> None:
    """Call a function with the number of each rank, on threads of their own; raises what one of them raises."""
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(rank, number) for number in range(2)]:
            done.result(60)
