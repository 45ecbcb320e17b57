"""Providers are restored from checkpoints of other formats: arrays by their names."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file, save_model

import datastates as ds
from datastates.errors import CheckpointNotFoundError, CorruptError, RestoreError
from datastates.providers import from_state_dict, from_stateful


class _Tied(torch.nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.layer = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        for parameter in self.parameters():
            torch.nn.init.constant_(parameter, fill)


def _filled(module: torch.nn.Module) -> set[float]:
    return {float(value) for parameter in module.parameters() for value in parameter.detach().flatten()}


@pytest.fixture(params=["safetensors", "hugging face", "torch"])
def weights(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "torch":
        torch.save(_Tied(1).state_dict(), tmp_path / "weights.pt")
        return tmp_path / "weights.pt"
    folder = tmp_path / "weights"
    folder.mkdir()
    save_model(_Tied(1), str(folder / "model.safetensors"))
    return folder / "model.safetensors" if request.param == "safetensors" else folder


def test_a_model_with_tied_weights(weights: Path) -> None:
    live = _Tied(0)
    plan = ds.compare([from_stateful("model", live)], weights)
    assert plan.fits
    assert _filled(live) == {0}
    restored = ds.restore([from_stateful("model", live)], weights)
    assert _filled(live) == {1}
    assert restored.step == 0
    assert set(plan.restored_keys) <= {f"model/{key}" for key in live.state_dict()}
    assert bool(restored.unverified_keys) == (weights.suffix != ".pt")  # torch's files have checksums


def test_what_only_a_provider_can_take_back_is_missing(weights: Path) -> None:
    live = _Tied(0)
    providers = [from_stateful("model", live), from_stateful("optim", torch.optim.AdamW(live.parameters()))]
    with pytest.raises(RestoreError, match="the checkpoint lacks 'optim'"):
        ds.restore(providers, weights)
    assert _filled(live) == {0}
    ds.restore(providers, weights, keys="model/*")
    assert _filled(live) == {1}


def test_another_type_other_names_and_a_changed_head(weights: Path) -> None:
    live = torch.nn.ModuleDict({"trunk": torch.nn.Linear(4, 4), "classes": torch.nn.Linear(4, 3)}).bfloat16()
    with pytest.raises(RestoreError) as caught:
        ds.restore([from_stateful("net", live)], weights, rename={"layer.": "trunk."}, cast=True)
    assert set(caught.value.missing) == {"net/classes.weight", "net/classes.bias"}
    restored = ds.restore(
        [from_stateful("net", live)], weights, rename={"layer.": "net/trunk."}, cast=True, strict=False
    )
    assert _filled(live["trunk"]) == {1}
    assert set(restored.cast_keys) == {"net/trunk.weight", "net/trunk.bias"}
    assert "net/embed.weight" in restored.unexpected_keys


def test_several_providers_are_told_apart_by_the_first_part_of_a_key(tmp_path: Path) -> None:
    saved = {"model": {"w": torch.ones(3), "n": {"b": torch.ones(2)}}, "ema": {"w": torch.full((3,), 2.0)}, "step": 3}
    torch.save(saved, tmp_path / "all.pt")
    live: dict[str, Any] = {"w": torch.zeros(3), "n": {"b": np.zeros(2, np.float32)}, "extra": 5}
    average = {"w": torch.zeros(3)}
    ds.restore([from_state_dict("model", live), from_state_dict("ema", average)], tmp_path / "all.pt")
    assert [float(live["w"][0]), float(live["n"]["b"][0]), float(average["w"][0])] == [1, 1, 2]
    assert live["extra"] == 5


@pytest.mark.long
def test_fsdp2_and_tensor_parallel_ranks_read_only_their_shards_of_a_folder(tmp_path: Path, ranks: Any) -> None:
    wide, narrow = 1 << 16, 16  # as in sharded_base.py
    shapes = {"0.weight": (wide, narrow), "0.bias": (wide,), "1.weight": (narrow, wide), "1.bias": (narrow,)}
    weights = {key: torch.arange(math.prod(shape), dtype=torch.float32).view(shape) for key, shape in shapes.items()}
    (tmp_path / "base").mkdir()
    save_torch_state_dict(weights, tmp_path / "base", max_shard_size="5MB")
    assert (tmp_path / "base" / "model.safetensors.index.json").exists()
    ranks(2, Path(__file__).with_name("sharded_base.py"), tmp_path / "base")


def test_a_flipped_byte_of_a_torch_file_is_found(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(100_000)}, tmp_path / "w.pt")
    data = bytearray((tmp_path / "w.pt").read_bytes())
    data[200_000] ^= 1
    (tmp_path / "w.pt").write_bytes(data)
    with pytest.raises(CorruptError, match="'m/w'"):
        ds.restore([from_state_dict("m", {"w": torch.zeros(100_000)})], tmp_path / "w.pt")


def test_a_step_that_it_is_not_of(weights: Path) -> None:
    for call in (ds.restore, ds.compare):
        with pytest.raises(CheckpointNotFoundError, match="no step that it names, not of step 4"):
            call([from_stateful("model", _Tied(0))], weights, step=4)


def test_damage_is_found_where_types_are_converted(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(100_000)}, tmp_path / "w.pt")
    live = {"w": torch.zeros(100_000, dtype=torch.bfloat16)}
    assert not ds.restore([from_state_dict("m", live)], tmp_path / "w.pt", cast=True).unverified_keys
    data = bytearray((tmp_path / "w.pt").read_bytes())
    data[200_000] ^= 1
    (tmp_path / "w.pt").write_bytes(data)
    with pytest.raises(CorruptError, match="'w'"):
        ds.restore([from_state_dict("m", live)], tmp_path / "w.pt", cast=True)


def test_what_is_converted_without_checksums_is_named_as_unverified(tmp_path: Path) -> None:
    save_file({"w": torch.ones(8), "v": torch.ones(8)}, str(tmp_path / "w.safetensors"))
    live = {"w": torch.zeros(8, dtype=torch.bfloat16), "v": torch.zeros(8)}
    restored = ds.restore([from_state_dict("m", live)], tmp_path / "w.safetensors", cast=True, verify="digest")
    assert restored.unverified_keys == ["m/v", "m/w"]


def test_a_generator_of_providers_is_restored(weights: Path) -> None:
    live = _Tied(0)
    ds.restore((from_stateful(name, live) for name in ["model"]), weights)  # type: ignore[arg-type]
    assert _filled(live) == {1}


def test_a_tied_key_that_is_selected_alone_is_missing(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4), "c": torch.ones(4)}, str(tmp_path / "w.safetensors"))
    tied = torch.zeros(4)
    live = {"a": tied, "b": tied, "c": torch.zeros(4)}
    with pytest.raises(RestoreError) as caught:
        ds.restore([from_state_dict("m", live)], tmp_path / "w.safetensors", keys="m/[bc]")
    assert caught.value.missing == ["m/b"]
    assert not tied.any()


def test_ranks_that_open_different_files_are_told(tmp_path: Path) -> None:
    said: dict[int, str] = {}

    def restore(rank: int) -> None:
        path = tmp_path / f"{rank}.safetensors"
        save_file({"w": torch.full((4,), float(rank))}, str(path))
        with pytest.raises(RestoreError, match="different checkpoints") as caught:
            ds.restore([from_state_dict("m", {"w": torch.zeros(4)})], path, rank=rank, world_size=2)
        said[rank] = str(caught.value)

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(restore, range(2)))
    assert all("0.safetensors" in text and "1.safetensors" in text for text in said.values())
    assert len(said) == 2


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_live_tensor_that_is_no_plain_memory_is_refused_or_named(is_stored: bool, tmp_path: Path) -> None:
    saved = {"w": torch.ones(3), **({"s": torch.ones(2, 2)} if is_stored else {})}
    save_file(saved, tmp_path / "w.safetensors")
    live = {"w": torch.zeros(3), "s": torch.eye(2).to_sparse(), "epoch": 3}
    with pytest.raises(RestoreError, match="'m/s'"):
        ds.restore([from_state_dict("m", live)], tmp_path / "w.safetensors")
    assert live["w"].sum() == 0
    restored = ds.restore([from_state_dict("m", live)], tmp_path / "w.safetensors", strict=False)
    assert [*restored.missing_keys, *restored.mismatched_keys] == ["m/s"]
    assert live["w"].sum() == 3
