"""Torch's training state moves between layouts and numbers of ranks, equal to the last bit, and is trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from by_path import module_at

import datastates as ds

SCRIPT = Path(__file__).with_name("torch_layouts.py")
layouts = module_at(SCRIPT)


def _checkpoint(case: Path) -> Path:
    return case / "ckpts" / f"step-{layouts.STEPS:08d}"


def _states(loaded: dict[str, Any], names: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    """An optimizer's states by parameter and state, whichever layout saved them."""
    result: dict[str, dict[str, torch.Tensor]] = {}
    nested = loaded.get("state", {})
    found = [(p, s, value) for p, states in nested.items() for s, value in states.items()]
    flat = [key.split("/")[1:] for key in loaded if key.startswith("state/")]
    found += [(int(p) if p.isdigit() else p, s, loaded[f"state/{p}/{s}"]) for p, s in flat]
    for parameter, state, value in found:
        result.setdefault(names[parameter] if isinstance(parameter, int) else parameter, {})[state] = value
    return result


def _check_whole(case: Path) -> None:
    """Check that ``load`` gives what all ranks had together."""
    expected = torch.load(case / "expected.pt", weights_only=False)["now"]
    loaded = ds.load(_checkpoint(case))
    layouts.same(dict(loaded["model"]), expected["model"])
    names = [name for name, _ in layouts.Net(0).named_parameters()]
    layouts.same(_states(loaded["optim"], names), expected["optim"])
    assert loaded["loop"] == expected["loop"]
    assert loaded["schedule"] == expected["schedule"]


def _storages(value: Any) -> dict[int, int]:
    """The bytes of each storage of the tensors in a value."""
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()}
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return {pointer: nbytes for item in items for pointer, nbytes in _storages(item).items()}


def _check_written_once(case: Path, ranks: int) -> None:
    """Check that each rank's file opens by itself, and that together they hold every byte of the model once."""
    written = 0
    for rank in range(ranks):
        opened = torch.load(_checkpoint(case) / f"rank-{rank:05d}.pt", weights_only=True)
        assert opened[f"rng@{rank:05d}"]["torch"].dtype == torch.uint8
        written += sum(_storages(opened["model"]).values())
    model = torch.load(case / "expected.pt", weights_only=False)["now"]["model"]
    assert written == sum(t.nbytes for t in model.values()) - model["head.weight"].nbytes


def _alone(folder: Path, *words: str) -> None:
    for word in words:
        verb, *names = word.split(":")
        getattr(layouts, verb)(folder, *names)


@pytest.mark.by_hand
def test_sharded_over_four_two_and_one(ranks: Any, tmp_path: Path) -> None:
    _alone(tmp_path, "save:plain", "save:named")
    ranks(
        4,
        SCRIPT,
        tmp_path,
        "save:fsdp",
        "save:named_fsdp",
        "save:hybrid",
        "save:grid",
        "take:grid:plain-1",
        timeout=120,
    )
    for case in ("fsdp-4", "named_fsdp-4", "hybrid-4", "grid-4"):
        _check_whole(tmp_path / case)
        _check_written_once(tmp_path / case, 4)
    takes = ["fsdp:fsdp-4", "fsdp:hybrid-4", "fsdp:grid-4", "fsdp:plain-1"]
    named = ["named_fsdp:named_fsdp-4", "named_fsdp:named-1"]
    ranks(2, SCRIPT, tmp_path, *(f"take:{t}" for t in takes + named), "save:fsdp", "take:fsdp:fsdp-2", timeout=120)
    _alone(tmp_path, "take:plain:fsdp-4", "take:plain:hybrid-4", "take:plain:grid-4", "take:named:named_fsdp-4")
    _alone(tmp_path, "take:plain:fsdp-2", "take:plain:plain-1")
    ranks(4, SCRIPT, tmp_path, "take:fsdp:fsdp-2", "take:grid:fsdp-2", "take:hybrid:grid-4", timeout=120)


@pytest.mark.by_hand
def test_zero_replicas_and_pipelines(ranks: Any, tmp_path: Path) -> None:
    _alone(tmp_path, "save:plain", "save:named", "save:pipeline")
    ranks(3, SCRIPT, tmp_path, "save:ddp", "save:zero", "save:named_zero", "save:flat", "take:zero:zero-3", timeout=120)
    for case in ("ddp-3", "zero-3", "named_zero-3", "flat-3"):
        _check_whole(tmp_path / case)
        _check_written_once(tmp_path / case, 3)
    among = ["ddp:ddp-3", "zero:zero-3", "named_zero:flat-3", "flat:named_zero-3", "flat:flat-3"]
    sharded = ["fsdp:zero-3", "fsdp:ddp-3", "named_fsdp:named_zero-3", "named_fsdp:flat-3"]
    whole = ["ddp:plain-1", "zero:plain-1", "named_zero:named-1", "flat:named-1", "pipeline:pipeline-1"]
    words = [f"take:{t}" for t in among + sharded + whole]
    ranks(2, SCRIPT, tmp_path, *words, "save:pipeline", timeout=120)
    _check_whole(tmp_path / "pipeline-2")
    _alone(tmp_path, "take:plain:ddp-3", "take:plain:zero-3", "take:named:named_zero-3", "take:named:flat-3")
    _alone(tmp_path, "take:pipeline:pipeline-2")
