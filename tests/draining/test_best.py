"""The best checkpoints stay in each tier that keeps them, and come there before an earlier tier deletes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from far_store import FarStore

import datastates as ds
from datastates.commit.tiers import tier_of
from datastates.providers import HostTensorProvider
from datastates.storage import Location

FAR = "far://bucket/run"
METRICS = [3.0, 1.0, float("nan"), 2.0, 5.0, 4.0]


def metrics_in(place: Any) -> dict[int, float | None]:
    return {one.step: one.metric for one in tier_of(Location.of(place)).checkpoints()}


@pytest.mark.parametrize(
    ("mode", "kept"), [("min", {1: 1.0, 3: 2.0, 5: 4.0}), ("max", {4: 5.0, 5: 4.0})], ids=["lowest", "highest"]
)
@pytest.mark.parametrize("dead", [False, True], ids=["at once", "late"])
def test_a_further_tier_keeps_the_best(
    mode: str, kept: dict[int, float], dead: bool, first: Path, store: FarStore
) -> None:
    store.dead = dead
    options: Any = {"keep_last": 1, "best_mode": mode, "tiers": {"path": FAR, "keep_best": 2}}
    with ds.Checkpointer(first, host_cache="4MiB", block="1MiB", **options) as checkpointer:
        for step, metric in enumerate(METRICS):
            provider = HostTensorProvider("model", {"a": np.full(10, step)})
            checkpointer.snapshot([provider], step=step, metric=metric).wait_committed()
        store.dead = False
        checkpointer.wait_drained()
    assert metrics_in(FAR) == kept
    assert metrics_in(first) == {5: 4.0}
    for step in kept:
        assert ds.load(FAR, step=step)["model"]["a"][0] == step
