"""DTensors on meshes of eight ranks; this process takes each rank in turn, over torch's fake process group."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor import _utils as torch_utils
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import datastates as ds
from datastates.errors import ProviderError
from datastates.providers import from_state_dict
from datastates.state import dtensors

WORLD = 8


def on_each_rank(describe: Callable[[], dict[str, Any]]) -> list[list[ds.Shard]]:
    """For each rank, the array shards of the state that ``describe`` makes on it."""
    ranks = []
    for rank in range(WORLD):
        dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
        try:
            ranks.append([shard for shard in from_state_dict("s", describe()).shards() if not shard.is_object])
        finally:
            dist.destroy_process_group()
    return ranks


def cube() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))


def place(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> Any:
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def test_parts_tile_under_every_placement_on_a_cube() -> None:
    shapes = [(), (3,), (5, 3), (1, 9), (4, 0)]

    def describe() -> dict[str, Any]:
        mesh = cube()
        return {
            f"{shape} {placements}": place(torch.arange(float(np.prod(shape))).reshape(shape), mesh, placements)
            for shape in shapes
            for placements in itertools.product([Replicate(), *map(Shard, range(len(shape)))], repeat=3)
        }

    ranks = on_each_rank(describe)
    for shards in zip(*ranks, strict=True):
        times = np.zeros(shards[0].global_shape, np.int64)
        for rank, shard in enumerate(shards):
            assert shard.offset is not None
            box = tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.shape, strict=True))
            times[box] += rank == min(shard.replicas, default=rank)
            logical = torch.arange(float(times.size)).reshape(times.shape)[box]
            assert torch.equal(shard.source._local_tensor, logical), shard  # type: ignore[attr-defined]
            assert all(
                shards[r].replicas == shard.replicas and shards[r].offset == shard.offset for r in shard.replicas
            )
        assert (times == 1).all(), shards[0].key


def test_slices_of_a_wider_mesh_in_the_same_state_hold_the_same() -> None:
    def describe() -> dict[str, Any]:
        mesh = cube()
        tensor = torch.arange(8.0)
        inner = mesh["dp", "tp"]
        return {
            "wide": place(tensor, inner, [Shard(0), Replicate()]),
            "dp": place(tensor, mesh["dp"], [Shard(0)]),
            "tp": place(tensor, mesh["tp"], [Shard(0)]),
            "tp replicated": place(tensor, mesh["tp"], [Replicate()]),
            "plain": tensor,
        }

    for rank, shards in enumerate(on_each_rank(describe)):
        stage = rank // 4 * 4
        dp, tp = rank // 2 % 2, rank % 2
        everybody = (stage, stage + 1, stage + 2, stage + 3)
        assert {s.key: s.replicas for s in shards} == {
            "wide": (stage + 2 * dp, stage + 2 * dp + 1),
            "dp": (stage + 2 * dp, stage + 2 * dp + 1),
            "tp": (stage + tp, stage + tp + 2),
            "tp replicated": everybody,
            "plain": everybody,
        }


def test_a_mesh_that_is_no_slice_of_a_wider_one_stands_for_itself() -> None:
    def describe() -> dict[str, Any]:
        rank = dist.get_rank()
        groups = [(0, 3), (1, 2), (4, 7), (5, 6)]
        across = [DeviceMesh("cpu", list(group)) for group in groups]  # every rank makes all of them
        mine = next(mesh for mesh, group in zip(across, groups, strict=True) if rank in group)
        tensor = torch.arange(8.0)
        return {"wide": place(tensor, cube(), [Shard(0)] * 3), "across": place(tensor, mine, [Replicate()])}

    found = [{s.key: s.replicas for s in shards} for shards in on_each_rank(describe)]
    assert [f["across"] for f in found] == [(0, 3), (1, 2), (1, 2), (0, 3), (4, 7), (5, 6), (5, 6), (4, 7)]
    assert {f["wide"] for f in found} == {()}


def test_an_uneven_split_over_two_dimensions_is_a_box_or_refused_on_a_rank() -> None:
    """``fully_shard`` cuts what tensor parallelism has left; torch's placements sometimes describe another cut."""
    outcomes = set()
    for size, (dp, tp) in itertools.product(range(40), [(2, 2), (2, 4), (4, 2), (3, 3), (8, 2)]):
        placements = [_StridedShard(0, split_factor=tp), Shard(0)]
        fits, right = True, True
        for i, j in itertools.product(range(dp), range(tp)):
            held = _chunk(_chunk(torch.arange(size), tp, j), dp, i).tolist()
            (n,), (at,) = torch_utils._compute_local_shape_and_global_offset((size,), (dp, tp), [i, j], placements)
            fits &= len(held) == n  # a rank on which it does not fit refuses it
            right &= held == list(range(at, at + n))
            right &= len(dtensors.stretches(size, [(dp, i, tp), (tp, j, 1)])) <= 1
        assert right or not fits
        outcomes.add(right)
    assert outcomes == {False, True}


def _chunk(tensor: torch.Tensor, n: int, i: int) -> torch.Tensor:
    chunks = torch.chunk(tensor, n)
    return chunks[i] if i < len(chunks) else tensor[:0]


def test_ranks_across_a_mesh_dimension_are_refused_where_it_splits() -> None:
    def describe(placement: Any) -> dict[str, Any]:
        return {"w": place(torch.ones(8), DeviceMesh("cpu", [7, 1, 2, 3, 4, 5, 6, 0]), [placement])}

    assert {shards[0].replicas for shards in on_each_rank(lambda: describe(Replicate()))} == {tuple(range(8))}
    with pytest.raises(ProviderError, match="'w' is a DTensor split over a mesh dimension along which ranks do not"):
        on_each_rank(lambda: describe(Shard(0)))
