"""What is lazy by default: only what nothing can change unseen. Everything else is in the checkpoint as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hold import held

import datastates as ds
from datastates.providers import DTensorProvider, HostTensorProvider, from_pytree, from_state_dict
from datastates.state.laziness import is_lazy_by_default

SIZE = 300_000


class Own(ds.StateProvider):
    """A provider as a user writes it, which says nothing of laziness."""

    def __init__(self, name: str, arrays: dict[str, Any]) -> None:
        super().__init__(name)
        self.arrays = arrays

    def shards(self) -> list[ds.Shard]:
        return [ds.array_shard(key, array) for key, array in self.arrays.items()]


def memory_mapped(folder: Path) -> tuple[Any, Any]:
    np.zeros(SIZE, np.float32).tofile(folder / "mapped")
    array = np.memmap(folder / "mapped", np.float32, "r+")
    return array, array


def shares(make: Callable[[Any], Any]) -> Callable[[Path], tuple[Any, Any]]:
    def made(folder: Path) -> tuple[Any, Any]:
        del folder
        array = np.zeros(SIZE, np.float32)
        return make(array), array

    return made


def numpy_view_of_a_tensor(folder: Path) -> tuple[Any, Any]:
    del folder
    tensor = torch.zeros(SIZE)
    return tensor, tensor.numpy()


def tensor_of_a_file(folder: Path) -> tuple[Any, Any]:
    array = np.memmap(folder / "file", np.float32, "w+", shape=(SIZE,))
    return torch.from_file(str(folder / "file"), shared=True, size=SIZE), array


def shared_with_processes(folder: Path) -> tuple[Any, Any]:
    del folder
    tensor = torch.zeros(SIZE).share_memory_()
    return tensor, tensor.data


# what is saved, and the array by which its memory changes
UNSEEN = {
    "numpy": shares(lambda array: array),
    "a part of numpy": shares(lambda array: array[::2]),
    "memory-mapped": memory_mapped,
    "from_numpy": shares(torch.from_numpy),
    "a view of from_numpy": shares(lambda array: torch.from_numpy(array).view(3, -1)[1:]),
    "as_tensor": shares(torch.as_tensor),
    "dlpack": shares(torch.from_dlpack),
    "frombuffer": shares(lambda array: torch.frombuffer(array, dtype=torch.float32)),
    "numpy()": numpy_view_of_a_tensor,
    "a file": tensor_of_a_file,
    "shared memory": shared_with_processes,
}


@pytest.mark.parametrize("make", [HostTensorProvider, DTensorProvider, from_state_dict, from_pytree, Own])
@pytest.mark.parametrize("unseen", UNSEEN)
def test_what_can_change_unseen_is_saved_as_it_was(make: Callable[..., Any], unseen: str, tmp_path: Path) -> None:
    saved, array = UNSEEN[unseen](tmp_path)
    with ds.Checkpointer(tmp_path / "c", host_cache="16MiB") as checkpointer:
        for step in range(2):  # the second snapshot knows the first one's structure
            with held("capture"):
                snapshot = checkpointer.snapshot([make("s", {"a": saved})], step=step)
                array[-10:] = step + 1
            snapshot.wait_committed()
    for step in range(2):
        assert (np.asarray(ds.load(tmp_path / "c", step=step)["s"]["a"]).ravel()[-5:] == step).all()


def test_tensors_by_name_in_host_memory_are_copied_unless_they_are_parameters(tmp_path: Path) -> None:
    # a replay buffer of torch: nothing says that only an optimizer step changes it
    replay, weight = torch.zeros(SIZE), torch.nn.Parameter(torch.zeros(SIZE))
    provider = HostTensorProvider("s", {"replay": replay, "weight": weight})
    assert [shard.lazy for shard in provider.shards()] == [False, True]
    with ds.Checkpointer(tmp_path) as checkpointer:
        with held("capture"):
            snapshot = checkpointer.snapshot([provider], step=1)
            replay[-3:] = 1
        snapshot.wait_committed()
    assert ds.load(tmp_path)["s"]["replay"].sum() == 0


def test_lazy_says_otherwise() -> None:
    arrays = {"a": np.zeros(3), "b": torch.zeros(3), "c": torch.nn.Parameter(torch.zeros(3))}
    for lazy in (False, True):
        for provider in (HostTensorProvider("s", arrays, lazy=lazy), from_state_dict("s", arrays, lazy=lazy)):
            assert [shard.lazy for shard in provider.shards()][:3] == [lazy] * 3
        assert ds.array_shard("a", arrays["a"], lazy=lazy).lazy is lazy


def test_what_the_gate_or_torchs_counter_guards_is_lazy() -> None:
    model = torch.nn.Linear(3, 3)
    lazy = [
        torch.zeros(3),
        torch.zeros(4, 4)[1:, 2:].T,
        model.weight,
        model.weight.detach(),
        *model.state_dict().values(),
    ]
    assert all(map(is_lazy_by_default, lazy))


def test_a_tensor_that_numpy_gets_between_two_snapshots_is_copied_from_then_on(tmp_path: Path) -> None:
    state = {"a": torch.zeros(SIZE)}
    with ds.Checkpointer(tmp_path) as checkpointer:
        checkpointer.snapshot([from_state_dict("s", state)], step=0).wait_committed()
        array = state["a"].numpy()
        with held("capture"):
            snapshot = checkpointer.snapshot([from_state_dict("s", state)], step=1)
            array[-5:] = 1
        snapshot.wait_committed()
    assert ds.load(tmp_path, step=1)["s"]["a"].sum() == 0


def test_memory_that_numpy_gets_later_is_looked_at_again(tmp_path: Path) -> None:
    state = {"a": torch.zeros(SIZE)}
    provider = from_state_dict("s", state)
    with ds.Checkpointer(tmp_path) as checkpointer:
        checkpointer.snapshot([provider], step=0).wait_committed()
        array = np.zeros(SIZE, np.float32)
        state["a"] = torch.from_numpy(array)
        with held("capture"):
            snapshot = checkpointer.snapshot([provider], step=1)
            array[-5:] = 1
        snapshot.wait_committed()
    assert ds.load(tmp_path)["s"]["a"].sum() == 0
