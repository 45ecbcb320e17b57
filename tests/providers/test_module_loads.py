"""A restored module is as ``load_state_dict`` of torch's own file leaves it, whatever its classes override and hook."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations

import datastates as ds
from datastates.errors import ProviderError, RestoreError
from datastates.providers import from_stateful
from datastates.state import memory

Make = Callable[[float], Any]
"""Makes a module whose contents, also what is no tensor, follow from a number."""


class _Extra(nn.Linear):
    """Keeps a tensor as its extra state, as TransformerEngine's modules do."""

    def __init__(self, scale: float) -> None:
        super().__init__(3, 3)
        self.scale = scale

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([self.scale])

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.scale = state.item()


class _ExtraObject(_Extra):
    def get_extra_state(self) -> Any:
        return {"scale": self.scale, "parts": [torch.tensor(self.scale), {"half": self.scale / 2}]}

    def set_extra_state(self, state: Any) -> None:
        assert state["parts"][0] == state["scale"]
        assert state["parts"][1]["half"] == state["scale"] / 2
        self.scale = state["scale"]


class _Saves(nn.Linear):
    """Saves and loads a number as a tensor, as the quantized modules of torch do."""

    def __init__(self, scale: float) -> None:
        super().__init__(3, 3)
        self.scale = scale

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = torch.tensor(self.scale)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.scale = state.pop(prefix + "scale").item()
        super()._load_from_state_dict(state, prefix, *rest)


class _Packs(nn.Linear):
    """Derives a number from its weights whenever these are loaded."""

    def __init__(self, scale: float) -> None:
        super().__init__(3, 3)
        self.scale = 0.0
        self.pack()

    def pack(self) -> None:
        self.scale = float(self.weight.detach().sum())

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self.pack()


class _Owning(nn.Sequential):
    scale = 0.0

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        found = super().load_state_dict(state, strict, assign)
        self.scale = float(next(self.parameters()).detach().sum())
        return found


def _owning(scale: float) -> nn.Module:
    return _Owning(nn.Linear(3, 3))


class _Copies(nn.Linear):
    def __init__(self, scale: float) -> None:
        super().__init__(3, 3)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        return {name: t.detach().clone() for name, t in super().state_dict(*arguments, **options).items()}


class _Nested(nn.Linear):
    """Its state is nested, and counts its loads."""

    def __init__(self, scale: float) -> None:
        super().__init__(3, 3)
        self.scale = scale

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        return {"net": super().state_dict(), "seen": [self.scale, torch.tensor(self.scale)]}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        self.scale = state["seen"][1].item()
        assert self.scale == state["seen"][0]
        return super().load_state_dict(state["net"], strict, assign)


class _Pair(nn.Module):
    def __init__(self, scale: float = 0.0) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3, 3))


def _swapping(scale: float) -> nn.Module:
    def swap(_: Any, state: Any, prefix: str, *rest: Any) -> None:
        state[prefix + "a"], state[prefix + "b"] = state[prefix + "b"], state[prefix + "a"]

    module = _Pair()
    module.register_load_state_dict_pre_hook(swap)
    return module


def _transposing(scale: float) -> nn.Module:
    def transpose(_: Any, state: Any, prefix: str, *rest: Any) -> None:
        for name in ("a", "b"):
            state[prefix + name] = state[prefix + name].t()

    module = _Pair()
    module.register_load_state_dict_pre_hook(transpose)
    return module


def _writing(scale: float) -> nn.Module:
    """A hook that writes into the tensors that it is given."""

    def write(_: Any, state: Any, prefix: str, *rest: Any) -> None:
        state[prefix + "b"].add_(state[prefix + "a"])

    module = _Pair()
    module.register_load_state_dict_pre_hook(write)
    return module


def _renaming(scale: float) -> nn.Module:
    if scale == 1:
        return _Pair()

    def rename(_: Any, state: Any, prefix: str, *rest: Any) -> None:
        for name in ("a", "b"):
            if prefix + name in state:
                state[f"{prefix}new_{name}"] = state.pop(prefix + name)

    module = nn.Module()
    for name in ("new_a", "new_b"):
        setattr(module, name, nn.Parameter(torch.randn(3, 3)))
    module.register_load_state_dict_pre_hook(rename)
    return module


def _counting(scale: float) -> nn.Module:
    def count(module: Any, _: Any) -> None:
        module.scale = float(module.a.detach().sum())

    module = _Pair()
    module.register_load_state_dict_post_hook(count)
    return module


def _sharing(scale: float) -> nn.Module:
    """A plain layer whose weight is also a parameter of one with a hook."""
    module = nn.ModuleDict({"hooked": _swapping(scale), "plain": nn.Linear(3, 3)})
    module["plain"].weight = module["hooked"].a
    return module


def _tied(scale: float) -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    return module


def _lazy(scale: float) -> nn.Module:
    module = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    if scale == 1:
        module(torch.randn(5, 3))
    return module


def _norms(scale: float) -> nn.Module:
    return nn.Sequential(
        nn.BatchNorm1d(3), nn.BatchNorm2d(3, track_running_stats=False), nn.InstanceNorm1d(3, track_running_stats=True)
    )


def _old_norms(scale: float) -> nn.Module:
    """Norms whose saved state is of an earlier version, in which there is no count."""
    module = _norms(scale)
    if scale == 1:

        def forget(_: Any, state: Any, prefix: str, __: Any) -> None:
            for name in [name for name in state if name.endswith("num_batches_tracked")]:
                del state[name]
            for versions in state._metadata.values():
                versions["version"] = 1

        module.register_state_dict_post_hook(forget)
    else:
        module[0].num_batches_tracked.fill_(7)
    return module


def _weight_norm(scale: float) -> nn.Module:
    """The layer of ``torch.nn.utils.weight_norm`` of earlier versions, into a parametrized one."""
    return _reweighted(nn.Linear(3, 3)) if scale == 1 else parametrizations.weight_norm(nn.Linear(3, 3))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def _reweighted(layer: nn.Module) -> nn.Module:
    layer.weight_g = nn.Parameter(torch.rand(3, 1))
    layer.weight_v = nn.Parameter(torch.randn(3, 3))
    del layer.weight
    return layer


def _observed(scale: float) -> nn.Module:
    """Observers for each channel have no size until they have seen something."""
    module = nn.Sequential(quantization.PerChannelMinMaxObserver(), quantization.HistogramObserver())
    if scale == 1:
        module(torch.randn(3, 3))
    return module


def _quantized(scale: float) -> nn.Module:
    torch.backends.quantized.engine = "onednn" if "onednn" in torch.backends.quantized.supported_engines else "qnnpack"
    module = nn.Sequential(quantization.QuantStub(), nn.Linear(3, 3), quantization.DeQuantStub()).eval()
    module.qconfig = quantization.get_default_qconfig(torch.backends.quantized.engine)
    prepared = quantization.prepare(module)
    prepared(torch.randn(5, 3) * scale)
    return quantization.convert(prepared)


def _wrapped(scale: float) -> nn.Module:
    return nn.Sequential(checkpoint_wrapper(nn.Linear(3, 3)), checkpoint_wrapper(nn.Sequential(_Saves(scale))))


def _scripted(scale: float) -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


def _patched(scale: float) -> nn.Module:
    """One layer has a method of its own."""
    module = nn.Linear(3, 3)
    load = module._load_from_state_dict

    def doubled(state: Any, prefix: str, *rest: Any) -> None:
        state[prefix + "bias"] = state[prefix + "bias"] * 2
        load(state, prefix, *rest)

    module._load_from_state_dict = doubled
    return module


BUILT_IN: list[Make] = [
    _norms,
    lambda scale: nn.Sequential(nn.LSTM(3, 3), nn.MultiheadAttention(4, 2), nn.Embedding(4, 3, max_norm=1.0)),
    lambda scale: parametrizations.orthogonal(nn.Linear(3, 3)),
    lambda scale: parametrizations.spectral_norm(nn.Linear(3, 3)),
    lambda scale: nn.ModuleDict({"p": nn.ParameterDict({"0": torch.randn(3), "x": torch.randn(2)})}),
    _tied,
]
OTHERS: list[Make] = [
    _Extra, _Saves, _Packs, _owning, _Copies, _swapping, _transposing, _writing, _renaming, _counting, _sharing, _lazy,
    _old_norms, _weight_norm, _observed, _wrapped, _scripted, _patched,
    lambda scale: parametrizations.weight_norm(nn.Linear(3, 3)),
    lambda scale: nn.utils.spectral_norm(nn.Linear(3, 3)),
]  # fmt: skip
WITH_OBJECTS: list[Make] = [_ExtraObject, _Nested, _quantized]


def _contents(value: Any) -> Any:
    """A state to compare: tensors as their values, element types and shapes."""
    if isinstance(value, torch.Tensor):
        if torch.nn.parameter.is_lazy(value):
            return "lazy"
        plain = value.dequantize() if value.is_quantized else value
        return value.dtype, tuple(value.shape), plain.detach().tolist()
    if isinstance(value, dict):
        return {name: _contents(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_contents(item) for item in value]
    return value


def _of(module: nn.Module) -> Any:
    return _contents(module.state_dict()), [getattr(m, "scale", None) for m in module.modules()]


def _alike(make: Make, depth: int) -> list[nn.Module]:
    """A module to save, and two with other, equal contents to load into."""
    made = []
    for seed, scale in ((1, 1.0), (2, 2.0), (2, 2.0)):
        torch.manual_seed(seed)
        module = make(scale)
        for parameter in module.parameters():
            if not torch.nn.parameter.is_lazy(parameter):
                nn.init.normal_(parameter)
        made.append(nn.ModuleDict({"x": nn.ModuleList([nn.Linear(2, 2), module])}) if depth else module)
    return made


def _ids(make: Any) -> str:
    return getattr(make, "__name__", "lambda")


@pytest.mark.long
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("make", [*BUILT_IN, *OTHERS, *WITH_OBJECTS], ids=_ids)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_module_is_as_torch_loads_it(make: Make, depth: int, tmp_path: Path) -> None:
    if make in (_Nested, _owning) and depth:
        pytest.skip("torch calls only the outermost load_state_dict")
    source, stock, live = _alike(make, depth)
    assert _of(live) == _of(stock)
    torch.save(source.state_dict(), tmp_path / "t.pt")
    stock.load_state_dict(torch.load(tmp_path / "t.pt", weights_only=False))
    ds.snapshot([from_stateful("m", source)], tmp_path / "c").wait_committed()
    provider = from_stateful("m", live)
    assert ds.compare([provider], tmp_path / "c", trust="all").fits
    restored = ds.restore([provider], tmp_path / "c", trust="all")
    assert _of(live) == _of(stock) != _of(_alike(make, depth)[1])
    assert [*restored.missing_keys, *restored.unexpected_keys, *restored.mismatched_keys] == []


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("make", [*BUILT_IN, *OTHERS], ids=_ids)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_module_is_as_torch_loads_it_from_a_file_of_torch(make: Make, depth: int, tmp_path: Path) -> None:
    source, stock, live = _alike(make, depth)
    torch.save(source.state_dict(), tmp_path / "t.pt")
    stock.load_state_dict(torch.load(tmp_path / "t.pt"))
    ds.restore([from_stateful("m", live)], tmp_path / "t.pt")
    assert _of(live) == _of(stock)


@pytest.mark.parametrize("make", BUILT_IN, ids=_ids)
def test_what_is_only_copied_is_read_in_place(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _, live = _alike(make, 2)
    ds.snapshot([from_stateful("m", source)], tmp_path / "c").wait_committed()
    places = [t.data_ptr() for t in live.state_dict().values()]

    def refuse(*arguments: Any) -> None:
        raise AssertionError("nothing is left to load")

    monkeypatch.setattr(nn.Module, "load_state_dict", refuse)
    ds.restore([from_stateful("m", live)], tmp_path / "c")
    assert [t.data_ptr() for t in live.state_dict().values()] == places
    assert _of(live) == _of(source)


def test_layers_beside_one_with_a_hook_are_read_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    made: list[str] = []
    fresh = memory.fresh
    monkeypatch.setattr(memory, "fresh", lambda ref, *rest: made.append(ref.key) or fresh(ref, *rest))
    source, live = (nn.Sequential(nn.Linear(3, 3), _Pair()) for _ in range(2))
    ds.snapshot([from_stateful("m", source)], tmp_path / "c").wait_committed()
    live[1].register_load_state_dict_pre_hook(lambda _, state, *rest: seen.extend(t.data_ptr() for t in state.values()))
    ds.restore([from_stateful("m", live)], tmp_path / "c")
    assert sorted(made) == ["1.a", "1.b"]
    assert len(seen) == 2
    assert not {live[1].a.data_ptr(), live[1].b.data_ptr()} & set(seen)
    assert _of(live) == _of(source)


class _Tolerant(_Saves):
    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if prefix + "scale" in state:
            self.scale = state.pop(prefix + "scale").item()
        nn.Linear._load_from_state_dict(self, state, prefix, *rest)


def test_what_is_not_selected_stays(tmp_path: Path) -> None:
    source, _, live = _alike(lambda scale: nn.ModuleDict({"a": _Tolerant(scale), "b": nn.Linear(3, 3)}), 0)
    before = _contents(live.state_dict())
    ds.snapshot([from_stateful("m", source)], tmp_path / "c").wait_committed()
    restored = ds.restore([from_stateful("m", live)], tmp_path / "c", keys=["m/a.weight", "m/b.bias"])
    after, saved = _contents(live.state_dict()), _contents(source.state_dict())
    taken = {"a.weight", "b.bias"}
    assert after == {name: saved[name] if name in taken else before[name] for name in before}
    assert set(restored.left_out_keys) == {f"m/{name}" for name in before.keys() - taken}
    assert not restored.missing_keys
    ds.restore([from_stateful("m", live)], tmp_path / "c", keys="m/a.scale")
    assert live["a"].scale == source["a"].scale
    assert _contents(live["a"].bias) == before["a.bias"]


def test_a_swapping_hook_gets_nothing_that_is_not_selected(tmp_path: Path) -> None:
    def swap(_: Any, state: Any, prefix: str, *rest: Any) -> None:
        state["a"], state["b"] = state.get("b"), state.get("a")
        for name in [name for name in state if state[name] is None]:
            del state[name]

    source, live = _Pair(), _Pair()
    live.register_load_state_dict_pre_hook(swap)
    before = _contents(live.state_dict())
    ds.snapshot([from_stateful("m", source)], tmp_path / "c").wait_committed()
    ds.restore([from_stateful("m", live)], tmp_path / "c", keys="m/a", strict=False)
    assert _contents(live.state_dict()) == {"a": before["a"], "b": _contents(source.a)}


def test_what_a_module_lacks_after_its_own_load_is_told(tmp_path: Path) -> None:
    source, live = _Pair(), nn.Module()
    for name in ("a", "c"):
        setattr(live, name, nn.Parameter(torch.zeros(3, 3)))
    live.register_load_state_dict_pre_hook(lambda *arguments: None)
    ds.snapshot([from_stateful("m", source)], tmp_path / "c").wait_committed()
    restored = ds.restore([from_stateful("m", live)], tmp_path / "c", strict=False)
    assert (restored.missing_keys, restored.unexpected_keys) == (["m/c"], ["m/b"])
    assert torch.equal(live.a, source.a)
    with pytest.raises(ProviderError, match=r"(?s)'m' does not take its state.*Missing key.*\"c\".*are restored"):
        ds.restore([from_stateful("m", live)], tmp_path / "c")
    with pytest.raises(RestoreError, match=r"nothing of the providers matches 'm/c'"):
        ds.restore([from_stateful("m", live)], tmp_path / "c", keys=["m/a", "m/c"])
    with pytest.raises(ProviderError, match=r"lacks 'm/c'"):
        ds.restore([from_stateful("m", live)], tmp_path / "c", keys="m/[ac]")


@pytest.mark.parametrize("own", [False, True])
def test_what_a_file_lacks_is_refused_or_named(own: bool, tmp_path: Path) -> None:
    source, live = _ExtraObject(1.0), _ExtraObject(2.0)
    path = tmp_path / "c"
    if own:
        ds.snapshot([from_stateful("net", source)], path).wait_committed()
    else:
        torch.save(source.state_dict(), path)  # of a file of torch, only tensors are read
    rename = {"net/": "m/"} if own else {}
    before = live.weight.detach().clone()
    with pytest.raises(RestoreError, match=r"lacks 'm/_extra_state'"):
        ds.restore([from_stateful("m", live)], path, rename=rename)
    assert torch.equal(live.weight, before)
    restored = ds.restore([from_stateful("m", live)], path, rename=rename, strict=False)
    assert restored.missing_keys == ["m/_extra_state"]
    assert torch.equal(live.weight, source.weight)
    assert live.scale == 2.0


def test_a_module_without_memory_is_told_so(tmp_path: Path) -> None:
    source, live = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")
    ds.snapshot([from_stateful("m", source)], tmp_path / "c").wait_committed()
    torch.save(source.state_dict(), tmp_path / "t.pt")
    for path in (tmp_path / "c", tmp_path / "t.pt"):
        with pytest.raises(RestoreError, match=r"'m/weight': .*on the meta device.*to_empty"):
            ds.restore([from_stateful("m", live)], path)


def test_a_comparison_keeps_no_memory(tmp_path: Path) -> None:
    source, live = _Pair(), _swapping(0.0)
    ds.snapshot([from_stateful("m", source)], tmp_path / "c").wait_committed()
    provider = from_stateful("m", live)
    before = dict(vars(provider))
    assert ds.compare([provider], tmp_path / "c").fits
    assert vars(provider) == before
