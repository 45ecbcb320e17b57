"""Empty entries of trees: saved, loaded as Orbax gives them, and of no account for a restore."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: its trees were NOT tested")
import equinox as eqx  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
from flax import nnx  # noqa: E402

import datastates as ds  # noqa: E402
from datastates.errors import RestoreError  # noqa: E402
from datastates.providers import from_pytree, from_state_dict  # noqa: E402
from datastates.testing import equal  # noqa: E402


class Nothing(eqx.Module):
    """A module without leaves."""


def _tree() -> dict[str, Any]:
    params = {"kernel": jnp.ones((2, 3)), "frozen": {}}
    return {
        "params": params,
        "optimizer": optax.chain(optax.clip(1.0), optax.adam(1e-3), optax.identity()).init(params),
        "dict": {},
        "list": [],
        "tuple": (),
        "none": None,
        "deep": {"a": {"b": [{}, ({}, None)]}},
        "first": [None, jnp.ones(2)],
        "last": [jnp.zeros(2), {}, None],
        "batch_stats": {"none": None, "more": ()},
    }


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_load_gives_empty_entries_as_orbax_does(tmp_path: Path) -> None:
    tree = _tree()
    with ocp.PyTreeCheckpointer() as orbax:
        orbax.save(tmp_path / "orbax", tree)
        expected = jax.tree.map(np.asarray, orbax.restore(tmp_path / "orbax"))
    assert expected["optimizer"][0] is None
    provider = from_pytree("tree", tree)
    with ds.Checkpointer(tmp_path / "ours", keep_last=None) as ckpt:
        for step in range(2):  # the second snapshot is of a known form
            ckpt.snapshot([provider], step=step).wait_committed()
            provider.tree = jax.tree.map(lambda x: x + 0, provider.tree)
    for step in range(2):
        assert equal(_sorted(ds.load(tmp_path / "ours", step=step)["tree"]), _sorted(expected))


@pytest.mark.parametrize("tree", [{}, [], (), {"a": None}, {"a": [{}, ()]}, [None, None]])
def test_a_tree_of_nothing_loads_as_it_was(tmp_path: Path, tree: Any) -> None:
    provider = from_pytree("tree", tree)
    with ds.Checkpointer(tmp_path) as ckpt:
        for step in range(2):
            ckpt.snapshot([provider], step=step).wait_committed()
    assert ds.load(tmp_path)["tree"] == tree
    assert type(ds.load(tmp_path)["tree"]) is type(tree)
    ds.restore([provider], tmp_path)
    assert provider.tree == tree


def test_other_classes_are_none_where_they_are_empty(tmp_path: Path) -> None:
    tree = {"state": optax.EmptyState(), "module": Nothing(), "w": jnp.ones(1)}
    ds.snapshot([from_pytree("tree", tree)], tmp_path / "c").wait_committed()
    loaded = ds.load(tmp_path / "c")["tree"]
    assert loaded["state"] is None
    assert loaded["module"] is None


class Model(nnx.Module):
    """A module with entries of all kinds, and NNX's own marks in it."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(2, 2, use_bias=False, rngs=rngs), nnx.Dict()])
        self.list, self.dict = nnx.List([]), nnx.Dict()


def test_objects_of_nnx(tmp_path: Path) -> None:
    ds.snapshot([from_pytree("model", Model())], tmp_path / "c").wait_committed()
    loaded = ds.load(tmp_path / "c")["model"]
    kernel = loaded["layers"][0].pop("kernel")
    assert kernel["value"].shape == (2, 2)
    assert loaded == {"layers": [{"bias": None}, {}], "list": [], "dict": {}}
    provider = from_pytree("model", Model())
    ds.restore([provider], tmp_path / "c")
    assert equal(jax.tree.leaves(provider.tree), jax.tree.leaves(Model()))


def _sorted(value: Any) -> Any:
    """A value whose dicts are in the order of their keys."""
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return type(value)(map(_sorted, value)) if isinstance(value, (list, tuple)) else value


def test_a_restore_keeps_the_live_containers(tmp_path: Path) -> None:
    tree = _tree()
    ds.snapshot([from_pytree("tree", tree)], tmp_path / "c").wait_committed()
    provider = from_pytree("tree", jax.tree.map(jnp.zeros_like, tree))
    ds.restore([provider], tmp_path / "c")
    assert jax.tree.structure(provider.tree) == jax.tree.structure(tree)
    assert equal(jax.tree.leaves(provider.tree), jax.tree.leaves(tree))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    made = ds.load(tmp_path / "c", like={"tree": like})["tree"]
    assert jax.tree.structure(made) == jax.tree.structure(tree)
    assert equal(jax.tree.leaves(made), jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        ({"w": jnp.ones(2)}, {"w": jnp.zeros(2), "e": {}, "n": None, "t": (), "l": [{}, [None]]}),  # no entries before
        ({"w": jnp.ones(2), "e": {}, "n": None, "t": (), "l": [{}, [None]]}, {"w": jnp.zeros(2)}),
        ({"w": jnp.ones(2), "e": None}, {"w": jnp.zeros(2), "e": {"a": {}}}),
        ({"l": [jnp.ones(2), {}]}, {"l": [jnp.zeros(2)]}),
    ],
)
def test_empty_entries_of_one_side_are_no_difference(tmp_path: Path, saved: Any, live: Any) -> None:
    ds.snapshot([from_pytree("tree", saved)], tmp_path / "c").wait_committed()
    provider = from_pytree("tree", live)
    ds.restore([provider], tmp_path / "c")
    assert jax.tree.structure(provider.tree) == jax.tree.structure(live)
    assert equal(jax.tree.leaves(provider.tree), jax.tree.leaves(saved))


def test_an_array_on_one_side_is_named(tmp_path: Path) -> None:
    empty, filled = {"w": jnp.ones(2), "e": {}}, {"w": jnp.ones(2), "e": {"a": jnp.ones(1)}}
    ds.snapshot([from_pytree("tree", empty)], tmp_path / "empty").wait_committed()
    with pytest.raises(RestoreError, match="lacks 'tree/e'"):
        ds.restore([from_pytree("tree", filled)], tmp_path / "empty")
    ds.snapshot([from_pytree("tree", filled)], tmp_path / "filled").wait_committed()
    with pytest.raises(RestoreError, match="'tree/e'"):
        ds.restore([from_pytree("tree", empty)], tmp_path / "filled")


def test_a_value_that_stands_in_itself_is_no_hang(tmp_path: Path) -> None:
    cyclic: list[Any] = [np.ones(2)]
    for _ in range(64):
        cyclic = [cyclic, cyclic]
    cyclic[1].append(cyclic)
    ds.snapshot([from_state_dict("tree", {"w": np.ones(2), "c": cyclic})], tmp_path / "c").wait_committed()
    with pytest.raises(RestoreError, match="'tree/c'"):
        ds.restore([from_pytree("tree", {"w": jnp.ones(2)})], tmp_path / "c")


def test_without_jax(tmp_path: Path) -> None:
    script = """
        import sys
        from typing import NamedTuple

        import numpy as np

        import datastates as ds
        from datastates.providers import from_pytree

        class Empty(NamedTuple):
            pass

        tree = {"w": np.ones(2), "d": {}, "l": [], "t": (), "n": None, "e": Empty(), "s": [{}, np.zeros(1), None]}
        provider = from_pytree("tree", tree)
        ds.snapshot([provider], sys.argv[1]).wait_committed()
        found = ds.load(sys.argv[1])["tree"]
        assert found.keys() == tree.keys()
        assert all(str(found[key]) == str(tree[key]) for key in tree if key != "e"), found
        assert found["e"] is None
        ds.restore([provider], sys.argv[1])
        assert str(provider.tree) == str(tree)
        assert "jax" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "c")], check=True, cwd=tmp_path)
