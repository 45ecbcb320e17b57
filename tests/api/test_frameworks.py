"""What one framework saved, another one opens, without the first, and without a copy where that can be."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import datastates as ds
from datastates.providers import from_pytree, from_state_dict
from datastates.state.new_memory import Framework

WORDS = np.arange(12, dtype=np.float32).reshape(3, 4)
HALVES = WORDS.astype(ml_dtypes.bfloat16)


def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed: what it opens was NOT looked at")


def jax() -> Any:
    return pytest.importorskip("jax", reason="JAX is not installed: what it opens was NOT looked at")


def of_torch(path: Path) -> Path:
    words = torch().from_numpy(WORDS.copy())
    state = {"w": words, "h": words.bfloat16(), "t": words.bfloat16().t(), "n": 5}
    ds.snapshot([from_state_dict("s", state)], path).wait_committed()
    return path


def of_jax(path: Path) -> Path:
    tree = {"w": jax().numpy.asarray(WORDS), "h": jax().numpy.asarray(HALVES), "n": 5}
    ds.snapshot([from_pytree("s", tree)], path).wait_committed()
    return path


def of_numpy(path: Path) -> Path:
    ds.snapshot([from_state_dict("s", {"w": WORDS, "h": HALVES, "n": 5})], path).wait_committed()
    return path


def run(script: str, *arguments: object) -> None:
    """Run a script in a new process, which has imported nothing."""
    subprocess.run([sys.executable, "-c", script, *map(str, arguments)], check=True, timeout=60)


OPENS = """
import sys
import datastates as ds
for path in sys.argv[1:]:
    with ds.open(path) as opened:
        assert [type(opened[key]).__name__ for key in ("s/w", "s/h")] == ["ndarray"] * 2
        assert [opened[key].dtype.name for key in ("s/w", "s/h")] == ["float32", "bfloat16"]
        assert opened["s/w"].tolist() == opened["s/h"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert ds.load(path)["s"]["n"] == 5
assert not {"torch", "jax"} & set(sys.modules)
"""


def test_arrays_of_numpy_need_no_framework(tmp_path: Path) -> None:
    run(OPENS, of_numpy(tmp_path / "c"))


def test_arrays_of_jax_need_neither_jax_nor_torch(tmp_path: Path) -> None:
    run(OPENS, of_jax(tmp_path / "c"))


@pytest.mark.parametrize("save", [of_jax, of_numpy])
def test_torch_opens_the_file_as_its_own(save: Any, tmp_path: Path) -> None:
    path = save(tmp_path / "c") / "rank-00000.pt"
    state = torch().load(path, weights_only=True, mmap=True)["s"]
    assert [state[key].dtype for key in ("w", "h")] == [torch().float32, torch().bfloat16]
    assert state["w"].tolist() == state["h"].tolist() == WORDS.tolist()
    assert state["n"] == 5


def test_torch_restores_what_jax_saved(tmp_path: Path) -> None:
    live = {"w": torch().zeros(3, 4), "h": torch().zeros(3, 4).bfloat16(), "n": 0}
    ds.restore([from_state_dict("s", live)], of_jax(tmp_path / "c"))
    assert live["w"].tolist() == live["h"].tolist() == WORDS.tolist()
    assert live["n"] == 5


def test_torch_restores_an_array_of_numpy_in_another_order(tmp_path: Path) -> None:
    ds.snapshot([from_state_dict("s", {"h": np.asfortranarray(HALVES)})], tmp_path / "c").wait_committed()
    live = {"h": torch().zeros(3, 4).bfloat16()}
    ds.restore([from_state_dict("s", live)], tmp_path / "c")
    assert live["h"].tolist() == WORDS.tolist()


AS_NUMPY = """
import sys
import datastates as ds
path, device = sys.argv[1:]
with ds.open(path, framework="np") as opened:
    assert {type(array).__name__ for array in opened.values()} == {"ndarray"}
    assert {array.dtype.name for array in opened.values()} == {"float32", "bfloat16", "uint16"}
    assert opened["s/w"].tolist() == opened["s/h"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert opened["s/t"].tolist() == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
state = ds.load(path, framework="np")["s"]
assert {type(state[key]).__name__ for key in "whtpu"} == {"ndarray"}
assert state["w"].tolist() == state["t"].T.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
assert (state["p"].tolist(), state["u"].tolist(), state["n"]) == ([1, 1], [1, 1], 5)
assert (type(state["size"]), state["size"], repr(state["dtype"])) == (tuple, (3,), "torch.bfloat16")
try:
    ds.load(device, framework="np")
    raise AssertionError("an object of torch was built")
except ImportError as error:
    assert "torch.device is built by torch only" in str(error)
assert not {"torch", "jax"} & set(sys.modules)
"""


def test_what_torch_saved_becomes_arrays_of_numpy_and_torch_is_not_imported(tmp_path: Path) -> None:
    words = torch().from_numpy(WORDS.copy())
    state = {"w": words, "h": words.bfloat16(), "t": words.bfloat16().t(), "u": torch().ones(2, dtype=torch().uint16)}
    state |= {"p": torch().nn.Parameter(torch().ones(2)), "n": 5}
    state |= {"size": torch().Size([3]), "dtype": torch().bfloat16}
    ds.snapshot([from_state_dict("s", state)], tmp_path / "c").wait_committed()
    torch().save({"device": torch().device("cpu"), "w": words}, tmp_path / "device.pt")
    run(AS_NUMPY, tmp_path / "c", tmp_path / "device.pt")


@pytest.mark.parametrize("save", [of_jax, of_numpy])
def test_what_others_saved_becomes_tensors_of_torch(save: Any, tmp_path: Path) -> None:
    torch()
    path = save(tmp_path / "c")
    with ds.open(path, framework="pt") as opened:
        tensors = [opened["s/w"], opened["s/h"]]
    state = ds.load(path, framework="pt")["s"]
    for words, halves in (tensors, (state["w"], state["h"])):
        assert [words.dtype, halves.dtype] == [torch().float32, torch().bfloat16]
        assert words.tolist() == halves.tolist() == WORDS.tolist()
    assert state["n"] == 5


def test_both_kinds_of_several_ranks(tmp_path: Path) -> None:
    torch()

    def save(rank: int) -> None:
        state = {"w": torch().ones(2)} if rank else {"w": np.zeros(2, np.float32)}
        provider = from_state_dict(f"s{rank}", state)
        ds.snapshot([provider], tmp_path / "c", rank=rank, world_size=2).wait_committed()

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(save, range(2)))
    kinds: dict[Framework, type] = {"np": np.ndarray, "pt": torch().Tensor}
    for framework, kind in kinds.items():
        found = ds.load(tmp_path / "c", framework=framework)
        assert {type(found[name]["w"]) for name in ("s0", "s1")} == {kind}
        assert [found[name]["w"].tolist() for name in ("s0", "s1")] == [[0, 0], [1, 1]]


@pytest.mark.parametrize("call", [ds.load, ds.open])
def test_frameworks_that_cannot_be_are_refused_by_name(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = of_numpy(tmp_path / "c")
    with pytest.raises(ValueError, match="framework: 'jax' is neither 'pt' nor 'np'"):
        call(path, framework="jax")
    for device in ("cuda", 0):
        with pytest.raises(ValueError, match=f"device: {device!r} beside framework='np'"):
            call(path, framework="np", device=device)
    call(path, framework="np", device="cpu:0")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "torch", None)
        with pytest.raises(ImportError, match="framework: 'pt' needs torch, which is not installed"):
            call(path, framework="pt")
    if call is ds.load:
        with pytest.raises(ValueError, match="like: its arrays say what they are, beside framework='np'"):
            call(path, framework="np", like={})


def test_types_that_a_framework_lacks_are_refused_by_name(tmp_path: Path) -> None:
    ds.snapshot([from_state_dict("s", {"i": WORDS.astype(ml_dtypes.int4)})], tmp_path / "n").wait_committed()
    state = {"c": torch().ones(2, dtype=torch().uint8).view(torch().bits8)}
    ds.snapshot([from_state_dict("s", state)], tmp_path / "t").wait_committed()
    refused: dict[Framework, tuple[str, str]] = {
        "pt": ("n", "'s/i' is of type int4, which torch"),
        "np": ("t", "'s/c' is of .* NumPy"),
    }
    for framework, (name, said) in refused.items():
        with pytest.raises(ImportError, match=said):
            ds.load(tmp_path / name, framework=framework)
        with ds.open(tmp_path / name, framework=framework) as opened, pytest.raises(ImportError, match=said):
            dict(opened)


RESTORES = """
import sys
import jax
import datastates as ds
from datastates.providers import from_pytree
zeros = jax.numpy.zeros((3, 4))
live = {"w": zeros, "h": zeros.astype("bfloat16"), "t": zeros.T.astype("bfloat16"), "n": 0}
provider = from_pytree("s", live)
ds.restore([provider], sys.argv[1])
assert provider.tree["n"] == 5
others = [ds.load(path, like={"s": live})["s"] for path in sys.argv[2:]]
for tree in (provider.tree, *others):
    assert [type(tree[key]) for key in ("w", "h", "t")] == [type(zeros)] * 3
    values = [tree["w"].tolist(), tree["h"].tolist(), tree["t"].T.tolist()]
    assert values == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]] * 3
cast = from_pytree("s", {**live, "w": zeros.astype("bfloat16"), "h": zeros})
ds.restore([cast], sys.argv[2], cast=True)
assert cast.tree["w"].tolist() == cast.tree["h"].tolist() == values[0]
assert "torch" not in sys.modules
"""


def test_jax_restores_what_torch_saved_without_torch(tmp_path: Path) -> None:
    jax()
    words = torch().from_numpy(WORDS.copy())
    state = {"s": {"w": words, "h": words.bfloat16(), "t": words.bfloat16().t()}}
    torch().save(state, tmp_path / "file.pt")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    dcp.save(state["s"], checkpoint_id=tmp_path / "dcp", no_dist=True)
    run(RESTORES, of_torch(tmp_path / "c"), tmp_path / "file.pt", tmp_path / "dcp")


def test_what_is_opened_goes_to_the_other_framework_without_a_copy(tmp_path: Path) -> None:
    with ds.open(of_torch(tmp_path / "torch")) as opened:
        tensor = opened["s/h"]
    array = jax().numpy.from_dlpack(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert array.tolist() == WORDS.tolist()
    with ds.open(of_jax(tmp_path / "jax")) as opened:
        words, halves = opened["s/w"], opened["s/h"]
    assert torch().from_numpy(words).data_ptr() == words.ctypes.data
    # NumPy's own exchange does not know the types of ml_dtypes
    tensor = torch().from_numpy(halves.view(np.int16)).view(torch().bfloat16)
    assert tensor.data_ptr() == halves.ctypes.data
    assert tensor.tolist() == WORDS.tolist()
