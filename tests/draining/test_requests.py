"""What a drain asks of a store besides the parts of containers is counted: as much with many kept checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from far_store import FarStore

import datastates as ds
from datastates.providers import from_state_dict


@pytest.mark.parametrize("kept", [1, 40])
def test_requests_of_one_checkpoint(first: Path, store: FarStore, kept: int) -> None:
    providers = [from_state_dict("m", {"a": np.zeros(100_000, np.float32)})]
    with ds.Checkpointer(first, tiers="far://bucket/run") as checkpointer:
        for step in range(kept + 1):
            checkpointer.wait_drained()
            store.asked.clear()
            checkpointer.snapshot(providers, step=step).wait_committed()
        checkpointer.wait_drained()
    asked = [request for request, _ in store.asked if request != "piece"]
    assert asked == ["list", "look", "upload", "look", "list", "create", "list"]
