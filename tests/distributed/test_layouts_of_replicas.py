"""What ranks hold alike comes back on each of them as it lay in memory, whichever of them has written it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from whole_saves import as_two_ranks, assert_as_they_lay, views

import datastates as ds
from datastates.providers import PickledObjectProvider, ReplicatedProvider


def test_views_and_strides_of_what_another_rank_has_written(tmp_path: Path) -> None:
    state = views() | {"other": torch.randn(50_000)}
    found: dict[int, dict[str, Any]] = {}

    def rank(number: int) -> None:
        live: dict[str, Any] = {}
        provider = ReplicatedProvider(PickledObjectProvider("state", lambda: state, live.update))
        with ds.Checkpointer(tmp_path, rank=number, world_size=2) as checkpointer:
            checkpointer.snapshot([provider], step=1).wait_committed()
            checkpointer.restore([provider])
        found[number] = live

    as_two_ranks(rank)
    for live in found.values():
        assert_as_they_lay(live, state)
