"""``torch.compile`` and ``DistributedDataParallel``, nested or not, are saved and restored as the module in them.

Where a wrapper has hooks, methods or tensors of its own, it is saved and restored as torch does it.
"""

from __future__ import annotations

import re
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
from datastates.providers.modules.wrappers import Unwrapped

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


class _Marked(DistributedDataParallel):
    """Its state has an entry of its own, and no prefix."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.register_buffer("mark", torch.randn(2))

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        state = super().state_dict(*arguments, **options)
        return type(state)((name.removeprefix("module."), tensor) for name, tensor in state.items())

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        named = {name if name == "mark" else f"module.{name}": tensor for name, tensor in state.items()}
        return super().load_state_dict(named, strict, assign)


def _hook(wrapped: nn.Module) -> nn.Module:
    """Register hooks of all kinds on a module, which see the state that is saved and loaded."""
    seen: list[object] = []

    def save(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        state.update({f"{prefix}added": torch.full((2,), 7.0)})

    def load(module: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
        seen.append(state.pop(f"{prefix}added").tolist())

    wrapped.register_state_dict_post_hook(save)
    wrapped.register_load_state_dict_pre_hook(load)
    wrapped.register_load_state_dict_post_hook(lambda module, keys: seen.append(keys))
    vars(wrapped)["seen"] = seen
    return wrapped


OWN: dict[str, Wrap] = {
    **{f"hooked {name}": (lambda module, wrap=wrap: _hook(wrap(module))) for name, wrap in WRAPS.items()},
    "compiled hooked parallel": lambda module: _compiled(_hook(DistributedDataParallel(module))),
    "parallel hooked compiled": lambda module: DistributedDataParallel(_hook(_compiled(module))),
    "marked": _Marked,
    "compiled marked": lambda module: _compiled(_Marked(module)),
}


def _seen(module: nn.Module) -> list[object]:
    return [vars(one).get("seen") for one in module.modules()]


@pytest.mark.parametrize("wrap", OWN)
def test_a_wrapper_with_code_of_its_own_is_saved_and_loaded_as_by_torch(wrap: str, tmp_path: Path) -> None:
    saved, (ours, stock) = OWN[wrap](_module()), (OWN[wrap](_module()) for _ in range(2))
    torch.save(saved.state_dict(), tmp_path / "t.pt")
    ds.snapshot([from_stateful("m", saved)], tmp_path / "c").wait_committed()
    stock.load_state_dict(torch.load(tmp_path / "t.pt"))
    ds.restore([from_stateful("m", ours)], tmp_path / "c")
    assert _is_equal(ours, stock)
    assert _is_equal(ours, saved)
    assert str(_seen(ours)) == str(_seen(stock))


@pytest.mark.parametrize("wrap", [name for name in {**WRAPS, **OWN} if "parallel" in name])
def test_ignored_parameters_have_the_names_of_the_state(wrap: str) -> None:
    module, within = _module(), "_orig_mod." if re.search("parallel.* compiled", wrap) else ""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [f"{within}0.bias"])
    unwrapped = Unwrapped.of({**WRAPS, **OWN}[wrap](module))
    assert unwrapped.ignored == {name for name in unwrapped.module.state_dict() if name.endswith("0.bias")}
