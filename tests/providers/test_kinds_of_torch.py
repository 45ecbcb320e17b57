"""Tensor subclasses of torch and torchao come back as ``torch.save`` and ``torch.load`` give them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.sparse import SparseSemiStructuredTensorCUTLASS

import datastates as ds
from datastates.providers import PickledObjectProvider, from_state_dict

QUANTIZED = [
    "Int8WeightOnly",
    "Float8WeightOnly",
    "IntxWeightOnly",
    "Int8DynamicActivationInt8Weight",
]


def _quantized(name: str) -> torch.Tensor:
    what = "torchao is not installed: its kinds were NOT tried"
    quantization = pytest.importorskip("torchao.quantization", reason=what)
    torch.manual_seed(1)
    linear = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    quantization.quantize_(linear, getattr(quantization, f"{name}Config")())
    return linear.weight


def _semi_structured() -> torch.Tensor:
    packed, meta = torch.rand(4, 4, dtype=torch.half), torch.arange(4, dtype=torch.int16).reshape(4, 1)
    return SparseSemiStructuredTensorCUTLASS(torch.Size([4, 8]), packed, meta, None, None, None)


def _nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)], layout=layout)


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    **{f"torchao {name}": lambda name=name: _quantized(name) for name in QUANTIZED},  # type: ignore[misc]
    "semi-structured": _semi_structured,
    "nested, strided": lambda: _nested(torch.strided),
    "nested, jagged": lambda: _nested(torch.jagged),
}


def _parts(value: Any) -> list[Any]:
    """The parts of a tensor, down to plain values that can be compared."""
    if hasattr(value, "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        # the symbolic size of a jagged tensor differs from tensor to tensor
        rest = [] if value.is_nested else [repr(context)]
        return [type(value), *rest, *(p for name in names for p in _parts(getattr(value, name)))]
    if value.is_nested:
        return [type(value), *(p for part in value.unbind() for p in _parts(part))]
    if isinstance(value, SparseSemiStructuredTensorCUTLASS):
        return [type(value), tuple(value.shape), *_parts(value.packed), *_parts(value.meta)]
    return [type(value), value.dtype, value.stride(), value.requires_grad, value.detach().tolist()]


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns that nested tensors are a prototype
@pytest.mark.parametrize("kind", KINDS)
def test_what_torch_gives_back_is_given_back(tmp_path: Path, kind: str) -> None:
    value = KINDS[kind]()
    torch.save(value, tmp_path / "torch.pt")
    expected = _parts(torch.load(tmp_path / "torch.pt", weights_only=False))
    assert expected == _parts(value)
    taken: list[Any] = []
    pickled = PickledObjectProvider("object", lambda: {"w": value}, taken.append)
    ds.snapshot([from_state_dict("tree", {"w": value}), pickled], tmp_path / "c").wait_committed()
    live = {"w": KINDS[kind]()}
    ds.restore([from_state_dict("tree", live), pickled], tmp_path / "c", trust="all")
    loaded = ds.load(tmp_path / "c", trust="all")
    of_torch = torch.load(tmp_path / "c" / "rank-00000.pt", weights_only=False)
    for found in (live, taken[0], *loaded.values(), *of_torch.values()):
        assert _parts(found["w"]) == expected


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_several_beside_each_other_do_not_mix(tmp_path: Path, kind: str) -> None:
    values = [KINDS[kind]() for _ in range(8)]
    for i, value in enumerate(values):
        value.note = {"number": i}  # type: ignore[attr-defined]
    torch.save(values, tmp_path / "torch.pt")
    expected = torch.load(tmp_path / "torch.pt", weights_only=False)
    ds.snapshot([from_state_dict("tree", values)], tmp_path / "c").wait_committed()
    live = [KINDS[kind]() for _ in values]
    ds.restore([from_state_dict("tree", live)], tmp_path / "c", trust="all")
    for found in (live, ds.load(tmp_path / "c", trust="all")["tree"]):
        assert [_parts(one) for one in found] == [_parts(one) for one in expected]
        assert [getattr(one, "note", None) for one in found] == [getattr(one, "note", None) for one in expected]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nested, strided"])  # not on the meta device
def test_the_live_tensor_says_the_device(tmp_path: Path, kind: str) -> None:
    value = KINDS[kind]()
    ds.snapshot([from_state_dict("tree", [value])], tmp_path / "c").wait_committed()
    live = [torch.empty(1, device="meta").as_subclass(Other)]
    ds.restore([from_state_dict("tree", live)], tmp_path / "c", trust="all")
    assert type(live[0]) is type(value)
    assert isinstance(live[0], torch.nn.Parameter) is isinstance(value, torch.nn.Parameter)
    assert (live[0].device.type, live[0].numel(), live[0].requires_grad) == ("meta", value.numel(), value.requires_grad)


class Other(torch.Tensor):
    """A subclass, so that the restored tensor takes its place."""


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_dtensor_is_restored_as_one_and_loaded_whole(tmp_path: Path) -> None:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    value = {"w": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])}
    ds.snapshot([from_state_dict("tree", value)], tmp_path / "c").wait_committed()
    live = {"w": distribute_tensor(torch.zeros(8), mesh, [Shard(0)])}
    ds.restore([from_state_dict("tree", live)], tmp_path / "c")
    assert isinstance(live["w"], DTensor)
    assert torch.equal(live["w"].full_tensor(), torch.arange(8.0))
    assert torch.equal(ds.load(tmp_path / "c")["tree"]["w"], torch.arange(8.0))
