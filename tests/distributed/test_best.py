"""Of several ranks that save together, the metrics of rank 0 say which checkpoints are the best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import datastates as ds
from datastates.commit.tiers import tier_of
from datastates.providers import HostTensorProvider
from datastates.storage import Location

METRICS = [(0.5, 1.0), (None, 0.0), (float("nan"), 0.1), (0.25, None), (0.75, 0.0)]
"""For each step, those of the two ranks."""


def test_the_metrics_of_rank_0_count(tmp_path: Path, threads: Any) -> None:
    def run(rank: int) -> None:
        options: Any = {"rank": rank, "world_size": 2, "host_cache": "4MiB", "block": "1MiB"}
        with ds.Checkpointer(tmp_path / "run", keep_best=2, **options) as ckpt:
            for step, metric in enumerate(METRICS):
                ckpt.snapshot([HostTensorProvider(f"model{rank}", {"a": np.ones(3)})], step=step, metric=metric[rank])

    assert threads(2, run) == [None, None]
    found = tier_of(Location(tmp_path / "run")).checkpoints()
    assert {one.step: one.metric for one in found} == {0: 0.5, 3: 0.25, 4: 0.75}
