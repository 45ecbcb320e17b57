"""The rows of an index are checked before they are used, at a cost that grows with their number alone."""

from __future__ import annotations

import numpy as np
import pytest

from datastates.container import table
from datastates.state.shards import Buffer, Shard, full_key


def test_parts_of_many_providers_are_checked_together(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(table, "full_key", lambda name, key: asked.append(name) or full_key(name, key))
    parts = [
        (p, Shard("w", "uint8", "numpy", (1,), (1,), (2,), None, (half, half + 1), buffer=Buffer(1, 1)))
        for p in range(100)
        for half in range(2)
    ]
    names = [f"p{p}" for p in range(100)]
    table.table_of(names, parts, range(200)).check(np.ones(200, np.uint64))
    assert asked == names
