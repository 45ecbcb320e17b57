"""A tree that was saved before is not described again where only its arrays are new; any other change is noticed."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: repeated trees were NOT tested")
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from jax.experimental.layout import Format, Layout  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import datastates as ds  # noqa: E402
from datastates.errors import ProviderError  # noqa: E402
from datastates.providers import ReplicatedProvider, from_pytree  # noqa: E402
from datastates.saving.collect import collect  # noqa: E402
from datastates.state import arrays, jax_addresses  # noqa: E402
from datastates.state.known_layout import Knowledge  # noqa: E402
from datastates.state.shards import StoredArray  # noqa: E402

Tree = dict[str, Any]
DEVICES = jax.devices()


def _by(*names: str | None, backwards: bool = False) -> NamedSharding:
    return NamedSharding(Mesh(np.array(DEVICES[::-1] if backwards else DEVICES), ("d",)), PartitionSpec(*names))


def _tree(n: int) -> Tree:
    """A tree of one form with contents of its own for each number."""
    params = {"w": jax.device_put(jnp.arange(48.0).reshape(8, 6) + n, _by("d")), "b": jnp.full(6, n, jnp.bfloat16)}
    return {
        "params": params,
        "optimizer": optax.adam(1e-3).init(params),
        "rng": jax.random.key(n),
        "packed": jnp.full((3, 3), n, jnp.int4),
        "empty": jax.device_put(jnp.zeros((0, 8)), _by(None, "d")),
        "scale": jnp.asarray(float(n)),
        "host": np.full((2, 3), n),
        "function": jnp.tanh,
        "epoch": n,
    }


TREES = [_tree(n) for n in range(2)]


def _put(path: str, make: Callable[[Any], Any]) -> Callable[[Tree], None]:
    def change(tree: Tree) -> None:
        *way, last = path.split("/")
        for step in way:
            tree = tree[step]
        tree[last] = make(tree[last])

    return change


KNOWN: dict[str, Callable[[Tree], object]] = {
    "nothing": lambda tree: None,
    "a plain value": _put("epoch", lambda _: 7),
    "a plain value's type": _put("epoch", lambda _: "seven"),
    "the function": _put("function", lambda _: jnp.sin),
    "host memory in place": lambda tree: tree["host"].fill(9),
    "the order of a dict": _put("params", lambda p: dict(reversed(p.items()))),
    "a strong type for a weak one": _put("scale", lambda _: jnp.float32(3)),
    "a committed array": _put("packed", lambda x: jax.device_put(x, DEVICES[0])),
}
OTHER: dict[str, Callable[[Tree], object]] = {
    "a sharding": _put("params/w", lambda w: jax.device_put(w, _by())),
    "the order of devices": _put("params/w", lambda w: jax.device_put(w, _by("d", backwards=True))),
    "one device for many": _put("params/w", lambda w: jax.device_put(w, DEVICES[1])),
    "another device": _put("packed", lambda x: jax.device_put(x, DEVICES[3])),
    "an element type": _put("params/b", lambda b: b.astype(jnp.float16)),
    "a shape": _put("params/b", lambda b: b[:5]),
    "an axis more": _put("params/b", lambda b: b[None]),
    "JAX to NumPy": _put("params/b", np.array),
    "NumPy to JAX": _put("host", lambda x: jax.device_put(x.astype(np.int32))),
    "NumPy's order": _put("host", np.asfortranarray),
    "NumPy with gaps": _put("host", lambda x: np.zeros((2, 9), x.dtype)[:, ::3]),
    "an array to a number": _put("packed", lambda _: 5),
    "a number to an array": _put("epoch", jnp.float32),
    "a number to a key": _put("epoch", lambda _: jax.random.key(3)),
    "a number to a list": _put("epoch", lambda _: [1, 2]),
    "a number to an object": _put("epoch", lambda _: {1, 2}),
    "a function to a number": _put("function", lambda _: 4),
    "a function to an array": _put("function", lambda _: jnp.ones(3)),
    "another implementation of keys": _put("rng", lambda _: jax.random.key(1, impl="rbg")),
    "more keys": _put("rng", lambda key: jax.random.split(key, 3)),
    "a key's numbers": _put("rng", jax.random.key_data),
    "a key less": lambda tree: tree.pop("packed"),
    "a key more": lambda tree: tree.update(more=jnp.ones(2)),
    "something for nothing": _put("packed", lambda _: None),
    "another container": _put("optimizer", list),
    "contents for emptiness": _put("empty", lambda _: jnp.ones((1, 8))),
    "the order in memory": _put(
        "params/w", lambda w: jax.device_put(w + 0, Format(Layout((1, 0)), w.sharding))
    ),
}  # fmt: skip


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many arrays were described together, each time that arrays were described."""
    calls: list[int] = []

    def count(keys: Any, values: Any, lazy: Any) -> Any:
        calls.append(len(keys))
        return original(keys, values, lazy)

    original = arrays.shards_of
    monkeypatch.setattr(arrays, "shards_of", count)
    return calls


def _copy(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, tree)


def _told(provider: Any) -> list[Any]:
    """What a provider describes, with the contents of all memory, and the rest as it is serialized."""
    told: list[Any] = []
    for shard in provider.shards():
        if shard.is_object:
            told.append(provider.serialize(shard)(lambda leaf: StoredArray(leaf.key, "int8", 0, (), (), 0)))
        else:
            assert shard.buffer.owner is not None
            contents = ctypes.string_at(shard.buffer.pointer, shard.buffer.nbytes)
            buffer = replace(shard.buffer, pointer=0, owner=None)
            told.append((asdict(replace(shard, source=None, buffer=buffer)), contents))
    return told


@pytest.mark.parametrize("name", [*KNOWN, *OTHER])
def test_the_next_description_is_what_a_first_one_would_be(name: str, described: list[int]) -> None:
    first, second = map(_copy, TREES)
    {**KNOWN, **OTHER}[name](second)
    known, alone, again = from_pytree("s", first), from_pytree("s", second), from_pytree("s", second)
    known.shards()
    again.learn(known.knowledge())
    expected = _told(alone)
    del described[:]
    told = _told(again)
    assert ([count for count in described if count > 1] == []) == (name in KNOWN)
    assert told == expected


def _pair(a: int, b: int) -> list[Any]:
    """Providers of an array each, which is the same one for equal numbers."""
    made = {n: jnp.full((4, 4), n) for n in (a, b)}
    return [from_pytree("x", {"a": made[a], "b": made[b]}), ReplicatedProvider(from_pytree("y", {"c": made[b]}), [0])]


def test_arrays_that_were_one_may_be_two_and_the_other_way_round(tmp_path: Path, described: list[int]) -> None:
    sizes = []
    with ds.Checkpointer(tmp_path) as ckpt:
        for step, (a, b) in enumerate([(1, 2), (3, 3), (4, 5), (6, 7), (8, 8)]):
            snapshot = ckpt.snapshot(_pair(a, b), step=step)
            sizes.append(snapshot.report.nbytes)
            snapshot.wait_committed()
            loaded = ds.load(tmp_path)
            assert [int(x.mean()) for x in (*loaded["x"].values(), loaded["y"]["c"])] == [a, b, b]
    assert sizes == [128, 64, 128, 128, 64]
    assert described.count(2) == 1


@pytest.mark.parametrize("one_first", [True, False])
def test_of_arrays_that_were_one_each_is_still_written_by_one_rank(one_first: bool) -> None:
    """As of averages that are the parameters themselves at first. A rank that wrote neither must notice, too."""
    one, other = jnp.ones(8), jnp.zeros(8)
    trees = [{"a": one, "b": one, "c": jnp.ones(3)}, {"a": one, "b": other, "c": jnp.ones(3)}]
    written: list[str] = []
    for rank in range(2):
        last, knowledge = None, Knowledge()
        for tree in trees if one_first else reversed(trees):
            provider = ReplicatedProvider(from_pytree("m", tree), [0, 1])
            last = collect([provider], last, knowledge, rank=rank, ranks=2).structure
        assert last is not None
        written += [last.key(i) for i, (_, shard) in enumerate(last.arrays) if shard.nbytes]
    assert sorted(written) == ["m/a", "m/b", "m/c"]


def test_what_is_gone_is_named_as_at_first(tmp_path: Path) -> None:
    tree = _tree(3)
    lost = {"params/w": tree["params"]["w"], "rng": tree["rng"], "packed": tree["packed"]}
    with ds.Checkpointer(tmp_path) as ckpt:
        for step, (key, array) in enumerate(lost.items()):
            ckpt.snapshot([from_pytree("s", _tree(4))], step=step).wait_committed()
            array.delete()
            with pytest.raises(ProviderError, match=f"'s': '{key}.* donated to a computation, or deleted"):
                ckpt.snapshot([from_pytree("s", {**_tree(5), **tree})], step=10)
            tree = {**tree, "params": _tree(6)["params"], key: _tree(6).get(key)}


def test_what_is_known_keeps_no_array(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path) as ckpt:
        tree = jax.tree.map(lambda x: x + 1, {"w": TREES[0]["params"]["w"], "b": TREES[0]["params"]["b"]})
        gone = [weakref.ref(leaf) for leaf in jax.tree.leaves(tree)]
        for step in range(2):
            ckpt.snapshot([from_pytree("s", tree)], step=step).wait_committed()
        del tree
        gc.collect()
        assert [leaf() for leaf in gone] == [None] * len(gone)


def test_arrays_in_device_memory_are_not_copied_to_find_them_there(monkeypatch: pytest.MonkeyPatch) -> None:
    array = jnp.ones((4, 4))
    (shard,) = arrays.shards_of(["x"], [array], [True])
    assert jax_addresses.Renewed.of([array], [shard]) is not None
    monkeypatch.setattr(jax_addresses, "_memory", lambda *_: pytest.fail("it was asked for as an array of NumPy"))
    assert shard.buffer is not None
    assert jax_addresses.Renewed.of([array], [replace(shard, buffer=replace(shard.buffer, device=0))]) is None


@jax.tree_util.register_pytree_with_keys_class
class Names:
    """A container whose names JAX does not compare: they belong to the children's paths alone."""

    def __init__(self, **children: Any) -> None:
        self.children = children

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], None]:
        return [(jax.tree_util.DictKey(name), child) for name, child in self.children.items()], None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Any) -> Names:
        raise AssertionError("JAX wants this method, and no test builds a tree: the names would not be known")


def test_names_in_another_order_are_noticed() -> None:
    one, other = jnp.ones(3), jnp.zeros(3)
    provider = from_pytree("s", Names(a=one, b=other))
    provider.shards()
    provider.tree = Names(b=other, a=one)
    assert jax.tree.structure(provider.tree) == jax.tree.structure(Names(a=one, b=other))
    assert {shard.key: shard.source is one for shard in provider.shards()[:-1]} == {"a": True, "b": False}


def test_a_tree_is_asked_for_once_at_each_snapshot() -> None:
    """What a program makes anew at each call need not be of one form."""
    asked: list[int] = []

    def get() -> Tree:
        asked.append(len(asked))
        return {"x": jnp.full((2 + len(asked), 4), len(asked))}

    provider = from_pytree("s", get=get, set=asked.append)
    for number in range(1, 4):
        shard = provider.shards()[0]
        assert (shard.shape, len(asked)) == ((2 + number, 4), number)
        assert np.array_equal(shard.source, np.full((2 + number, 4), number))
