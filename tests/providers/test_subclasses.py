"""Tensors that are more than their elements: subclasses with and without storage, and attributes."""

from __future__ import annotations

from collections import OrderedDict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import datastates as ds
from datastates.errors import ProviderError, RestoreError, TrustError
from datastates.providers import PickledObjectProvider, from_state_dict, from_stateful


class Pair(torch.Tensor):
    """A wrapper without storage; pickling makes its parts anew, as for torch's sparse subclasses."""

    __slots__ = ("first", "second")

    @staticmethod
    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> Pair:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype)  # type: ignore[attr-defined]
        made.first, made.second = first, second
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _pair, ({"first": self.first.clone(), "parts": [self.second.clone()]},)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map(lambda x: x.first + x.second if isinstance(x, Pair) else x, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def _pair(parts: dict[str, Any]) -> Pair:
    return Pair(parts["first"], parts["parts"][0])


class Named(torch.Tensor):
    """A subclass with storage."""


def named(value: torch.Tensor, **attributes: Any) -> Named:
    made = value.as_subclass(Named)
    vars(made).update(attributes)
    return made


def attributed(value: Any, **attributes: Any) -> Any:
    vars(value).update(attributes)
    return value


def save(tmp_path: Path, value: object) -> Path:
    ds.snapshot([from_state_dict("s", value)], tmp_path / "c").wait_committed()
    return tmp_path / "c"


def test_wrappers_are_kept_apart(tmp_path: Path) -> None:
    """Pickling makes their parts anew each time, and no part may be taken for an earlier one that is gone."""
    value = [Pair(torch.full((3,), float(i)), torch.full((3,), i / 8)) for i in range(20)]
    found = ds.load(save(tmp_path, value), trust="all")["s"]
    for i, pair in enumerate(found):
        assert type(pair) is Pair
        assert torch.equal(pair.first, torch.full((3,), float(i)))
        assert torch.equal(pair.second, torch.full((3,), i / 8))


def test_one_wrapper_in_two_places_stays_one(tmp_path: Path) -> None:
    pair = Pair(torch.ones(2), torch.zeros(2))
    found = ds.load(save(tmp_path, {"a": pair, "b": [pair, {1}]}), trust="all")["s"]
    assert found["a"] is found["b"][0]


@pytest.mark.parametrize("value", [torch.arange(8.0), torch.ones(4, 4).to_sparse()], ids=["dense", "sparse"])
def test_sparse_tensors_are_kept_apart(tmp_path: Path, value: torch.Tensor) -> None:
    found = ds.load(save(tmp_path, [value * i for i in range(1, 9)]))["s"]
    for i, tensor in enumerate(found, 1):
        assert torch.equal(tensor.to_dense(), value.to_dense() * i)


NAME = f"{__name__}.Named"


def states() -> list[Any]:
    """States whose tensors have classes, flags or attributes beside their elements."""
    shared = torch.arange(6.0)
    parameter = attributed(nn.Parameter(torch.ones(3)), partition_dim=1, note=["a", {1}], mean=torch.arange(4))
    buffer = nn.Buffer(torch.ones(2), persistent=False)
    return [
        [attributed(torch.ones(3), tag="a"), attributed(torch.zeros(3, dtype=torch.uint16), tag=None)],
        {"a": parameter, "b": parameter, "buffer": buffer},
        [attributed(torch.ones(2, requires_grad=True), inner=attributed(torch.zeros(1), tag=1))],
        [named(shared, x=1), named(shared[2:]), named(torch.ones(2, requires_grad=True).clone()), shared],
        [nn.Parameter(named(torch.ones(3), x=[torch.zeros(2)]))],
        {"object": {1, 2}, "t": attributed(torch.ones(3), inside={1, 2})},
        OrderedDict(a=[(attributed(torch.ones(2), x=1.5),)]),
        nn.Parameter(torch.ones(2)),
        {"a": nn.Parameter(torch.ones(2)), "b": [nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)]},
        [nn.Parameter(torch.ones(2)), (nn.Parameter(torch.zeros(1)), [{"x": nn.Parameter(torch.ones(3)[::2])}])],
        deque([nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)]),
    ]


def assert_alike(a: Any, b: Any) -> None:
    """The same classes, elements and attributes, all the way down."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.requires_grad == b.requires_grad
        assert a.dtype == b.dtype
        with torch._C.DisableTorchFunctionSubclass():
            assert torch.equal(a, b)
        assert_alike(dict(vars(a)), dict(vars(b)))
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_alike(a[key], b[key])
    elif isinstance(a, (list, tuple, deque)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_alike(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("number", range(len(states())))
def test_what_torch_keeps_is_kept(tmp_path: Path, number: int) -> None:
    """Loading, restoring and ``torch.load`` agree, also for a second snapshot by the same provider."""
    value = states()[number]
    torch.save(value, tmp_path / "torch.pt")
    expected = torch.load(tmp_path / "torch.pt", weights_only=False)
    taken: list[Any] = []
    with ds.Checkpointer(tmp_path / "c") as ckpt:
        provider = PickledObjectProvider("s", lambda: value, taken.append)
        for step in (1, 2):
            ckpt.snapshot([provider], step=step)
        ckpt.wait()
        ckpt.restore([provider], trust=[NAME])
    files = sorted((tmp_path / "c").rglob("*.pt"))
    assert len(files) == 2
    assert_alike(taken, [expected])
    for file in files:
        assert_alike(torch.load(file, weights_only=False)["s"], expected)
        assert_alike(ds.load(file, trust=[NAME])["s"], expected)


def test_a_parameter_that_occurs_twice_is_one(tmp_path: Path) -> None:
    parameter, tensor = nn.Parameter(torch.ones(2)), torch.ones(3, requires_grad=True)
    twice = {"a": [parameter, tensor], "b": {"c": parameter, "d": tensor, "data": parameter.data}}
    path, taken = save(tmp_path, twice), []
    ds.restore([PickledObjectProvider("s", lambda: twice, taken.append)], path)
    for found in (ds.load(path)["s"], *taken):
        assert_alike(found, twice)
        assert found["a"][0] is found["b"]["c"]
        assert found["a"][1] is found["b"]["d"]
        with torch.no_grad():
            found["a"][0].zero_()
        assert torch.equal(found["b"]["data"], torch.zeros(2))


def test_attributes_are_restored_in_place(tmp_path: Path) -> None:
    tensor, parameter = torch.ones(3), nn.Parameter(torch.ones(2))
    path = save(tmp_path, [attributed(tensor, step=5), attributed(parameter, tag="saved")])
    live = [attributed(torch.zeros(3), step=0, other=1), nn.Parameter(torch.zeros(2))]
    first, second = live
    ds.restore([from_state_dict("s", live)], path)
    assert live[0] is first
    assert live[1] is second
    assert vars(first) == {"step": 5, "other": 1}
    assert vars(second) == {"tag": "saved"}
    assert torch.equal(first, torch.ones(3))
    assert torch.equal(second, torch.ones(2))


def test_attributes_are_those_of_the_call(tmp_path: Path) -> None:
    tensor = attributed(torch.ones(3), step=1)
    with ds.Checkpointer(tmp_path) as ckpt:
        ckpt.snapshot([from_state_dict("s", [tensor])], step=1)
        vars(tensor)["step"] = 2
        ckpt.wait()
    (file,) = tmp_path.rglob("*.pt")
    assert ds.load(file)["s"][0].step == 1


def test_a_subclass_is_refused_without_trust(tmp_path: Path) -> None:
    path = save(tmp_path, [named(torch.ones(3))])
    with pytest.raises(TrustError, match=NAME):
        ds.load(path)


def test_what_is_no_attribute_is_refused_by_key(tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match="weight"):
        save(tmp_path, {"weight": attributed(torch.ones(3), hook=lambda: None)})


def test_a_module_is_saved_without_attributes(tmp_path: Path) -> None:
    """Its ``state_dict()`` has none either."""
    module = nn.Linear(2, 2)
    attributed(module.weight, hook=lambda: None)
    ds.snapshot([from_stateful("m", module)], tmp_path / "c").wait_committed()
    assert vars(ds.load(tmp_path / "c")["m"]["weight"]) == {}


def test_a_module_of_subclasses_comes_back(tmp_path: Path) -> None:
    def module(value: float) -> nn.Module:
        made = nn.Linear(2, 2)
        made.weight = nn.Parameter(named(torch.full((2, 2), value)))
        return made

    ds.snapshot([from_stateful("m", module(1.0))], tmp_path / "c").wait_committed()
    live = module(0.0)
    ds.restore([from_stateful("m", live)], tmp_path / "c", trust=[NAME])
    assert torch.equal(live.weight.as_subclass(torch.Tensor), torch.ones(2, 2))


def test_a_lazy_module_that_has_seen_no_input_does_not_fit_one_that_has(tmp_path: Path) -> None:
    live = nn.LazyLinear(2)
    ds.snapshot([from_stateful("m", live)], tmp_path / "c").wait_committed()
    assert [type(value) for value in ds.load(tmp_path / "c")["m"].values()] == [nn.UninitializedParameter] * 2
    live(torch.ones(1, 3))
    with pytest.raises(RestoreError, match="'m/weight': a UninitializedParameter in the checkpoint"):
        ds.restore([from_stateful("m", live)], tmp_path / "c")


def test_a_subclass_of_a_type_without_storage_class_comes_back(tmp_path: Path) -> None:
    """torch describes the memory of such types in another way."""
    found = ds.load(save(tmp_path, [named(torch.arange(4).to(torch.uint16), x=1)]), trust=[NAME])["s"][0]
    assert type(found) is Named
    assert found.tolist() == [0, 1, 2, 3]


def test_an_object_within_an_attribute_of_a_tensor_within_an_attribute_is_kept(tmp_path: Path) -> None:
    outer, inner = torch.ones(3, device="meta"), torch.ones(2, device="meta")
    outer.inner, inner.note = inner, SimpleNamespace(n=1)  # type: ignore[attr-defined]
    ds.snapshot([from_state_dict("s", {"x": outer})], tmp_path / "c").wait_committed()
    assert ds.load(tmp_path / "c", trust="all")["s"]["x"].inner.note.n == 1


def test_arrays_inside_of_a_weight_are_named_by_it(tmp_path: Path) -> None:
    inner = torch.ones(3).to_sparse()
    state = {"layers": {"a/b": inner, "plain": torch.ones(2)}, "layer.weight": torch.ones(2, 2).to_sparse()}
    ds.snapshot([from_state_dict("model", state)], tmp_path / "c").wait_committed()
    with ds.open(tmp_path / "c") as opened:
        keys = [key for key in opened if "~5" in key]
    assert len(keys) >= 4
    assert all(":layers~1a~01b" in key or ":layer.weight" in key for key in keys)
    found = ds.load(tmp_path / "c")["model"]
    assert torch.equal(found["layers"]["a/b"].to_dense(), inner.to_dense())
