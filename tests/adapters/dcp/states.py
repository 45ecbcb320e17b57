"""States to save: one with every kind of value, and ones large enough to test lazy capture."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from datastates.adapters import dcp as ours
from datastates.container.file import open_container
from datastates.formats.own import verify_container
from datastates.state import dtypes

SMALL: dict[str, Any] = {"host_cache": "2MiB", "block": "1MiB"}
"""With these settings, a state larger than 2 MiB is captured no faster than it is written."""


class Parts(torch.Tensor):
    """Several boxes of a logical matrix that one rank holds, by their offsets."""

    boxes: dict[tuple[int, int], torch.Tensor]

    @classmethod
    def of(cls, shape: tuple[int, int], boxes: dict[tuple[int, int], torch.Tensor]) -> Parts:
        dtype = next(iter(boxes.values())).dtype
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)  # type: ignore[attr-defined]
        made.boxes = boxes
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls.of(args[0].shape, {at: func(box) for at, box in args[0].boxes.items()})
        raise NotImplementedError(f"{func} of parts")

    def __create_write_items__(self, fqn: str, obj: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(at)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(at), box.shape),
                    TensorProperties.create_from_tensor(box),
                    self.shape,
                ),
            )
            for at, box in self.boxes.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), box.shape) for at, box in self.boxes.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.boxes[tuple(index.offset)]  # type: ignore[index]


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    data = torch.arange(count, dtype=torch.int64).remainder(2 if dtype is torch.bool else 97).to(torch.uint8)
    return data.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def every_kind() -> dict[str, Any]:
    """A state with every kind of value that a state can hold. It is equal at every call."""
    grid = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    weight = torch.arange(40_000, dtype=torch.float32)
    stored = [getattr(torch, d.name) for d in dtypes.ALL if d.in_torch]
    return {
        "types": {str(t): filled((3, 2), t) for t in stored if t.itemsize and "bits" not in str(t)},
        "model": OrderedDict(weight=weight, bias=torch.ones(7), frozen=torch.tensor(3.5)),
        "tied": weight,
        "tied in another shape": weight.view(200, 200),
        "a part of it": weight[100:300],
        "empty": torch.empty(0, 3),
        "empty too": torch.empty(0, 5),
        "transposed": grid.t(),
        "columns": grid[:, 2:4],
        "repeated": torch.arange(3.0).expand(4, 3),
        "large": torch.arange(300_000, dtype=torch.int64),
        "parameter": torch.nn.Parameter(torch.arange(5.0)),
        "list": [torch.zeros(2), {"deep": torch.full((3,), 7.0)}, "text", 5],
        "tuple": (torch.ones(2), 3),
        "object": {"lr": 0.1, "betas": (0.9, 0.95), "name": "adam", "none": None},
        "number": 12,
        "bytes": b"\0\xff",
        "nothing": {},
    }


def blank(value: Any) -> Any:
    """The same structure with other contents, to load into."""
    if isinstance(value, Parts):
        return Parts.of(value.shape, {at: torch.zeros_like(box) for at, box in value.boxes.items()})
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {k: blank(v) for k, v in value.items()}
    return [blank(v) for v in value] if isinstance(value, list) else type(value)()


def same(a: Any, b: Any, at: str = "") -> None:
    """Assert that two values are equal to the last bit."""
    if isinstance(b, Parts):
        same(a.boxes, b.boxes, at)
    elif isinstance(b, torch.Tensor):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), at
        assert raw(a) == raw(b), at
    elif isinstance(b, dict):
        assert set(a) == set(b), at
        for key in b:
            same(a[key], b[key], f"{at}/{key}")
    elif isinstance(b, (list, tuple)):
        assert (type(a), len(a)) == (type(b), len(b)), at
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{at}/{i}")
    else:
        assert a == b, at


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def loaded(path: Path | str, state: dict[str, Any], reader: str = "ours") -> dict[str, Any]:
    """Load a checkpoint into a blank copy of a state, by a reader; "alone" loads without the other ranks."""
    into: dict[str, Any] = blank(state)
    readers = {"stock": dcp.FileSystemReader}
    made = readers.get(reader, ours.DataStatesStorageReader)(path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(into, storage_reader=made, no_dist=reader == "alone")
    return into


def failure(path: Path | str, state: dict[str, Any]) -> BaseException:
    """The error that loading a state fails with."""
    with pytest.raises(CheckpointException) as raised:
        dcp.load(blank(state), storage_reader=ours.DataStatesStorageReader(path))
    ((found, _),) = raised.value.failures.values()
    assert isinstance(found, BaseException)
    return found


def save_with(how: str, state: dict[str, Any], path: Path | str, **options: Any) -> None:
    """Save, and wait for it: "stock", "ours" (``dcp.save``), "thread" (``dcp.async_save``) or "snapshot"."""
    if how == "stock":
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path))
        return
    writer = ours.DataStatesStorageWriter(path, **{**SMALL, **options})
    if how == "ours":
        dcp.save(state, storage_writer=writer)
    elif how == "thread":
        dcp.async_save(state, storage_writer=writer).result()
    else:
        ours.async_save(state, path, storage_writer=writer).wait_committed()
    writer.close()


def files(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def problems(path: Path) -> list[str]:
    """What the verifier reports about this package's files in a checkpoint."""
    found = [p for f in path.glob("*.distcp") for p in verify_container(open_container(f), lambda _: None)]
    return [f"{p.path.name} {p.key} {p.what}" for p in found]


def big(seed: int = 0, *, tensors: int = 3) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Parameters of 1 MiB each, and their optimizer after one step."""
    torch.manual_seed(seed)
    module = torch.nn.ParameterDict({f"p{i}": torch.nn.Parameter(torch.randn(512, 512)) for i in range(tensors)})
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    step(module, optimizer)
    return module, optimizer


def step(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def copied(value: Any) -> Any:
    return copy.deepcopy(value)
