"""``load(like=)``: trees of new arrays like those that are given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import datastates as ds
from datastates.errors import RestoreError
from datastates.providers import PickledObjectProvider, from_pytree, from_stateful

jax = pytest.importorskip("jax", reason="JAX is not installed: trees of its arrays were NOT loaded")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

WEIGHT = np.arange(64 * 16, dtype=np.float32).reshape(64, 16)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("saved") / "c"
    tree = {"w": jnp.asarray(WEIGHT), "n": 3, "key": jax.random.key(1)}
    model = torch.nn.Linear(2, 3)
    torch.nn.init.constant_(model.weight, 0.5)
    other = PickledObjectProvider("loop", get=lambda: {"epoch": 4}, set=lambda value: None)
    ds.snapshot([from_pytree("s", tree), from_stateful("model", model), other], path).wait_committed()
    return path


def test_arrays_take_the_library_and_the_sharding_of_like(saved: Path) -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    sharding = NamedSharding(mesh, PartitionSpec("b", "a"))
    like = {"w": jax.ShapeDtypeStruct(WEIGHT.shape, jnp.float32, sharding=sharding), "n": 0, "key": jax.random.key(0)}
    found = ds.load(saved, like={"s": like})["s"]
    assert found["w"].sharding == sharding
    assert np.array_equal(found["w"], WEIGHT)
    assert found["n"] == 3
    assert (jax.random.key_data(found["key"]) == jax.random.key_data(jax.random.key(1))).all()
    like |= {"w": torch.zeros(64, 16), "key": jax.eval_shape(lambda: jax.random.key(0))}
    found = ds.load(saved, like={"s": like})["s"]
    assert np.array_equal(found["w"].numpy(), WEIGHT)
    assert not like["w"].any()
    host = {"weight": np.zeros((3, 2), np.float32), "bias": jnp.zeros(3)}
    found = ds.load(saved, like={"model": host, "loop": {"epoch": 0}})
    assert (found["model"]["weight"] == 0.5).all()
    assert isinstance(found["model"]["weight"], np.ndarray)
    assert not host["weight"].any()
    assert found["loop"] == {"epoch": 4}


@pytest.mark.parametrize(
    ("like", "said"),
    [
        ({"none": {}}, "lacks 'none'"),
        ({"s": {"w": np.zeros((64, 16)), "n": 0}}, "'s/w': float32 of shape .64, 16. in the checkpoint, float64"),
        ({"s": {"n": 0, "w": jnp.zeros(3), "x": 1}}, "the checkpoint lacks 's/x'; .*float32 of shape .3,. in the live"),
    ],
)
def test_misfits_are_named_with_both_values(saved: Path, like: Any, said: str) -> None:
    with pytest.raises(RestoreError, match=said):
        ds.load(saved, like=like)


def test_what_like_cannot_say(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="like: a tree for each provider's name is wanted, not a list"):
        ds.load(saved, like=[1])  # type: ignore[arg-type]
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    with pytest.raises(ValueError, match=r"like: .*w\.pt is no checkpoint of this package"):
        ds.load(tmp_path / "w.pt", like={"w": np.zeros(2)})
