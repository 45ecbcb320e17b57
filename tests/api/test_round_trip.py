"""Any state that ``torch.save`` takes comes back equal, from this package and from ``torch.load``."""

from __future__ import annotations

import collections
import dataclasses
import enum
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import datastates as ds
from datastates.container import pickle_reader
from datastates.errors import FormatError, ProviderError
from datastates.providers import PickledObjectProvider, from_state_dict
from datastates.state import dtypes
from datastates.testing import equal

SMALL = {"host_cache": "4MiB", "block": "1MiB"}


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Box:
    weight: Any
    name: str = "box"


class Colour(enum.Enum):
    RED = 1


TRUST = [f"{__name__}.{c.__name__}" for c in (Point, Box, Colour)]


def save(state: object, path: Path) -> Path:
    ds.snapshot([from_state_dict("s", state)], path, **SMALL).wait_committed()
    return path / "rank-00000.pt"


def plain_load(file: Path, *, weights_only: bool = True) -> Any:
    return torch.load(file, weights_only=weights_only, mmap=True)["s"]


TORCH_DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
    torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.bits8, torch.bits16, torch.bits1x8, torch.bits2x4,
    torch.bits4x2,
]  # fmt: skip


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    count = torch.Size(shape).numel() * torch.tensor([], dtype=dtype).element_size()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that complex32 is experimental
        return torch.randint(high, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {
        "t": random_tensor(dtype, (3, 5)),
        "empty": random_tensor(dtype, (0, 2)),
        "scalar": random_tensor(dtype, ()),
    }
    file = save(state, tmp_path / "c")
    assert equal(plain_load(file), state)
    assert equal(ds.load(tmp_path / "c")["s"], state)


def test_dtypes_are_all_that_torch_saves() -> None:
    assert {str(d)[6:] for d in TORCH_DTYPES} == dtypes.TORCH


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).astype(d).reshape(2, 3)
        for d in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1", "u2", "u4", "u8", "c8", "c16", "?")
    ],
    ids=lambda a: str(a.dtype),
)
def test_numpy_arrays_come_back_as_numpy_and_open_as_tensors(array: np.ndarray, tmp_path: Path) -> None:
    state = {
        "a": array,
        "t": array.T,
        "reversed": array[::-1],
        "scalar": array[0, 0:1].reshape(()),
        "gaps": array[:, ::2],
    }
    file = save(state, tmp_path / "c")
    assert equal(ds.load(tmp_path / "c")["s"], state)
    opened = plain_load(file)
    assert all(np.array_equal(opened[k].numpy(), v) for k, v in state.items())


OF_ML_DTYPES = [
    ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz,
    ml_dtypes.float8_e5m2fnuz, ml_dtypes.float8_e8m0fnu, ml_dtypes.int4, ml_dtypes.float4_e2m1fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", OF_ML_DTYPES, ids=lambda d: d.__name__)
def test_arrays_of_ml_dtypes_are_stored_as_torchs_types_or_bytes(
    dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.arange(12).astype(dtype).reshape(3, 4)
    file = save({"a": array, "t": array.T}, tmp_path / "c")
    opened = plain_load(file)
    assert opened["a"].dtype == (getattr(torch, dtype.__name__) if dtype.__name__ in dtypes.TORCH else torch.uint8)
    assert opened["a"].view(torch.uint8).numpy().tobytes() == array.tobytes()
    loaded = ds.load(tmp_path / "c")["s"]
    into = np.zeros_like(array)
    ds.restore([from_state_dict("s", {"a": into, "t": into.T.copy()})], tmp_path / "c", **SMALL)
    for found in (loaded["a"], loaded["t"].T, into):
        assert found.dtype == array.dtype
        assert found.tobytes() == array.tobytes()
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match=rf"'s/[at]' is of type {dtype.__name__}.*install .*ml_dtypes"):
        ds.load(tmp_path / "c")


@pytest.mark.parametrize(
    "array",
    [np.array(["a", None], object), np.array(["2020-01-01"], "M8[D]"), np.array(["ab"]), np.zeros(2, ">f4"),
     np.zeros(2, [("x", "f4"), ("y", "i2")])],
    ids=lambda a: str(a.dtype),
)  # fmt: skip
def test_other_numpy_arrays_are_pickled(array: np.ndarray, tmp_path: Path) -> None:
    save({"a": array}, tmp_path / "c")
    loaded = ds.load(tmp_path / "c")["s"]["a"]
    assert loaded.dtype == array.dtype.newbyteorder("=")  # NumPy's own pickles come back in native order
    assert np.array_equal(loaded, array)


def test_layouts(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "transposed": base.t(),
        "expanded": torch.ones(1, 3).expand(5, 3),
        "column": torch.arange(1000.0).reshape(100, 10)[:, 3],
        "strided": base[::2, 1::3],
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
    }
    file = save(state, tmp_path / "c")
    assert equal(plain_load(file), state)
    loaded = ds.load(tmp_path / "c")["s"]
    assert equal(loaded, state)
    assert loaded["transposed"].stride() == state["transposed"].stride()


def test_a_view_does_not_drag_its_whole_storage_along(tmp_path: Path) -> None:
    file = save({"v": torch.zeros(1 << 20)[:10], "column": torch.zeros(1 << 10, 1 << 10)[:, 0]}, tmp_path / "c")
    assert file.stat().st_size < 20_000


@pytest.mark.parametrize("load", [lambda f: plain_load(f), lambda f: ds.load(f)["s"]], ids=["torch", "datastates"])
def test_views_that_share_storage_still_share_it(load: Any, tmp_path: Path) -> None:
    base = torch.arange(10.0)
    file = save({"base": base, "left": base[:4], "right": base[4:], "again": base}, tmp_path / "c")
    loaded = load(file)
    loaded["base"][5] = 77.0
    assert loaded["right"][1] == 77.0
    assert loaded["again"][5] == 77.0


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    weight = torch.randn(500, 500)
    file = save({"embedding": weight, "head": weight.detach()}, tmp_path / "c")
    assert file.stat().st_size < 1.1 * weight.nbytes
    loaded = plain_load(file)
    assert loaded["head"].data_ptr() == loaded["embedding"].data_ptr()


@pytest.mark.parametrize(
    ("more", "natively"), [({"n": 7}, True), ({"pair": (torch.ones(2), [2])}, False), ({"colour": Colour.RED}, False)]
)
def test_what_several_providers_share_is_loaded_once(
    more: dict[str, object], natively: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(5, 4, requires_grad=True)
    states = [{"a": weight}, {"b": weight.detach(), "rows": weight.detach()[1:]}, more]
    providers = [from_state_dict(f"p{n}", state) for n, state in enumerate(states)]
    ds.snapshot(providers, tmp_path / "c", **SMALL).wait_committed()
    opcode_by_opcode: list[object] = []
    survey = pickle_reader.survey
    monkeypatch.setattr(pickle_reader, "survey", lambda *a, **k: opcode_by_opcode.append(a) or survey(*a, **k))
    loaded = ds.load(tmp_path / "c", trust=TRUST, **SMALL)
    assert equal(loaded, {f"p{n}": state for n, state in enumerate(states)})
    assert (not opcode_by_opcode) == natively
    first = loaded["p0"]["a"]
    assert first.requires_grad
    assert not loaded["p1"]["b"].requires_grad
    assert {t.untyped_storage().data_ptr() for t in loaded["p1"].values()} == {first.untyped_storage().data_ptr()}


def test_a_parameter_that_cannot_require_a_gradient_is_a_damaged_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"w": torch.ones(3)}, tmp_path / "c")

    def refuse(array: object, ref: object) -> object:
        raise RuntimeError("only floating point tensors can require gradients")

    monkeypatch.setattr("datastates.reading.whole_checkpoint.as_referred", refuse)
    with pytest.raises(FormatError, match=r"rank-00000\.pt: objects cannot be decoded: RuntimeError"):
        ds.load(tmp_path / "c", **SMALL)


def test_gradients_and_parameters(tmp_path: Path) -> None:
    leaf = torch.ones(3, requires_grad=True)
    state = {
        "leaf": leaf,
        "middle": leaf * 2,
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
    }
    loaded = plain_load(save(state, tmp_path / "c"))
    assert equal(loaded, state)
    assert {k: v.requires_grad for k, v in loaded.items()} == {
        "leaf": True,
        "middle": True,
        "parameter": True,
        "frozen": False,
    }
    assert type(loaded["parameter"]) is torch.nn.Parameter


def test_tensor_larger_than_the_host_cache(tmp_path: Path) -> None:
    state = {"t": torch.randn(3 << 20), "n": np.arange(2 << 20)}
    assert state["t"].nbytes > 4 << 20
    file = save(state, tmp_path / "c")
    assert equal(ds.load(tmp_path / "c")["s"], state)
    assert torch.equal(plain_load(file)["t"], state["t"])


KEYS = [
    "a.b",
    "a/b",
    "a|b",
    "0",
    0,
    -1,
    "-1",
    "",
    "~0",
    "~1",
    "~",
    "ü☃",
    "\n",
    "\ud800",
    " ",
    True,
    None,
    2.5,
    (1, "x"),
    b"k",
]


def test_odd_keys(tmp_path: Path) -> None:
    state = {k: torch.tensor(float(i)) for i, k in enumerate(KEYS)}
    state["nested"] = {k: {k: torch.tensor(i)} for i, k in enumerate(KEYS)}
    save(state, tmp_path / "c")
    assert equal(ds.load(tmp_path / "c")["s"], state)


def test_odd_keys_open_in_torch(tmp_path: Path) -> None:
    state = {k: torch.tensor(float(i)) for i, k in enumerate(KEYS) if k != "\ud800"}
    assert equal(plain_load(save(state, tmp_path / "c")), state)


@pytest.mark.parametrize("name", ["s", "\ud800"])
def test_odd_keys_restore_in_place(name: str, tmp_path: Path) -> None:
    state = {k: torch.tensor(float(i)) for i, k in enumerate(KEYS)}
    ds.snapshot([from_state_dict(name, state)], tmp_path / "c").wait_committed()
    other = {k: torch.zeros(()) for k in KEYS}
    ds.restore([from_state_dict(name, other)], tmp_path / "c", verify="digest")
    assert equal(other, state)


def test_containers_and_values(tmp_path: Path) -> None:
    t = torch.arange(3)
    state = {
        "tuple": (t, (t + 1, [t + 2])),
        "ordered": collections.OrderedDict([("z", t), ("a", 1)]),
        "values": [
            None,
            True,
            1,
            -(2**70),
            1.5,
            float("nan"),
            float("-inf"),
            1j,
            "text",
            b"\xff",
            {1, 2},
            frozenset("a"),
        ],
        "torch": [torch.Size([1, 2]), torch.float16, torch.device("cpu")],
        "empty": [{}, [], ()],
    }
    file = save(state, tmp_path / "c")
    assert equal(ds.load(tmp_path / "c")["s"], state)
    state.pop("values")
    assert equal({k: v for k, v in plain_load(file, weights_only=False).items() if k != "values"}, state)


def test_values_open_with_weights_only(tmp_path: Path) -> None:
    state = {"values": [None, True, 1, -(2**70), 1.5, 1j, "text", b"\xff", {1, 2}], "size": torch.Size([1])}
    assert equal(plain_load(save(state, tmp_path / "c")), state)


def test_objects_of_other_classes(tmp_path: Path) -> None:
    state = {
        "point": Point(torch.arange(3), 2),
        "box": Box(torch.arange(4.0), "b"),
        "default": collections.defaultdict(list, a=[1]),
        "colour": Colour.RED,
        "scalar": np.float32(1.5),
    }
    file = save(state, tmp_path / "c")
    trust = [*TRUST, "collections.defaultdict", "builtins.list"]
    for loaded in (ds.load(tmp_path / "c", trust=trust)["s"], plain_load(file, weights_only=False)):
        assert torch.equal(loaded["point"].x, state["point"].x)
        assert torch.equal(loaded["box"].weight, state["box"].weight)
        assert loaded["box"].name == "b"
        assert {k: loaded[k] for k in ("default", "colour", "scalar")} == {
            k: state[k] for k in ("default", "colour", "scalar")
        }


@pytest.mark.filterwarnings("ignore:.*(sparse|Sparse|quantiz|TypedStorage)")
def test_tensors_that_are_not_plain_memory(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    state = {"coo": sparse, "meta": torch.empty(2, 3, device="meta")}
    save(state, tmp_path / "c")
    loaded = ds.load(tmp_path / "c", trust="all")["s"]
    assert torch.equal(loaded["coo"].to_dense(), torch.eye(3))
    assert loaded["meta"].is_meta
    assert loaded["meta"].shape == (2, 3)


def test_containers_that_occur_twice_or_in_themselves(tmp_path: Path) -> None:
    shared = {"t": torch.arange(2)}
    loop: list[Any] = [1]
    loop.append(loop)
    save({"a": shared, "b": shared, "loop": loop}, tmp_path / "c")
    loaded = ds.load(tmp_path / "c")["s"]
    assert loaded["a"] is loaded["b"]
    assert loaded["loop"][1] is loaded["loop"]


def test_an_object_that_does_not_pickle_is_named(tmp_path: Path) -> None:
    with pytest.raises(ds.DatastatesError, match=r"inner/0.*function"):
        save({"inner": [lambda: 0]}, tmp_path / "c")


def test_a_memory_format_is_named_as_torch_cannot_pickle_it(tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match=r"inner/0.*memory_format"):
        save({"inner": [torch.channels_last]}, tmp_path / "c")


def test_zipfile_finds_nothing_wrong(tmp_path: Path) -> None:
    file = save({"t": torch.randn(100_000), "n": [1, 2]}, tmp_path / "c")
    assert zipfile.ZipFile(file).testzip() is None


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.builds(
        lambda dtype, shape, seed: random_tensor(dtype, tuple(shape), seed),
        st.sampled_from([d for d in TORCH_DTYPES if d is not torch.complex32]),
        st.lists(st.integers(0, 3), max_size=3),
        st.integers(0, 9),
    ),
    st.builds(lambda n, d: np.arange(n).astype(d), st.integers(0, 9), st.sampled_from(["f4", "i8", "u2", "?"])),
)
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=4), st.integers(0, 3)), inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=STATES)
def test_nested_states_round_trip(state: object, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("state") / "c"
    save({"root": state}, path)
    assert equal(ds.load(path)["s"], {"root": state})
    taken: list[object] = []
    ds.restore([PickledObjectProvider("s", get=lambda: None, set=taken.append)], path)
    assert equal(taken, [{"root": state}])
