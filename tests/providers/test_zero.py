"""ZeRO: padding is never saved, and any number of ranks restores a checkpoint."""

from __future__ import annotations

import copy
import math
from typing import Any

import in_memory
import numpy as np
import pytest
import torch
from zero_states import PADDING, SHAPES, flat_of, layout_of, logical_state

from datastates.errors import ProviderError
from datastates.providers import FlatLayout, Partition, ShardedZeroProvider
from datastates.state.provider import StateProvider
from datastates.state.shards import HOST, Shards
from datastates.testing import ProviderTests, equal


def _states(layout: FlatLayout) -> dict[str, torch.Tensor]:
    return {
        "fp32": flat_of(layout, logical_state(0)),
        "exp_avg": flat_of(layout, logical_state(1)),
        "step": torch.tensor(4.0),
    }


def _hand_rolled(kind: str, rank: int, world: int, *, filled: bool = True) -> ShardedZeroProvider:
    layout = layout_of(kind, rank, world)
    tensors = _states(layout)
    if not filled:
        tensors = {state: torch.full_like(tensor, PADDING) for state, tensor in tensors.items()}
    hyper = {"lr": 0.1 if filled else 9.0, "betas": (0.9, 0.99), "loops": 3 if filled else 0}
    provider = ShardedZeroProvider("zero", [Partition(layout, tensors)], param_groups=[hyper])
    provider.live = tensors, hyper  # type: ignore[attr-defined]
    return provider


@pytest.mark.parametrize("kind", ["concatenated", "each_split"])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_a_hand_rolled_loop_saves_logical_tensors_once_and_no_padding(kind: str, world: int) -> None:
    checkpoint = in_memory.Checkpoint.of([_hand_rolled(kind, rank, world) for rank in range(world)])
    expected = {
        f"state/{name}/{state}": t for state, s in (("fp32", 0), ("exp_avg", 1)) for name, t in logical_state(s).items()
    }
    expected |= {f"state/{name}/step": torch.tensor(4.0) for name in SHAPES}
    assert checkpoint.is_tiled
    assert equal(dict(sorted(checkpoint.arrays.items())), dict(sorted(expected.items())))
    steps = sum(bool(layout_of(kind, rank, world).owned) for rank in range(world))
    assert checkpoint.nbytes == 4 * (2 * sum(map(math.prod, SHAPES.values())) + steps)


@pytest.mark.parametrize("source", ["concatenated", "each_split"])
@pytest.mark.parametrize("kind", ["concatenated", "each_split"])
@pytest.mark.parametrize(("before", "after"), [(n, m) for n in (1, 2, 3, 8) for m in (1, 2, 5, 8)])
def test_any_number_of_ranks_restores_from_any_other(source: str, kind: str, before: int, after: int) -> None:
    checkpoint = in_memory.Checkpoint.of([_hand_rolled(source, rank, before) for rank in range(before)])
    for rank in range(after):
        provider = _hand_rolled(kind, rank, after, filled=False)
        saved = checkpoint.restore(provider, rank)
        assert saved.differences == []
        tensors, hyper = provider.live  # type: ignore[attr-defined]
        # padding stays as it was
        assert equal(tensors, _states(layout_of(kind, rank, after)))
        assert hyper == {"lr": 0.1, "betas": (0.9, 0.99), "loops": 3}


def test_what_lies_in_one_flat_tensor_shares_a_record() -> None:
    provider = _hand_rolled("concatenated", 0, 1)
    buffers = {(s.key.split("/")[2], s.buffer.pointer) for s in provider.shards() if s.buffer is not None}
    assert sorted(state for state, _ in buffers) == ["exp_avg", "fp32", "step"]
    assert all(shard.lazy for shard in provider.shards() if not shard.is_object)


def test_unchanged_memory_gives_the_same_layout_again() -> None:
    provider = _hand_rolled("concatenated", 1, 2)
    first = provider.shards()
    provider.live[0]["fp32"] += 1  # type: ignore[attr-defined]
    second = provider.shards()
    assert isinstance(first, Shards)
    assert isinstance(second, Shards)
    assert second.layout is first.layout
    changed = {
        s.key.split("/")[2] for s, a, b in zip(first.layout, first.versions, second.versions, strict=True) if a != b
    }
    assert changed == {"fp32"}
    provider.live[0]["fp32"] = provider.live[0]["fp32"].clone()  # type: ignore[attr-defined]
    third = provider.shards()
    assert isinstance(third, Shards)
    assert third.layout is not first.layout


def test_numpy_partitions_are_copied_at_once() -> None:
    layout = FlatLayout.concatenated({"w": (2, 2)}.items(), 0, 1, alignment=3)
    flat = np.arange(6.0)
    provider = ShardedZeroProvider("zero", [Partition(layout, {"m": flat})])
    (shard,) = (s for s in provider.shards() if not s.is_object)
    assert (shard.lazy, shard.flat, shard.global_shape) == (False, (0, 4), (2, 2))
    assert shard.buffer is not None
    assert (shard.buffer.nbytes, shard.buffer.device) == (32, HOST)
    checkpoint = in_memory.Checkpoint.of([provider])
    flat[:] = 0
    checkpoint.restore(provider)
    assert flat.tolist() == [0, 1, 2, 3, 0, 0]


def test_differences_are_reported_by_key() -> None:
    checkpoint = in_memory.Checkpoint.of([_hand_rolled("concatenated", rank, 2) for rank in range(2)])
    layout = FlatLayout.concatenated([("bias", (7,)), ("head", (2, 3)), ("new", (3,))], 0, 1)
    flats = {state: torch.zeros(layout.numel) for state in ("fp32", "exp_avg_sq")}
    saved = checkpoint.restore(ShardedZeroProvider("zero", [Partition(layout, flats)], param_groups=[{}]))
    squares = [f"state/{name}/exp_avg_sq" for name in ("bias", "head", "new")]
    assert sorted(saved.missing) == sorted([*squares, "state/new/fp32"])
    strange = [
        f"state/{name}/{state}" for name in ("embedding", "scale", "none") for state in ("fp32", "exp_avg", "step")
    ]
    strange += [f"state/{name}/{state}" for name in ("bias", "head") for state in ("exp_avg", "step")]
    assert sorted(saved.unexpected) == sorted(strange)
    assert list(saved.mismatched) == ["state/head/fp32"]
    groups = ShardedZeroProvider("zero", [Partition(layout, flats)], param_groups=[{}, {}])
    assert list(checkpoint.restore(groups).mismatched) == ["param_groups", "state/head/fp32"]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"m": torch.zeros(5)}, r"'m': an array of shape \(5,\)"),
        ({"m": torch.zeros(8)[::2]}, r"strides \(2,\)"),
        ({"m": torch.zeros(2, 2)}, r"shape \(2, 2\)"),
        ({"m": 3}, "'state/w/m' is a int"),
    ],
)
def test_what_is_no_partition_is_refused(tensors: dict[str, Any], message: str) -> None:
    layout = FlatLayout.concatenated([("w", (4,))], 0, 1)
    with pytest.raises(ProviderError, match=message):
        ShardedZeroProvider("zero", [Partition(layout, tensors)]).shards()


def test_contradictions_are_refused() -> None:
    layout = FlatLayout.concatenated([("w", (4,))], 0, 1)
    flat = torch.zeros(4)
    with pytest.raises(ValueError, match="'w' is in two shares"):
        ShardedZeroProvider("zero", [Partition(layout), Partition(layout)])
    with pytest.raises(ValueError, match="no optimizer that knows it"):
        ShardedZeroProvider("zero", [Partition(layout, parameter=flat)])
    with pytest.raises(ValueError, match="no parameter group 1"):
        ShardedZeroProvider("zero", [Partition(layout, group=1)], param_groups=[{}])
    with pytest.raises(ValueError, match="of no parameters"):
        ShardedZeroProvider("zero", [Partition(FlatLayout.concatenated([], 0, 1))])
    with pytest.raises(ValueError, match="its own param_groups"):
        ShardedZeroProvider("zero", [Partition(layout)], optimizer=torch.optim.SGD([flat]), param_groups=[{}])


# --- what every provider promises


class TestHandRolled(ProviderTests):
    kind = "concatenated"

    def provider(self) -> StateProvider:
        return _hand_rolled(self.kind, 0, 1)

    def perturb(self, provider: Any) -> None:
        tensors, hyper = provider.live
        for name, tensor in tensors.items():
            for piece in self.pieces() if tensor.ndim else ():
                tensor[piece] += 1
            if name == "step":
                tensor += 1
        hyper["lr"] *= 2

    def pieces(self) -> list[slice]:
        return [slice(p.at, p.at + p.end - p.begin) for p in layout_of(self.kind, 0, 1).slices]

    def state(self, provider: Any) -> object:
        return copy.deepcopy(provider.live)


class TestHandRolledEachSplit(TestHandRolled):
    kind = "each_split"
