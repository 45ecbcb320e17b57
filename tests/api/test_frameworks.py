"""What one framework saved, another one opens, without the first, and without a copy where that can be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import datastates as ds
from datastates.providers import from_pytree, from_state_dict

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


RESTORES = """
import sys
import jax
import datastates as ds
from datastates.providers import from_pytree
zeros = jax.numpy.zeros((3, 4))
provider = from_pytree("s", {"w": zeros, "h": zeros.astype("bfloat16"), "t": zeros.T.astype("bfloat16"), "n": 0})
ds.restore([provider], sys.argv[1])
tree = provider.tree
assert [type(tree[key]) for key in ("w", "h", "t")] == [type(zeros)] * 3
assert tree["w"].tolist() == tree["h"].tolist() == tree["t"].T.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
assert tree["n"] == 5
assert "torch" not in sys.modules
"""


def test_jax_restores_what_torch_saved_without_torch(tmp_path: Path) -> None:
    jax()
    run(RESTORES, of_torch(tmp_path / "c"))


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
