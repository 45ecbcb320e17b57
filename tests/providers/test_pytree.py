"""Trees of JAX's programs: what is stored of them, donation, and restores that make new arrays."""

from __future__ import annotations

import functools
import gc
import operator
import subprocess
import sys
import textwrap
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: its trees were NOT tested")
import equinox as eqx  # noqa: E402
import flax.linen as nn  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import ml_dtypes  # noqa: E402
import optax  # noqa: E402
import torch  # noqa: E402
from flax import nnx  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402

import datastates as ds  # noqa: E402
from datastates.errors import CorruptError, DatastatesError, ProviderError, RestoreError  # noqa: E402
from datastates.providers import HostTensorProvider, from_pytree, from_state_dict  # noqa: E402
from datastates.state import jax_arrays  # noqa: E402
from datastates.state.provider import StateProvider  # noqa: E402
from datastates.testing import ProviderTests, equal  # noqa: E402
from datastates.testing.provider_tests import difference  # noqa: E402

PARAMS = {"dense": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3)}}


class Block(nnx.Module):
    """A module of flax.nnx with parameters in a list, and random streams."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


@functools.cache  # nothing of it can be written, but for "host", which is not
def everything() -> dict[str, Any]:
    """State of all the libraries, of every kind of leaf."""
    return {
        "params": PARAMS,
        "linen": nn.Dense(3).init(jax.random.key(0), jnp.ones((1, 2))),
        "nnx": nnx.state(Block(nnx.Rngs(0))),
        "optimizer": optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init(PARAMS),
        "equinox": eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(1)),
        "keys": [jax.random.key(3), jax.random.split(jax.random.key(4, impl="rbg"), 2), jax.random.PRNGKey(5)],
        "host": np.arange(4),
        "step": 3,
        "text": ("a", None, 1.5),
    }


def contents(leaf: Any) -> Any:
    """A leaf as something that can be compared."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(jax.random.key_impl(leaf)), np.array(jax.random.key_data(leaf))
    return np.array(leaf) if isinstance(leaf, jax.Array | np.ndarray) else leaf


def changed(leaf: Any) -> Any:
    """Another value of the same kind; functions stay."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = np.array(jax.random.key_data(leaf)) + np.uint32(1)
        return jax.random.wrap_key_data(jax.device_put(data), impl=str(jax.random.key_impl(leaf)))
    if isinstance(leaf, jax.Array):
        return jax.device_put(np.array(leaf) + leaf.dtype.type(1))  # NumPy adds without compiling
    return leaf if callable(leaf) else leaf + 1 if isinstance(leaf, np.ndarray) else leaf + type(leaf)("1")


def kinds(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree with their classes."""
    pairs, form = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path), type(leaf)) for path, leaf in pairs] + [("", form)]


class TestTree(ProviderTests):
    def provider(self) -> StateProvider:
        return from_pytree("state", everything())

    def perturb(self, provider: Any) -> None:
        provider.tree = jax.tree.map(changed, provider.tree)

    def state(self, provider: Any) -> object:
        return [contents(leaf) for leaf in jax.tree.leaves(provider.tree)]


class TestCallables(TestTree):
    """The same by ``get`` and ``set``, as for a loop that replaces its state."""

    def provider(self) -> StateProvider:
        held = {"now": everything()}
        return from_pytree("state", get=lambda: held["now"], set=partial(held.__setitem__, "now"))


def test_keys_are_the_paths_of_the_tree_and_leaves_keep_their_classes(tmp_path: Path) -> None:
    provider = from_pytree("state", everything())
    before = kinds(provider.tree)
    ds.snapshot([provider], tmp_path / "c").wait_committed()
    with ds.open(tmp_path / "c") as stored:
        found = set(stored)
    assert {
        "state/params/dense/kernel",
        "state/linen/params/bias",
        "state/nnx/layers/0/kernel/value",
        "state/nnx/dropout/rngs/key/value/key_data",
        "state/optimizer/1/0/mu/dense/kernel",
        "state/equinox/layers/1/weight",
        "state/keys/0/key_data",
        "state/keys/2",
        "state/host",
    } <= found
    provider.tree = jax.tree.map(changed, provider.tree)
    ds.restore([provider], tmp_path / "c")
    assert kinds(provider.tree) == before
    loaded = ds.load(tmp_path / "c")["state"]
    assert loaded["keys"][0]["impl"] == "threefry2x32"
    assert loaded["text"] == ["a", None, 1.5]
    assert list(loaded["equinox"]) == ["layers"]  # not its functions
    assert loaded["optimizer"][1][0]["count"] == 0


TYPES = [
    "bool", "int2", "int4", "int8", "uint2", "uint4", "uint16", "uint32", "float16", "float32", "bfloat16",
    "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn", "complex64",
]  # fmt: skip


def test_element_types_come_back_bit_for_bit(tmp_path: Path) -> None:
    import torch

    one = np.array([[0, 1, 1], [1, 0, 1]], np.float32)
    tree = {name: jax.device_put(one.astype(getattr(jnp, name).dtype)) for name in TYPES}
    tree["int4"] = jax.device_put(np.array([-8, -1, 7], ml_dtypes.int4))
    provider = from_pytree("s", tree)
    ds.snapshot([provider], tmp_path / "c").wait_committed()
    provider.tree = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    ds.restore([provider], tmp_path / "c")
    loaded = ds.load(tmp_path / "c")["s"]
    opened = torch.load(tmp_path / "c" / "rank-00000.pt", weights_only=True)["s"]
    for name, array in tree.items():
        bits = np.asarray(array).tobytes()
        assert provider.tree[name].dtype == array.dtype
        assert np.asarray(provider.tree[name]).tobytes() == bits
        assert (loaded[name].dtype, loaded[name].tobytes()) == (array.dtype, bits)
        assert opened[name].contiguous().view(torch.uint8).numpy().tobytes() == bits
    assert opened["bfloat16"].dtype == torch.bfloat16
    assert opened["int4"].dtype == torch.uint8  # torch lacks it
    assert loaded["int4"].dtype == ml_dtypes.int4


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "int4"])
def test_numbers_of_small_types_are_numbers(name: str, tmp_path: Path) -> None:
    kind = getattr(ml_dtypes, name)
    saved = {"n": kind(3), "array": jnp.full((), 3, name), "inside": {kind(2)}, "arrays": {"a": (np.ones(2, kind),)}}
    provider = from_pytree("s", saved)
    ds.snapshot([provider], tmp_path / "c").wait_committed()
    loaded = ds.load(tmp_path / "c")["s"]
    assert (type(loaded["n"]), loaded["n"], loaded["inside"]) == (kind, 3, {kind(2)})
    provider.tree = {"n": jnp.zeros((), name), "array": kind(0), "inside": set(), "arrays": {"a": (np.zeros(2, kind),)}}
    ds.restore([provider], tmp_path / "c")
    assert (provider.tree["n"].dtype, provider.tree["n"]) == (saved["array"].dtype, 3)
    assert (type(provider.tree["array"]), provider.tree["array"]) == (kind, 3)
    provider.tree = {**saved, "n": jnp.float32(0)}
    with pytest.raises(RestoreError, match="'s/n': no array in the checkpoint, one in the live state"):
        ds.restore([provider], tmp_path / "c")


@jax.jit
def _plus(tree: Any) -> Any:
    return jax.tree.map(lambda x: x + 1, tree)


donating = jax.jit(_plus, donate_argnums=0)


def test_a_donation_after_the_snapshot_takes_the_memory(tmp_path: Path) -> None:
    state = {"a": jnp.arange(4096.0), "b": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3)}
    kept = {key: np.array(array) for key, array in state.items()}
    first = state["a"].unsafe_buffer_pointer()
    with ds.Checkpointer(tmp_path) as ckpt:
        snapshot = ckpt.snapshot([from_pytree("s", state)], step=1)
        for _ in range(3):  # no gate
            state = donating(state)
        assert state["a"].unsafe_buffer_pointer() == first, "the snapshot held its reference beyond the call"
        snapshot.wait_committed()
    assert equal(ds.load(tmp_path)["s"], kept)


def aligned(count: int) -> Any:
    """An array of ones of NumPy that ``jax.device_put`` takes over without a copy."""
    block = np.empty(4 * count + 64, np.uint8)
    array = block[-block.ctypes.data % 64 :][: 4 * count].view(np.float32)
    array[:] = 1
    return array


@pytest.mark.parametrize("source", [lambda: aligned(100_000), lambda: torch.ones(100_000)], ids=["numpy", "dlpack"])
def test_memory_that_another_library_writes_is_copied(source: Any, tmp_path: Path) -> None:
    memory = source()
    array = jax.device_put(memory) if isinstance(memory, np.ndarray) else jax.dlpack.from_dlpack(memory)
    array.block_until_ready()
    provider = from_pytree("s", {"x": array})
    assert not any(shard.lazy for shard in provider.shards() if not shard.is_object)
    snapshot = ds.snapshot([provider], tmp_path / "c")
    memory[50_001:50_100] = 7
    snapshot.wait_committed()
    assert np.array_equal(ds.load(tmp_path / "c")["s"]["x"], np.ones(100_000))


def test_a_donation_before_the_snapshot_is_refused_by_key(tmp_path: Path) -> None:
    state = {"kept": jnp.ones(3), "lost": jnp.ones(4096)}
    donating({"x": state["lost"]})
    with pytest.raises(ProviderError, match="'lost' is an array of JAX that was donated"):
        ds.snapshot([from_pytree("s", state)], tmp_path / "c")


def test_misfits_are_named_with_both_values(tmp_path: Path) -> None:
    saved = {
        "shape": jnp.ones(3),
        "type": jnp.ones(2),
        "key": jax.random.key(0),
        "as_long": jax.random.key(0, impl="unsafe_rbg"),
        "wide": np.array([2**40]),
        "only": jnp.ones(1),
        "fits": jnp.ones(1),
    }
    ds.snapshot([from_pytree("s", saved)], tmp_path / "c").wait_committed()
    live = {
        "shape": jnp.ones(4),
        "type": jnp.ones(2, jnp.int32),
        "key": jax.random.key(0, impl="rbg"),
        "as_long": jax.random.key(1, impl="rbg"),
        "wide": jax.ShapeDtypeStruct((1,), np.int64),
        "fits": jnp.zeros(1),
        "new": jnp.ones(2),
    }
    provider = from_pytree("s", live)
    with pytest.raises(RestoreError) as caught:
        ds.restore([provider], tmp_path / "c")
    assert caught.value.missing == ["s/new"]
    assert caught.value.unexpected == ["s/only"]
    said = str(caught.value)
    assert "float32 of shape (3,) in the checkpoint, float32 of shape (4,) in the live state" in said
    assert "float32 of shape (2,) in the checkpoint, int32 of shape (2,) in the live state" in said
    assert "'threefry2x32' in the checkpoint, of 'rbg' in the live state" in said
    assert "'s/wide': int64 in the live state, of which JAX makes int32 while jax_enable_x64 is off" in said
    assert provider.tree is live
    ds.restore([provider], tmp_path / "c", strict=False)
    assert [key for key in live if provider.tree[key] is not live[key]] == ["fits"]
    with jax.enable_x64(True):
        result = ds.restore([provider], tmp_path / "c", strict=False)
        assert provider.tree["wide"].tolist() == [2**40]
    assert "s/wide" not in result.mismatched_keys


def test_a_failed_restore_leaves_the_tree_and_what_is_not_restored_stays(tmp_path: Path) -> None:
    saved = {"a": jnp.arange(100_000.0), "b": jnp.ones(2), "n": 1}
    ds.snapshot([from_pytree("s", saved)], tmp_path / "c").wait_committed()
    live = {"a": jnp.zeros(100_000), "b": jnp.zeros(3), "n": 2}
    provider = from_pytree("s", live)
    result = ds.restore([provider], tmp_path / "c", strict=False)
    assert list(result.mismatched_keys) == ["s/b"]
    assert provider.tree["b"] is live["b"]
    assert (provider.tree["a"] == saved["a"]).all()
    assert provider.tree["n"] == 1
    provider.tree = live = {"a": jnp.zeros(100_000), "b": jnp.zeros(2), "n": 2}
    ds.restore([provider], tmp_path / "c", keys="s/b")
    assert provider.tree["a"] is live["a"]
    assert (provider.tree["b"] == 1).all()
    assert provider.tree["n"] == 2
    file = tmp_path / "c" / "rank-00000.pt"
    data = bytearray(file.read_bytes())
    data[data.index(np.arange(1000, 1010, dtype=np.float32).tobytes())] ^= 1
    file.write_bytes(data)
    provider.tree = live
    with pytest.raises(CorruptError, match="s/a"):
        ds.restore([provider], tmp_path / "c")
    assert provider.tree is live


def test_a_comparison_keeps_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []

    def landings(like: Any) -> Any:
        found = jax_arrays.landings(like)
        made.extend(weakref.ref(memory) for _, memory in found)
        return found

    known = {**vars(jax_arrays), "landings": landings}
    monkeypatch.setattr("datastates.state.replacements.jax_arrays", SimpleNamespace(**known))
    provider = from_pytree("s", {"a": jnp.arange(3.0)})
    ds.snapshot([provider], tmp_path / "c").wait_committed()
    ds.compare([provider], tmp_path / "c")
    gc.collect()
    assert [memory() is None for memory in made] == [True]


def test_descriptions_of_arrays_are_restored_into_and_not_saved(tmp_path: Path) -> None:
    saved = {"w": jnp.arange(6.0).reshape(2, 3), "key": jax.random.key(7)}
    ds.snapshot([from_pytree("s", saved)], tmp_path / "c").wait_committed()
    provider = from_pytree("s", jax.eval_shape(lambda: saved))
    with pytest.raises(ProviderError, match="describes an array"):
        provider.shards()
    ds.restore([provider], tmp_path / "c")
    assert [contents(x)[0] for x in (provider.tree["key"], saved["key"])] == ["threefry2x32"] * 2
    assert equal(*(np.array(jax.random.key_data(tree["key"])) for tree in (provider.tree, saved)))
    assert (provider.tree["w"] == saved["w"]).all()


def test_a_leaf_with_a_state_dict_is_refused_as_its_state_would_not_be_saved(tmp_path: Path) -> None:
    import torch

    tree = {"net": torch.nn.Linear(2, 2), "n": 1}
    with pytest.raises(ProviderError, match=r"'net' is a Linear, which has a state_dict\(\): use from_stateful"):
        ds.snapshot([from_pytree("s", tree)], tmp_path / "c")
    ds.snapshot([from_pytree("s", tree | {"net": torch.nn.Linear})], tmp_path / "c").wait_committed()


def test_weak_types_are_those_of_the_tree_so_that_no_step_is_compiled_anew(tmp_path: Path) -> None:
    compiled = []

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any) -> Any:
        compiled.append(0)
        return jax.tree.map(lambda x: x * 2, state)

    by_rows = jax.sharding.NamedSharding(jax.make_mesh((8,), ("a",)), jax.P("a"))
    state = {"rate": jnp.asarray(1.5), "rows": jax.device_put(jnp.full(16, 1.5), by_rows), "strong": jnp.ones(3)}
    state |= {"empty": jnp.full((0, 3), 1.5)}
    weak = {"rate": True, "rows": True, "strong": False, "empty": True}
    assert {key: array.weak_type for key, array in state.items()} == weak
    ds.snapshot([from_pytree("s", state)], tmp_path / "c").wait_committed()
    described = jax.eval_shape(lambda: jax.tree.map(lambda x: x, state))
    described["rows"] = state["rows"]
    provider = from_pytree("s", {**state, "strong": np.zeros(3, np.float32)})
    ds.restore([provider], tmp_path / "c")
    for found in (ds.load(tmp_path / "c", like={"s": state})["s"], ds.load(tmp_path / "c", like={"s": described})["s"]):
        assert {key: array.weak_type for key, array in found.items()} == weak
        assert all((found[k].sharding, found[k].committed) == (a.sharding, a.committed) for k, a in state.items())
        assert (found["rate"] * jnp.ones(1, jnp.bfloat16)).dtype == jnp.bfloat16
    assert isinstance(provider.tree["strong"], np.ndarray)
    step(jax.tree.map(jnp.copy, state))
    doubled = step(found)
    assert len(compiled) == 1
    assert found["rows"].is_deleted()
    assert doubled["rate"] == 3.0
    assert doubled["rows"].tolist() == [3.0] * 16


def test_torch_and_jax_restore_each_others_states(tmp_path: Path) -> None:
    import torch

    ds.snapshot([from_pytree("s", {"w": jnp.arange(3.0), "l": [jnp.ones(2)]})], tmp_path / "jax").wait_committed()
    of_torch = {"w": torch.zeros(3), "l": [torch.zeros(2)]}
    ds.restore([from_state_dict("s", of_torch)], tmp_path / "jax")
    assert of_torch["w"].tolist() == [0, 1, 2]
    of_torch["w"] += 1
    ds.snapshot([from_state_dict("s", of_torch)], tmp_path / "torch").wait_committed()
    provider = from_pytree("s", {"w": jnp.zeros(3), "l": [jnp.zeros(2)]})
    ds.restore([provider], tmp_path / "torch")
    assert provider.tree["w"].tolist() == [1, 2, 3]


def test_either_a_tree_or_both_callables() -> None:
    for wrong in ({}, {"get": dict}, {"set": print}, {"tree": {}, "get": dict, "set": print}):
        with pytest.raises(TypeError, match="takes a tree, or get= and set="):
            from_pytree("s", **wrong)


def test_plain_containers_need_neither_jax_nor_torch(tmp_path: Path) -> None:
    code = """
        import collections, sys
        import numpy as np
        import datastates as ds
        from datastates.providers import from_pytree

        Pair = collections.namedtuple("Pair", "first second")
        saved = {"p": Pair(np.arange(3), [np.ones(2), None, 2.5]), "t": (np.zeros(1), "x")}
        ds.snapshot([from_pytree("s", saved)], "c").wait_committed()
        live = {"p": Pair(np.zeros(3, int), [np.zeros(2), None, 0.5]), "t": (np.ones(1), "y")}
        provider = from_pytree("s", live)
        ds.restore([provider], "c")
        tree = provider.tree
        assert type(tree["p"]) is Pair and tree["p"].first.tolist() == [0, 1, 2], tree
        assert tree["p"].second[1:] == [None, 2.5] and tree["t"][1] == "x" and tree["t"][0] == 0
        assert live["p"].first.tolist() == [0, 0, 0]

        filled, empty = (collections.defaultdict(list, a=np.full(2, n)) for n in (1, 0))
        ds.snapshot([from_pytree("d", filled)], "d").wait_committed()
        provider = from_pytree("d", empty)
        ds.restore([provider], "d")
        assert provider.tree["a"].tolist() == [1, 1] and provider.tree.default_factory is list
        assert empty["a"].tolist() == [0, 0]
        with ds.open("c") as stored:
            assert set(stored) == {"s/p/first", "s/p/second/0", "s/t/0"}, set(stored)

        odd = {"type that torch names": np.ones(2, np.uint32), "no plain value": {1}}
        ds.snapshot([from_pytree("o", odd)], "o").wait_committed()
        provider = from_pytree("o", {**odd, "type that torch names": np.zeros(2, np.uint32)})
        ds.restore([provider], "o")
        for tree in (provider.tree, ds.load("o")["o"], ds.load("o", like={"o": odd})["o"]):
            assert tree["type that torch names"].tolist() == [1, 1] and tree["no plain value"] == {1}
        assert not {"jax", "torch"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-P", "-c", textwrap.dedent(code)], check=True, cwd=tmp_path)


def test_arrays_of_jax_are_never_written(tmp_path: Path) -> None:
    ds.snapshot([from_pytree("s", {"w": jnp.arange(3.0)})], tmp_path / "c").wait_committed()
    live = {"w": jnp.zeros(3)}
    for provider in (from_state_dict("s", live), HostTensorProvider("s", live)):
        with pytest.raises(RestoreError, match="'s/w': the live array is of JAX, which from_pytree alone replaces"):
            ds.restore([provider], tmp_path / "c")
    by_rows = jax.sharding.NamedSharding(jax.make_mesh((3,), ("a",), devices=jax.devices()[:3]), jax.P("a"))
    with pytest.raises(RestoreError, match="the live array is of JAX"):
        ds.restore([from_state_dict("s", {"w": jax.device_put(live["w"], by_rows)})], tmp_path / "c")
    with pytest.raises(RestoreError, match="'s/v': the live array is of JAX"):
        ds.restore([from_state_dict("s", {"v": live["w"]})], tmp_path / "c", rename={"s/w": "s/v"})
    assert live["w"].tolist() == [0, 0, 0]


def test_equality_of_states_knows_random_keys() -> None:
    keys = jax.random.split(jax.random.key(0), 2)
    assert equal([keys], [jax.random.split(jax.random.key(0), 2)])
    assert "is not" in str(difference(keys, jax.random.split(jax.random.key(1), 2)))
    other = jax.random.split(jax.random.key(0, impl="rbg"), 2)
    assert difference(keys, other) == "state: random keys of 'threefry2x32' are not of 'rbg'"


class Model:
    """A model as some programs have it: an object that can be called, with its weights."""

    def __init__(self, w: Any) -> None:
        self.w = w

    def __call__(self, x: Any) -> Any:
        return self.w @ x


def function(x: Any, y: Any = None) -> Any:
    return x


OPAQUE: dict[str, Any] = {
    "an object": Model(jnp.ones(3)),
    "a polynomial": np.poly1d([1.0, 2.0]),
    "a module of torch": torch.nn.Linear(2, 2),
    "a partial over an object": partial(function, Model(jnp.ones(3))),
    "a partial of an object": partial(Model(jnp.ones(3)), 1),
    "a partial over an array": partial(function, y={"w": np.ones(3)}),
}
STATIC: dict[str, Any] = {
    "a function": function,
    "a class": Model,
    "a builtin": len,
    "a method": Model(1).__call__,
    "an element type": jnp.float32,
    "jitted": jax.jit(function),
    "custom_jvp": jax.nn.relu,
    "custom_vjp": jax.custom_vjp(function),
    "vmapped": jax.vmap(function),
    "compiled": jax.jit(lambda x: x).lower(1.0).compile(),
    "cached": functools.lru_cache(function),
    "partial": partial(function, 1, y=partial(len)),
    "ufuncs": [np.add, jnp.add],
    "of torch": [torch.relu, torch.ops.aten.add, torch.ops.aten.add.Tensor],
    "a type": list[int],
    "getter": operator.itemgetter(0),
}


@pytest.mark.parametrize("what", OPAQUE)
def test_an_object_that_can_be_called_is_refused_by_key(what: str, tmp_path: Path) -> None:
    ds.snapshot([from_pytree("s", {"w": jnp.ones(3), "layers": [1]})], tmp_path / "c").wait_committed()
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "w.safetensors")
    provider = from_pytree("s", {"layers": [1, OPAQUE[what]], "w": jnp.zeros(3)})
    for path in (tmp_path / "c", tmp_path / "w.safetensors"):
        with pytest.raises(DatastatesError, match="layers/1"):
            ds.restore([provider], path, strict=False)
        with pytest.raises(DatastatesError, match="layers/1"):
            ds.compare([provider], path)
    with pytest.raises(DatastatesError, match="layers/1"):
        ds.snapshot([provider], tmp_path / "new").wait_committed()
    assert not (tmp_path / "new").exists()
    with pytest.raises(DatastatesError, match="layers/1"):
        ds.load(tmp_path / "c", like={"s": provider.tree})


@pytest.mark.parametrize("what", STATIC)
def test_what_is_made_of_functions_belongs_to_the_program(what: str, tmp_path: Path) -> None:
    ds.snapshot([from_pytree("s", {"f": STATIC[what], "w": jnp.ones(3)})], tmp_path / "c").wait_committed()
    provider = from_pytree("s", {"f": STATIC[what], "w": jnp.zeros(3)})
    ds.restore([provider], tmp_path / "c")
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, provider.tree["f"], STATIC[what]))
    assert provider.tree["w"].tolist() == [1, 1, 1]
