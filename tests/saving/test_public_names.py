"""A snapshot shows its users what the documentation names, and no more."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import datastates as ds
from datastates.providers import HostTensorProvider

FOR_USERS = {
    "step",
    "path",
    "captured",
    "persisted",
    "committed",
    "wait_captured",
    "wait_persisted",
    "wait_committed",
    "exception",
    "report",
    "trace",
}


def test_a_snapshot_has_the_documented_names_only(tmp_path: Path) -> None:
    snapshot = ds.snapshot([HostTensorProvider("model", {"a": np.ones(1000)})], tmp_path / "c")
    snapshot.wait_committed()
    assert {name for name in dir(snapshot) if not name.startswith("_")} == FOR_USERS
