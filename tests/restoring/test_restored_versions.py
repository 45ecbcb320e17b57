"""Autograd sees a restore as a change in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import datastates as ds
from datastates.errors import CorruptError
from datastates.providers import HostTensorProvider, from_stateful

torch = pytest.importorskip("torch")


def _loss(model: Any) -> Any:
    return model(torch.ones(2, 8, requires_grad=True)).square().sum()


def test_backward_over_a_graph_from_before_a_restore_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    with ds.Checkpointer(tmp_path) as ckpt:
        ckpt.snapshot([from_stateful("model", model)], step=1).wait_committed()
        older = _loss(model)
        ckpt.restore([from_stateful("model", model)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        older.backward()
    _loss(model).backward()


def test_every_restored_tensor_counts_it_and_no_other(tmp_path: Path) -> None:
    tensors = {"plain": torch.ones(4), "transposed": torch.ones(4, 5).t(), "empty": torch.ones(0)}
    with torch.inference_mode():
        tensors["of inference"] = torch.ones(4)  # it has no version counter
    other = torch.ones(4)
    with ds.Checkpointer(tmp_path) as ckpt:
        ckpt.snapshot(
            [HostTensorProvider("m", tensors), HostTensorProvider("n", {"other": other})], step=1
        ).wait_committed()
        before = {key: t._version for key, t in tensors.items() if not t.is_inference()}
        ckpt.restore([HostTensorProvider("m", tensors)])
    assert all(tensors[key]._version > version for key, version in before.items())
    assert other._version == 0


def test_a_restore_that_fails_on_the_way_counts_too(tmp_path: Path) -> None:
    tensor = torch.ones(1 << 16)
    with ds.Checkpointer(tmp_path) as ckpt:
        path = ckpt.snapshot([HostTensorProvider("m", {"a": tensor})], step=1)
        path.wait_committed()
        (container,) = path.path.glob("*.pt")
        content = bytearray(container.read_bytes())
        at = content.index(tensor.numpy().tobytes()[:4096])
        content[at] ^= 1
        container.write_bytes(content)
        version = tensor._version
        with pytest.raises(CorruptError):
            ckpt.restore([HostTensorProvider("m", {"a": tensor})])
    assert tensor._version > version
