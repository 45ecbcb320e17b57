"""What users of Orbax restore, each case by ``load(like=)``: what comes back, and what is refused by its key."""

from __future__ import annotations

import dataclasses
import re
from collections import OrderedDict, namedtuple
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: the cases of Orbax were NOT tested")
import flax.training.train_state  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from jax.experimental.layout import Format, Layout  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding  # noqa: E402

import datastates as ds  # noqa: E402
from datastates.errors import CheckpointNotFoundError, ProviderError, RestoreError, TrustError  # noqa: E402
from datastates.providers import from_pytree  # noqa: E402

DEVICES = np.array(jax.devices())
A = jnp.arange(8.0)
W = jnp.arange(64.0).reshape(8, 8)
Point = namedtuple("Point", "x y")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    """A dataclass that JAX knows."""

    x: Any
    y: Any


@jax.tree_util.register_pytree_node_class
class Unnamed:
    """A container that does not name its children."""

    def __init__(self, *children: Any) -> None:
        self.children = children

    def tree_flatten(self) -> tuple[Any, None]:
        return self.children, None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Any) -> Unnamed:
        return cls(*children)


def by(*spec: Any, shape: tuple[int, ...] = (8,), backwards: bool = False, memory: str = "device") -> NamedSharding:
    devices = DEVICES[: int(np.prod(shape))]
    mesh = Mesh((devices[::-1] if backwards else devices).reshape(shape), tuple("xyz"[: len(shape)]))
    return NamedSharding(mesh, PartitionSpec(*spec), memory_kind=memory)


def like(x: Any, sharding: Any = None, dtype: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=sharding)


def nested(depth: int) -> Any:
    tree: Any = A
    for level in range(depth):
        tree = [tree] if level % 2 else {"n": tree}
    return tree


def train_state() -> Any:
    params = {"dense": {"kernel": W, "bias": A}}
    made = flax.training.train_state.TrainState.create(apply_fn=jnp.dot, params=params, tx=optax.adam(1e-3))
    return made.apply_gradients(grads=params)


def keys() -> Any:
    return {"one": jax.random.key(1), "many": jax.random.split(jax.random.key(2), 4), "raw": jax.random.PRNGKey(3)}


ARRAYS = np.ndarray | jax.Array | jax.ShapeDtypeStruct
SHARDED = jax.device_put(W, by("x"))
GENERATOR = np.random.default_rng(0)
RESTORED: dict[str, Any] = {
    # a tree alone: it comes back as it is, by its own types and shardings
    "values": {"i": 3, "f": 2.5, "c": 1j, "b": True, "text": "é", "bytes": b"\0", "n": np.float32(1.5)},
    "arrays of NumPy": {"a": np.arange(3), "t": np.arange(6.0).reshape(2, 3).T, "text": np.array(["a", "bc"])},
    "0-d arrays": {"jax": jnp.float32(3), "numpy": np.array(4)},
    "arrays without elements": {"jax": jnp.zeros((0, 3)), "numpy": np.zeros((2, 0))},
    "empty containers": {"d": {}, "l": [], "t": (), "none": None, "inside": {"a": A, "e": {}}},
    "nothing at all": {},
    "only a leaf": A,
    "masked nodes": optax.masked(optax.adam(1), {"a": True, "b": False}).init({"a": A, "b": A}),
    "a list and a tuple": {"l": [A, [1, A]], "t": (A, (2,))},
    "a named tuple": {"p": Point(A, [1, 2])},
    "an ordered dict": OrderedDict(b=A, a=1),
    "a dataclass": Record(A, {"n": 3}),
    "a container without names": [Unnamed(A, 2)],
    "a flax train state": train_state(),
    "keys with slashes and dots": {"a/b": A, "a": {"b": A + 1, "b/": 2}, "x.y": A, "": 1, "/": 2, "~": 3, "..": 6},
    "integers as keys": {0: A, 1: {10: 2}, -1: 3},
    "300 levels": nested(300),
    "one array twice": {"a": A, "b": [A]},
    "typed and raw random keys": keys(),
    "a generator of NumPy": GENERATOR.bit_generator.state,
    "a function": {"a": A, "f": jnp.tanh},
    "small types": {name: A.astype(name) for name in ("bfloat16", "float8_e4m3fn", "int4", "bool")},
    "a mixed tree": {"sharded": SHARDED, "one": A, "numpy": np.arange(3), "n": 1},
    "a device": {"a": jax.device_put(A, DEVICES[3])},
    "pinned memory": {"a": jax.device_put(A, by("x", memory="pinned_host"))},
}  # fmt: skip
CHANGED: dict[str, tuple[Any, Any]] = {
    # what is saved, and what it is restored like
    "described": ({"a": A, "w": SHARDED}, {"a": like(A), "w": like(W, SHARDED.sharding)}),
    "described random keys": (keys(), jax.eval_shape(keys)),
    "a described train state": (train_state(), jax.eval_shape(train_state)),
    "numbers as arrays": (
        {"i": 3, "f": 0.1, "b": True, "c": 1j, "n": np.float32(2), "np": 4, "inf": -np.inf},
        {
            "i": like(jnp.int32(3), by()),
            "f": jnp.bfloat16(0),
            "b": like(jnp.bool_(0)),
            "c": jnp.complex64(0),
            "n": jnp.float32(0),
            "np": np.array(0),
            "inf": jnp.float32(0),
        },
    ),
    "NumPy as JAX": ({"a": np.arange(3, dtype=np.int32)}, {"a": like(np.arange(3, dtype=np.int32), by())}),
    "JAX as NumPy": ({"a": SHARDED}, {"a": np.zeros((8, 8), np.float32)}),
    "a list as a tuple": ({"a": [A, 1]}, {"a": (A, 0)}),
    "a named tuple as a dict": ({"p": Point(A, 1)}, {"p": {"x": A, "y": 0}}),
    "one device to eight": (A, like(A, by("x"))),
    "eight devices to one": (SHARDED, like(W, SingleDeviceSharding(DEVICES[5]))),
    "rows to columns": (SHARDED, like(W, by(None, "x"))),
    "rows to tiles": (SHARDED, like(W, by("y", "x", shape=(4, 2)))),
    "rows to two axes at once": (SHARDED, like(W, by(None, ("x", "y"), shape=(4, 2)))),
    "rows to parts on several devices": (SHARDED, like(W, by("x", shape=(2, 2, 2)))),
    "rows to every device": (SHARDED, like(W, by())),
    "every device to rows": (jax.device_put(W, by()), like(W, by("x"))),
    "fewer devices": (SHARDED, like(W, by("x", shape=(2,)))),
    "more devices": (jax.device_put(W, by("x", shape=(2,))), like(W, by("x"))),
    "devices in reverse": (SHARDED, like(W, by("x", backwards=True))),
    "another kind of memory": (SHARDED, like(W, by("x", memory="pinned_host"))),
    "without a sharding": (SHARDED, like(W)),
    "one array that is to be three": ([A, A, A], [like(A, by("x")), like(A, by()), np.zeros(8, np.float32)]),
    "another order in memory": (
        jax.device_put(W, Format(Layout((1, 0)), SingleDeviceSharding(DEVICES[0]))), like(W)
    ),
}  # fmt: skip
VALUES: dict[str, tuple[Any, Any, Any]] = {
    # a value takes what was saved, whatever its own type was: saved, like, restored
    "an integer for a float": ({"n": 3}, {"n": 1.5}, {"n": 3}),
    "arrays for numbers": ({"i": jnp.int32(3), "f": np.array(0.5)}, {"i": 0, "f": 1}, {"i": 3, "f": 0.5}),
    "a text for a number": ({"n": "three"}, {"n": 3}, {"n": "three"}),
    "nothing for a number": ({"n": [None, 4]}, {"n": [3, 0]}, {"n": [None, 4]}),
    "an object of NumPy": ({"d": np.datetime64("2020-01-01")}, {"d": 0}, {"d": np.datetime64("2020-01-01")}),
    "a set": ({"s": {1, 2}}, {"s": set()}, {"s": {1, 2}}),
}
REFUSED: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "another shape": (A, like(A[:4]), RestoreError, "float32 of shape (8,) in the checkpoint, float32 of shape (4,)"),
    "padding": (A, like(jnp.zeros(16)), RestoreError, "of shape (8,) in the checkpoint, float32 of shape (16,)"),
    "another type": ({"a": A}, {"a": like(A, dtype=jnp.bfloat16)}, RestoreError, "bfloat16 of shape (8,) in the live"),
    "a number for a vector": ({"a": 3}, {"a": A}, RestoreError, "no array in the checkpoint, one in the live"),
    "a number of another kind": ({"a": 3}, {"a": jnp.float32(3)}, RestoreError, "no array in the checkpoint, one in"),
    "a number out of range": ({"a": 2**70}, {"a": jnp.int32(3)}, RestoreError, "no array in the checkpoint, one in"),
    "a float out of range": ({"a": 1e39}, {"a": jnp.float32(3)}, RestoreError, "no array in the checkpoint, one in"),
    "a vector for a number": ({"a": A}, {"a": 3}, RestoreError, "an array in the checkpoint, none in the live"),
    "None for an array": ({"a": A, "b": A}, {"a": A, "b": None}, RestoreError, "the live state lacks 's/b'"),
    "a key more": ({"a": A}, {"a": A, "z": A}, RestoreError, "the checkpoint lacks 's/z'"),
    "a key less": ({"a": A, "z": {"q": A}}, {"a": A}, RestoreError, "the live state lacks 's/z'"),
    "a text for an integer as key": ({0: A}, {"0": A}, RestoreError, "the live state lacks 's/0'"),
    "a list for a dict": ({"a": [A]}, {"a": {0: A}}, RestoreError, "'s/a': list in the checkpoint, dict in the live"),
    "other random keys": (
        {"k": jax.random.key(0)}, {"k": jax.random.key(0, impl="rbg")}, RestoreError, "of 'rbg' in the live state"
    ),
    "an object of any class": ({"o": object()}, {"o": 0}, TrustError, "pass trust=['builtins.object']"),
    "1001 levels": (nested(1001), None, ProviderError, "is nested more than 1000 levels deep"),
    "a description, saved": ({"a": like(A)}, None, ProviderError, "'a' describes an array"),
}  # fmt: skip


def leaf(x: Any, wanted: Any = None) -> Any:
    """A leaf with all that must come back; ``wanted`` may lack a sharding."""
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return str(x.dtype), x.shape, leaf(jax.random.key_data(x), wanted)
    if isinstance(x, jax.Array):
        placed = x.sharding if getattr(wanted, "sharding", None) is not None else None
        return "jax", x.dtype, x.shape, np.asarray(x).tobytes(), placed
    if isinstance(x, np.ndarray):
        return "numpy", x.dtype, x.shape, x.tobytes()
    return x if callable(x) else (type(x), x)


def load(folder: Path, saved: Any, wanted: Any) -> Any:
    ds.snapshot([from_pytree("s", saved)], folder / "c").wait_committed()
    return ds.load(folder / "c", like={"s": wanted})["s"]


def check(found: Any, values: Any, wanted: Any) -> None:
    """That the leaves have these values, and the containers, libraries, devices and shardings of ``wanted``."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    rows = zip(*map(jax.tree.leaves, (found, values, wanted)), strict=True)
    for now, was, like_it in rows:
        if not isinstance(was, np.ndarray | jax.Array) and isinstance(like_it, ARRAYS):
            was = np.asarray(was, like_it.dtype)
        if isinstance(like_it, np.ndarray):
            was = np.asarray(was)
        elif hasattr(like_it, "sharding") and not jax.dtypes.issubdtype(like_it.dtype, jax.dtypes.prng_key):
            was = jax.device_put(np.asarray(was), like_it.sharding)
        assert leaf(now, like_it) == leaf(was, like_it)


@pytest.mark.parametrize("name", RESTORED)
def test_a_tree_comes_back_as_it_is(name: str, tmp_path: Path) -> None:
    check(load(tmp_path, RESTORED[name], RESTORED[name]), RESTORED[name], RESTORED[name])


@pytest.mark.parametrize("name", CHANGED)
def test_a_tree_comes_back_as_it_is_wanted(name: str, tmp_path: Path) -> None:
    saved, wanted = CHANGED[name]
    check(load(tmp_path, saved, wanted), saved, wanted)


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_what_was_saved(name: str, tmp_path: Path) -> None:
    saved, wanted, restored = VALUES[name]
    assert load(tmp_path, saved, wanted) == restored


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name: str, tmp_path: Path) -> None:
    saved, wanted, error, said = REFUSED[name]
    with pytest.raises(error, match=re.escape(said)):
        load(tmp_path, saved, wanted)


def test_a_part_of_a_tree(tmp_path: Path) -> None:
    saved = {"a": A, "b": {"c": A, "d": A + 1}, "n": 1}
    ds.snapshot([from_pytree("s", saved)], tmp_path / "c").wait_committed()
    restore = partial(ds.restore, path=tmp_path / "c")
    some = from_pytree("s", {"b": {"d": like(A, by("x"))}})  # what is omitted is not restored
    assert restore([some], strict=False).unexpected_keys == ["s/a", "s/b/c", "s/n"]
    check(some.tree, {"b": {"d": A + 1}}, {"b": {"d": like(A, by("x"))}})
    live = {"a": like(A), "b": {"c": A * 0, "d": A * 0}, "n": 7}  # nor is what no glob selects
    chosen = from_pytree("s", live)
    restore([chosen], keys="s/b/*")
    assert chosen.tree["a"] is live["a"]
    check({**chosen.tree, "a": A}, {**saved, "n": 7}, {**live, "a": A})
    more = from_pytree("s", {**saved, "z": like(A)})  # what the checkpoint lacks stays as it is
    assert restore([more], strict=False).missing_keys == ["s/z"]
    assert more.tree["z"] == like(A)


def test_types_are_cast_by_wish(tmp_path: Path) -> None:
    ds.snapshot([from_pytree("s", {"half": A, "same": A, "n": jnp.arange(3)})], tmp_path / "c").wait_committed()
    wanted = {"half": like(A, by("x"), jnp.bfloat16), "same": like(A, by("x")), "n": like(jnp.arange(3))}
    provider = from_pytree("s", wanted)
    ds.restore([provider], tmp_path / "c", cast=True)
    check(provider.tree, {"half": A.astype(jnp.bfloat16), "same": A, "n": jnp.arange(3)}, wanted)
    with pytest.raises(RestoreError, match="int32 of shape"):  # floating-point types alone
        ds.restore([from_pytree("s", {**wanted, "n": like(A[:3])})], tmp_path / "c", cast=True)


def test_managing_steps(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path, keep_last=2) as ckpt:
        provider = from_pytree("s", {"a": A, "n": 0})
        for step in (1, 5, 7):
            provider.tree = {"a": A + step, "n": step}
            ckpt.snapshot([provider, from_pytree("metrics", {"loss": 1 / step})], step=step).wait_committed()
        assert ckpt.restore([provider, from_pytree("metrics", {"loss": 0.0})]).step == 7
        assert ds.load(tmp_path, step=5)["s"]["n"] == 5
        with pytest.raises(CheckpointNotFoundError):
            ckpt.restore([provider], step=1)
    with pytest.raises(FileNotFoundError):
        ds.load(tmp_path / "nothing", like={"s": A})
