"""``inspect`` on many tensors: it selects by key, prints a sum, and one long key does not widen all lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import datastates as ds
from datastates.cli import commands
from datastates.providers import HostTensorProvider

LONG = "k" * 300


@pytest.fixture
def path(tmp_path: Path) -> Path:
    state: dict[str, Any] = {f"layer{n}": np.zeros(1024, "u1") for n in range(12)}
    ds.snapshot([HostTensorProvider("m", {**state, LONG: np.zeros(4)})], tmp_path / "c").wait_committed()
    return tmp_path / "c"


def test_keys_select_what_is_shown_and_summed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["inspect", str(path), "--keys", "m/layer1*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:-1]] == ["m/layer1", "m/layer10", "m/layer11"]
    assert lines[-1] == "3 of 13 arrays, 3.0 KiB"
    assert commands.main(["inspect", str(path), "--keys", "m/layer1*", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [t["key"] for t in found["tensors"]] == ["m/layer1", "m/layer10", "m/layer11"]
    assert len(found["containers"][0]["arrays"]) == 3


def test_one_long_key_does_not_widen_every_line(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["inspect", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [len(line) > 150 for line in lines[1:]].count(True) == 1
    assert lines[-1] == "13 of 13 arrays, 12.0 KiB"
