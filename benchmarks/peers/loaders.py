"""Ways to read the weights of a file straight onto a GPU, each with its own library's fastest documented settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import datastates as ds

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Loader:
    """One way to read weights into new tensors on the current CUDA device.

    Attributes:
        settings: The settings in one line.
        reads: Whose file it reads.
        load: Given the file, or the checkpoint's directory, returns the tensors by name.
    """

    settings: str
    reads: Literal["datastates", "safetensors"]
    load: Callable[[Path], Weights]


def _datastates(path: Path) -> Weights:
    weights: Weights = ds.load(path, device="cuda")["weights"]
    return weights


def _datastates_items(path: Path) -> Weights:
    with ds.open(path, device="cuda") as opened:
        return {key.removeprefix("weights/"): array for key, array in opened.items()}


def _datastates_keys(path: Path) -> Weights:
    with ds.open(path, device="cuda") as opened:
        return {key.removeprefix("weights/"): opened[key] for key in opened}


def _torch_load(path: Path) -> Weights:
    weights: Weights = torch.load(path / "rank-00000.pt", map_location="cuda", mmap=True, weights_only=True)["weights"]
    return weights


def _safetensors(path: Path) -> Weights:
    from safetensors.torch import load_file

    return load_file(path, device="cuda")


def _instanttensor(path: Path) -> Weights:
    from instanttensor import safe_open

    with safe_open(str(path), framework="pt", device=torch.cuda.current_device()) as opened:
        return dict(opened.tensors())


def _fastsafetensors(path: Path) -> Weights:
    from fastsafetensors import fastsafe_open

    device = f"cuda:{torch.cuda.current_device()}"
    with fastsafe_open(str(path), framework="pt", device=device, nogds=True) as opened:
        return {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - no mapping


def _runai(path: Path) -> Weights:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path), device=f"cuda:{torch.cuda.current_device()}")
        return dict(streamer.get_tensors())


LOADERS = {
    "datastates": Loader("load(device='cuda'); all checksums verified", "datastates", _datastates),
    "datastates items": Loader("open(device='cuda').items(); all checksums verified", "datastates", _datastates_items),
    "datastates [key]": Loader(
        "open(device='cuda')[key], one tensor after the other; all checksums verified", "datastates", _datastates_keys
    ),
    "InstantTensor": Loader("safe_open(device=…).tensors(); verifies nothing", "safetensors", _instanttensor),
    "fastsafetensors": Loader("fastsafe_open(nogds=True); verifies nothing", "safetensors", _fastsafetensors),
    "Run:ai streamer": Loader("SafetensorsStreamer.stream_file(device=…); verifies nothing", "safetensors", _runai),
    "safetensors": Loader("load_file(device='cuda'); verifies nothing", "safetensors", _safetensors),
    "torch.load mmap": Loader(
        "torch.load(map_location='cuda', mmap=True) of datastates' file; verifies nothing", "datastates", _torch_load
    ),
}
