"""Modules and variables of Flax NNX that stand at several places of a tree stay one, as ``nnx.update`` keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import datastates as ds
from datastates.errors import RestoreError
from datastates.providers import from_pytree

jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")
jnp = jax.numpy


class Net(nnx.Module):  # type: ignore[misc,name-defined]
    """Two layers: with weights of their own, tied weights, or one layer at two places."""

    def __init__(self, kind: str, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.first, self.second = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        if kind == "tied":
            self.second.kernel = self.first.kernel
        if kind == "one layer":
            self.second = self.first
        if kind == "in a list":
            self.more = nnx.List([self.first, nnx.Dict(again=self.second.bias)])

    def __call__(self, x: Any) -> Any:
        return self.dropout(self.second(jnp.tanh(self.first(x))))


class Run:
    def __init__(self, kind: str, seed: int) -> None:
        self.model = Net(kind, seed)
        self.optimizer = nnx.Optimizer(self.model, optax.adam(0.1), wrt=nnx.Param)

    def train(self, steps: int) -> list[Any]:
        x = jnp.arange(8.0).reshape(2, 4)
        for _ in range(steps):
            gradients = nnx.grad(lambda model: jnp.mean((model(x) - 1) ** 2))(self.model)
            self.optimizer.update(self.model, gradients)
        return [leaf.tolist() for leaf in jax.tree.leaves((self.model, self.optimizer)) if hasattr(leaf, "tolist")]


def _stock(run: Run, other: Run) -> None:
    nnx.update(other.model, nnx.state(run.model))
    nnx.update(other.optimizer, nnx.state(run.optimizer))


@pytest.mark.parametrize("kind", ["apart", "tied", "one layer", "in a list"])
def test_a_module_goes_on_as_after_an_update_by_nnx(kind: str, tmp_path: Path) -> None:
    run = Run(kind, 0)
    run.train(2)
    together = {"model": run.model, "optimizer": run.optimizer, "kernel": run.model.first.kernel}
    ds.snapshot([from_pytree("m", run.model), from_pytree("all", together)], tmp_path / "c").wait_committed()
    stock = Run(kind, 1)
    _stock(run, stock)

    live = Run(kind, 2)
    one = from_pytree("m", Net(kind, 3))
    every = from_pytree("all", {"model": live.model, "optimizer": live.optimizer, "kernel": live.model.first.kernel})
    ds.restore([one, every], tmp_path / "c")
    resumed = Run(kind, 4)
    resumed.model, resumed.optimizer = every.tree["model"], every.tree["optimizer"]
    assert every.tree["kernel"] is resumed.model.first.kernel
    model = one.tree
    for found in (model, resumed.model):
        assert (found.first is found.second) == (kind == "one layer")
        assert (found.first.kernel is found.second.kernel) == (kind in ("tied", "one layer"))
        if kind == "in a list":
            assert found.more[0] is found.first
            assert found.more[1]["again"] is found.second.bias
    wanted = run.train(3)
    assert stock.train(3) == wanted
    assert resumed.train(3) == wanted


def test_it_is_so_on_the_way_of_load_like(tmp_path: Path) -> None:
    run = Run("tied", 0)
    ds.snapshot([from_pytree("m", run.model)], tmp_path / "c").wait_committed()
    loaded = ds.load(tmp_path / "c", like={"m": Net("tied", 1)})["m"]
    assert loaded.first.kernel is loaded.second.kernel
    assert jnp.array_equal(loaded.first.kernel[...], run.model.first.kernel[...])


def test_tied_weights_become_apart_where_the_live_ones_are_apart(tmp_path: Path) -> None:
    tied = Net("tied", 0)
    ds.snapshot([from_pytree("m", tied)], tmp_path / "c").wait_committed()
    provider = from_pytree("m", Net("apart", 1))
    ds.restore([provider], tmp_path / "c")
    assert provider.tree.first.kernel is not provider.tree.second.kernel
    for layer in (provider.tree.first, provider.tree.second):
        assert jnp.array_equal(layer.kernel[...], tied.first.kernel[...])


def test_weights_that_were_saved_apart_do_not_fit_tied_ones(tmp_path: Path) -> None:
    ds.snapshot([from_pytree("m", Net("apart", 0))], tmp_path / "c").wait_committed()
    provider = from_pytree("m", live := Net("tied", 1))
    with pytest.raises(RestoreError, match=r"'m/second/kernel/value'.*tied weights"):
        ds.restore([provider], tmp_path / "c")
    assert provider.tree is live
