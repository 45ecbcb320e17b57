"""``inspect`` on many tensors: a summary by type and module, keys select, and one long key does not widen all lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import inspected, run_json

import datastates as ds
from datastates.cli.inspect import MOST, Module, modules
from datastates.providers import HostTensorProvider

LONG = "k" * 300


@pytest.fixture
def path(tmp_path: Path) -> Path:
    state: dict[str, Any] = {f"layer{n}": np.zeros(1024, "u1") for n in range(12)}
    ds.snapshot([HostTensorProvider("m", {**state, LONG: np.zeros(4)})], tmp_path / "c").wait_committed()
    return tmp_path / "c"


def test_keys_select_what_is_shown_and_summed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary, listed = inspected(capsys, path, "--keys", "m/layer1*")
    assert [line.split()[0] for line in listed[1:]] == ["m/layer1", "m/layer10", "m/layer11"]
    assert summary[1] == "3 of 13 arrays, 3.0 KiB (3.0 KiB of uint8); 0 object(s)"
    status, found = run_json(capsys, "inspect", path, "--keys", "m/layer1*")
    assert status == 0
    assert [t["key"] for t in found["tensors"]] == ["m/layer1", "m/layer10", "m/layer11"]
    assert len(found["containers"][0]["arrays"]) == 3
    assert found["modules"] == [{"name": "m", "arrays": 3, "bytes": 3072}]


def test_no_matching_key_is_no_module(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary, listed = inspected(capsys, path, "--keys", "other")
    assert summary[1:] == ["0 of 13 arrays, 0 B; 0 object(s)", "MODULE  ARRAYS  SIZE  SHARE"]
    assert len(listed) == 1


def test_the_summary_has_types_and_modules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"a.0.w": np.zeros(1000, "f4"), "a.1.w": np.zeros(1000, "f4"), "b": np.zeros(1000, "f2")}
    ds.snapshot([HostTensorProvider("m", state)], tmp_path / "c").wait_committed()
    summary, _ = inspected(capsys, tmp_path / "c")
    assert summary[1:] == [
        "3 of 3 arrays, 9.8 KiB (7.8 KiB of float32, 2.0 KiB of float16); 0 object(s)",
        "MODULE  ARRAYS     SIZE  SHARE",
        "m/a.*        2  7.8 KiB  80.0%",
        "m            1  2.0 KiB  20.0%",
    ]


def test_one_long_key_does_not_widen_every_line(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary, listed = inspected(capsys, path)
    assert [len(line) > 150 for line in listed].count(True) == 1
    assert summary[1].startswith("13 of 13 arrays, 12.0 KiB")


def test_numbered_modules_count_as_one() -> None:
    keys = {f"p/blocks_{n}/layers.{n}.w": 1 for n in range(3)}
    assert modules(keys) == [Module("p/blocks_*/layers.*", 3, 3)]


def test_the_largest_module_is_divided_first() -> None:
    small = {f"m/small{n}.w": 1 for n in range(MOST)}
    large = {f"m/large.part.{part}.w": 10 for part in "abc"}
    found = modules({**small, **large})  # the modules inside "m" are too many
    assert found == [Module("m", 19, 46)]
    found = modules({**large, "m/v": 4, "n/small.w": 3, "alone": 2})
    assert found == [
        *(Module(f"m/large.part.{part}", 1, 10) for part in "abc"),
        Module("m", 1, 4),
        Module("n/small", 1, 3),
        Module("", 1, 2),
    ]


def test_no_array_is_lost_and_the_modules_are_few() -> None:
    keys = {f"m/{a}.{b}.{c}.w": ord(a) * ord(b) for a in "abcde" for b in "abcde" for c in "abcdefghi"}
    found = modules(keys)
    assert len(found) <= MOST
    assert sum(module.arrays for module in found) == len(keys)
    assert sum(module.nbytes for module in found) == sum(keys.values())
