"""Logical tensors, and the flat partitions of them that ZeRO's ranks hold."""

from __future__ import annotations

import torch

from datastates.providers import FlatLayout

SHAPES = {"embedding": (5, 3), "scale": (), "none": (0, 4), "bias": (7,), "head": (2, 3, 2)}
PADDING = -77.0


def layout_of(kind: str, rank: int, world: int) -> FlatLayout:
    if kind == "concatenated":
        return FlatLayout.concatenated(SHAPES.items(), rank, world, alignment=2)
    return FlatLayout.each_split(SHAPES.items(), rank, world)


def logical_state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def flat_of(layout: FlatLayout, logical: dict[str, torch.Tensor]) -> torch.Tensor:
    flat = torch.full((layout.numel,), PADDING)
    for piece in layout.slices:
        part = logical[str(piece.name)].reshape(-1)[piece.begin : piece.end]
        flat[piece.at : piece.at + len(part)] = part
    return flat
