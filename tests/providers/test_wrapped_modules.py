"""``torch.compile`` and ``DistributedDataParallel``, nested or not, are saved and restored as the module in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import datastates as ds
from datastates.errors import RestoreError
from datastates.providers import ReplicatedProvider, from_state_dict, from_stateful

Wrap = Callable[[nn.Module], Any]


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


WRAPS: dict[str, Wrap] = {
    "plain": lambda module: module,
    "compiled": _compiled,
    "parallel": DistributedDataParallel,
    "compiled parallel": lambda module: _compiled(DistributedDataParallel(module)),
    "parallel compiled": lambda module: DistributedDataParallel(_compiled(module)),
}


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class _Scaled(nn.Linear):
    """Its bias is given to a hook."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_load_state_dict_pre_hook(lambda *arguments: None)


def _module() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), _Scaled())


def _is_equal(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("live", WRAPS)
@pytest.mark.parametrize("saved", WRAPS)
def test_one_restores_into_another(saved: str, live: str, tmp_path: Path) -> None:
    inner, other = _module(), _module()
    ds.snapshot([from_stateful("m", WRAPS[saved](inner))], tmp_path / "c").wait_committed()
    assert list(ds.load(tmp_path / "c")["m"]) == list(inner.state_dict())
    ds.restore([ReplicatedProvider(from_stateful("m", WRAPS[live](other)))], tmp_path / "c")
    assert _is_equal(inner, other)


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_file_of_torch_restores_into_its_own_kind(wrap: str, tmp_path: Path) -> None:
    inner, other = _module(), _module()
    torch.save(WRAPS[wrap](inner).state_dict(), tmp_path / "t.pt")
    ds.restore([from_stateful("m", WRAPS[wrap](other))], tmp_path / "t.pt")
    assert _is_equal(inner, other)


@pytest.mark.parametrize("wrap", WRAPS)
def test_what_was_saved_with_prefixes_restores_into_its_own_kind(wrap: str, tmp_path: Path) -> None:
    inner, other = _module(), _module()
    state = WRAPS[wrap](inner).state_dict()
    with ds.Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.snapshot([from_state_dict("m", state)], step=1).wait_committed()
    ds.restore([from_stateful("m", WRAPS[wrap](other))], tmp_path / "c")
    assert _is_equal(inner, other)


def test_names_of_a_compiled_module_come_with_advice(tmp_path: Path) -> None:
    inner, other = _module(), _module()
    torch.save(_compiled(inner).state_dict(), tmp_path / "t.pt")
    with pytest.raises(RestoreError, match=r"torch.compile.*restore\(rename=\{re.compile"):
        ds.restore([from_stateful("m", other)], tmp_path / "t.pt")
