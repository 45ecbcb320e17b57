"""Tensors scanned all at once are described, saved and restored like tensors that are looked at one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import datastates as ds
from datastates.errors import RestoreError
from datastates.providers import HostTensorProvider, from_state_dict, from_stateful
from datastates.state import arrays, dtypes, tensor_scan
from datastates.state.known_layout import Describer
from datastates.state.shards import HOST, Shards
from datastates.state.strides import aligned, are_row_major, is_dense
from datastates.testing import equal

BASE = torch.arange(48.0)
TENSORS = {
    "matrix": torch.arange(6.0).reshape(2, 3),
    "scalar": torch.tensor(7),
    "empty": torch.zeros(0, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "strided": torch.arange(24.0).reshape(4, 6)[:, ::2],
    "one row": torch.arange(8.0).reshape(8, 1)[:1].expand(1, 1),
    "view": BASE[:8],
    "its neighbour": BASE[4:16].view(3, 4),
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "half": torch.ones(5, dtype=torch.bfloat16),
}


@pytest.fixture(params=["at once", "one by one"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test both ways: with the scan, and with a scan that leaves all tensors to be looked at one by one."""
    if request.param == "one by one":
        monkeypatch.setattr(tensor_scan, "layout", lambda values: None)
    return str(request.param)


def test_a_layout_is_what_torch_says() -> None:
    tensors = list(TENSORS.values())
    seen = tensor_scan.layout(tensors)
    assert seen is not None
    assert seen.address.tolist() == [t.data_ptr() for t in tensors]
    assert seen.device.tolist() == [HOST] * len(tensors)
    assert [dtypes.ALL[code].name for code in seen.dtype.tolist()] == [str(t.dtype)[6:] for t in tensors]
    assert seen.ndim.tolist() == [t.ndim for t in tensors]
    assert seen.dims.tolist() == [n for t in tensors for n in t.shape]
    assert seen.strides.tolist() == [n for t in tensors for n in t.stride()]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [d.name for d in dtypes.ALL if d.in_torch and hasattr(torch, d.name)])
def test_every_element_type_is_told_from_every_other(dtype: str) -> None:
    seen = tensor_scan.layout([torch.empty(2, dtype=getattr(torch, dtype))])
    if "complex" in dtype or dtype.startswith("bits"):
        assert seen is None  # complex tensors may be conjugated; bits types cannot be exchanged
    else:
        assert seen is not None
        assert dtypes.ALL[int(seen.dtype[0])].name == dtype


@pytest.mark.parametrize(
    "other",
    [
        np.ones(2),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch._neg_view(torch.ones(2)),
        torch.eye(2).to_sparse(),
        torch.ones(2, device="meta"),
        type("Own", (torch.Tensor,), {})(2),
        3,
    ],
    ids=["NumPy", "conjugated", "negated", "sparse", "meta", "a subclass", "no array"],
)
def test_other_arrays_are_not_looked_at_at_once(other: object) -> None:
    assert tensor_scan.layout([torch.ones(2), other]) is None


class _Own(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "tensors",
    [[], list(TENSORS.values()), [torch.ones(2), _Own(2), BASE[3:]]],
    ids=["none", "the usual", "a subclass among them"],
)
def test_a_look_has_what_keeps_the_tensors_memory(tensors: list[torch.Tensor]) -> None:
    seen, again = tensor_scan.look(tensors, memory=True), tensor_scan.look(tensors)
    assert seen is not None
    assert again is not None
    assert again.memory == []
    memory: list[Any] = seen.memory
    assert [m.data_ptr() for m in memory] == [t.untyped_storage().data_ptr() for t in tensors]
    assert (seen.places, seen.versions.tolist()) == (again.places, again.versions.tolist())


@pytest.mark.parametrize("before", [TENSORS, {}, {"others": BASE}], ids=["the same", "none", "others"])
@pytest.mark.parametrize("count", [0, 1, len(TENSORS) - 1, len(TENSORS)])
def test_what_was_known_of_other_tensors_changes_no_places(before: dict[str, torch.Tensor], count: int) -> None:
    known, tensors = tensor_scan.look(list(before.values())), list(TENSORS.values())[:count]
    seen, anew = tensor_scan.look(tensors, known=known.places if known else b""), tensor_scan.look(tensors)
    assert known is not None
    assert seen is not None
    assert anew is not None
    assert seen.places == anew.places
    assert (seen.places is known.places) == (anew.places == known.places)


def test_only_a_look_for_the_memory_refuses_a_negated_tensor() -> None:
    tensors = [torch.ones(2), torch._neg_view(torch.ones(2))]
    assert tensor_scan.look(tensors, memory=True) is None
    assert tensor_scan.look(tensors) is not None


@given(st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=4), max_size=5))
def test_contiguous_is_what_torch_calls_so(shapes: list[list[tuple[int, int]]]) -> None:
    ndim = np.array([len(s) for s in shapes], np.int64)
    dims, strides = (np.array([d[i] for s in shapes for d in s], np.uint64) for i in range(2))
    sizes_of, steps_of = (aligned(column, np.cumsum(ndim) - ndim, ndim, 4, 1) for column in (dims, strides))
    for shape, is_contiguous in zip(shapes, are_row_major(sizes_of, steps_of).tolist(), strict=True):
        sizes, steps = [d for d, _ in shape], [s for _, s in shape]
        meta = torch.empty_strided(sizes, steps, device="meta")
        if meta.numel():
            assert is_contiguous == meta.is_contiguous()
            assert is_dense(sizes, steps) or not is_contiguous


def test_arrays_are_described_alike_on_both_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {k: t for k, t in TENSORS.items() if k != "strided"}  # which is copied to be saved
    lazy = [i % 2 == 0 for i in range(len(tensors))]
    at_once = Describer().describe(list(tensors), list(tensors.values()), lazy)
    monkeypatch.setattr(tensor_scan, "layout", lambda values: None)
    one_by_one = Describer().describe(list(tensors), list(tensors.values()), lazy)
    assert isinstance(at_once, Shards)
    assert isinstance(one_by_one, Shards)
    assert [repr(s) for s in at_once.layout] == [repr(s) for s in one_by_one.layout]


def test_a_snapshot_is_restored_whichever_way_the_arrays_lie(route: str, tmp_path: Path) -> None:
    ds.snapshot([HostTensorProvider("s", TENSORS)], tmp_path / "c").wait_committed()
    base = torch.zeros(40)
    live: dict[str, Any] = {k: torch.zeros_like(t.detach()) for k, t in TENSORS.items()}
    live |= {"matrix": torch.zeros(3, 2).t(), "view": base[:8], "its neighbour": base[4:16].view(3, 4)}
    ds.restore([HostTensorProvider("s", live)], tmp_path / "c")
    assert equal(live, {k: t.detach() for k, t in TENSORS.items()})


def test_tied_tensors_are_restored_into_tied_and_into_separate_ones(route: str, tmp_path: Path) -> None:
    weight = torch.arange(4.0)
    ds.snapshot([from_state_dict("s", {"a": weight, "b": [weight], "c": weight[:2]})], tmp_path / "c").wait_committed()
    tied = torch.zeros(4)
    live: dict[str, Any] = {"a": tied, "b": [tied], "c": tied[:2]}
    ds.restore([from_state_dict("s", live)], tmp_path / "c")
    assert tied.tolist() == [0, 1, 2, 3]
    live = {"a": torch.zeros(4), "b": [torch.zeros(4)], "c": torch.zeros(2)}
    ds.restore([from_state_dict("s", live)], tmp_path / "c")
    assert equal(live, {"a": weight, "b": [weight], "c": weight[:2]})
    other = torch.zeros(6)
    with pytest.raises(RestoreError, match="shares live memory"):
        ds.restore([from_state_dict("s", {"a": other[:4], "b": [torch.zeros(4)], "c": other[3:5]})], tmp_path / "c")
    assert not other.any()


def test_tied_states_of_an_optimizer_stay_tied_when_it_has_none_yet(route: str, tmp_path: Path) -> None:
    class Loader:
        def __init__(self) -> None:
            self.state: dict[str, Any] = {}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    full, fresh = Loader(), Loader()
    shared = torch.arange(3.0)
    full.state = {"a": shared, "b": {"c": shared}}
    ds.snapshot([from_stateful("l", full)], tmp_path / "c").wait_committed()
    ds.restore([from_stateful("l", fresh)], tmp_path / "c", strict=False)
    assert equal(fresh.state, full.state)
    assert fresh.state["a"].data_ptr() == fresh.state["b"]["c"].data_ptr()


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(2, 1)])
def test_one_that_differs_is_named_on_both_routes(route: str, other: torch.Tensor, tmp_path: Path) -> None:
    ds.snapshot([from_state_dict("s", {"a": torch.ones(2), "b": torch.ones(2)})], tmp_path / "c").wait_committed()
    live = {"a": torch.zeros(2), "b": other}
    with pytest.raises(RestoreError, match=r"'s/b': float32 of shape \(2,\) in the checkpoint"):
        ds.restore([from_state_dict("s", live)], tmp_path / "c")
    assert not live["a"].any()
    assert list(ds.restore([from_state_dict("s", live)], tmp_path / "c", strict=False).mismatched_keys) == ["s/b"]
    assert live["a"].all()


def test_no_array_of_a_state_that_fits_is_looked_at_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state: dict[str, Any] = {"a": torch.ones(2), "n": [torch.ones(3), {"b": torch.ones(2)}], "lr": 0.1}
    ds.snapshot([from_state_dict("s", state)], tmp_path / "c").wait_committed()
    state["a"].zero_()
    looked: list[object] = []
    view = arrays._view
    monkeypatch.setattr(arrays, "_view", lambda array: looked.append(array) or view(array))
    ds.restore([from_state_dict("s", state)], tmp_path / "c")
    assert state["a"].all()
    assert looked == []


def test_element_types_are_known_in_deterministic_mode() -> None:
    known = tensor_scan._exchanged_dtypes().__self__  # type: ignore[attr-defined]
    tensor_scan._exchanged_dtypes.cache_clear()
    torch.use_deterministic_algorithms(True)
    try:
        anew = tensor_scan._exchanged_dtypes().__self__  # type: ignore[attr-defined]
    finally:
        torch.use_deterministic_algorithms(False)
    assert anew == known
    assert len(known) > 10


def test_an_interrupt_while_tensors_are_scanned_is_not_lost() -> None:
    class Interrupted(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if function == torch.Tensor._version.__get__:
                raise KeyboardInterrupt
            return function(*args, **kwargs or {})

    with Interrupted(), pytest.raises(KeyboardInterrupt):
        tensor_scan.look([BASE], memory=True)
