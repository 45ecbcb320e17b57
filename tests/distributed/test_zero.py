"""ZeRO on real ranks: the parts that they describe tile every parameter, and other numbers of ranks resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import in_memory
import pytest
import torch

from datastates.testing import equal

LOOP = Path(__file__).with_name("zero_loop.py")


def _gathered(folder: Path) -> tuple[Any, list[dict[str, Any]]]:
    ranks = [torch.load(path, weights_only=False) for path in sorted(folder.glob("rank-*"))]
    checkpoint = in_memory.Checkpoint()
    for rank in ranks:
        checkpoint.add(rank)
    return checkpoint, ranks


@pytest.mark.long
def test_another_number_of_ranks_goes_on(ranks: Any, tmp_path: Path) -> None:
    ranks(3, LOOP, tmp_path)
    ranks(2, LOOP, tmp_path, tmp_path)
    for mode in ("zero_redundancy", "hand_rolled"):
        begun, held = _gathered(tmp_path / mode / "begun")
        assert begun.is_tiled
        assert len(held) == 3
        shapes = {name: tuple(t.shape) for name, t in held[0]["model"].items()}
        states = {"exp_avg", "exp_avg_sq", "step"} | ({"fp32"} if mode == "hand_rolled" else set())
        assert {key: tuple(t.shape) for key, t in begun.arrays.items()} == {
            f"state/{name}/{state}": () if state == "step" else shape
            for name, shape in shapes.items()
            for state in states
        }
        if mode == "zero_redundancy":
            names = [name for group in begun.objects[0]["param_groups"] for name in group["params"]]
            consolidated = held[0]["consolidated"]["state"]
            assert equal(
                dict(sorted(begun.arrays.items())),
                dict(
                    sorted((f"state/{names[i]}/{s}", t) for i, state in consolidated.items() for s, t in state.items())
                ),
            )
        else:
            assert equal({name: begun.arrays[f"state/{name}/fp32"] for name in shapes}, dict(held[0]["model"]))
        # restored on other ranks and described again, every bit is where it was
        restored, _ = _gathered(tmp_path / mode / "restored")
        assert restored.is_tiled
        assert equal(dict(sorted(restored.arrays.items())), dict(sorted(begun.arrays.items())))
        # and those ranks train on as if they had begun the run
        (on, net), (straight, other) = (_gathered(tmp_path / mode / name) for name in ("gone_on", "unbroken"))
        assert not equal(on.arrays, restored.arrays)
        assert equal(on.arrays, straight.arrays)
        assert on.objects == straight.objects
        assert equal(dict(net[0]["model"]), dict(other[0]["model"]))
