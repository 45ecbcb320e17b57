"""Sharded arrays of JAX: what one mesh of devices saved is restored onto another one."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: sharded arrays were NOT tested")
import jax.numpy as jnp  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import datastates as ds  # noqa: E402
from datastates.errors import RestoreError  # noqa: E402
from datastates.providers import from_pytree  # noqa: E402
from datastates.state import jax_arrays  # noqa: E402

MESHES = [(8,), (4, 2), (2, 2, 2), (2, 4), (4,), (2,), (1,), (3,)]


def mesh_of(shape: tuple[int, ...], backwards: bool = False) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(shape))])
    return Mesh((devices[::-1] if backwards else devices).reshape(shape), tuple("abc"[: len(shape)]))


@st.composite
def shardings(draw: st.DrawFn, shape: tuple[int, ...]) -> NamedSharding:
    """A sharding of a random mesh that divides a shape."""
    mesh = mesh_of(draw(st.sampled_from(MESHES)), draw(st.booleans()))
    names = draw(st.permutations(mesh.axis_names))
    spec: list[Any] = []
    for size in shape:
        taken = names[: draw(st.integers(0, len(names)))]
        while taken and size % int(np.prod([mesh.shape[name] for name in taken])):
            taken = taken[:-1]
        names = names[len(taken) :]
        spec.append(tuple(taken) or None)
    return NamedSharding(mesh, PartitionSpec(*spec))


@st.composite
def states(draw: st.DrawFn) -> list[tuple[Any, NamedSharding]]:
    """Arrays, each with a sharding to save it in, and one to restore it in."""
    found = []
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 6, 8, 24]), max_size=3)))
        dtype = draw(st.sampled_from([np.float32, np.int8, jax.numpy.bfloat16, np.bool_]))
        values = (np.arange(np.prod(shape)) + number).reshape(shape).astype(dtype)
        found.append((jax.device_put(values, draw(shardings(shape))), draw(shardings(shape))))
    return found


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(states())
def test_any_mesh_restores_onto_any_other(drawn: list[tuple[Any, NamedSharding]]) -> None:
    saved = [array for array, _ in drawn]
    live = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a, sharding in drawn]
    provider = from_pytree("s", live)
    with TemporaryDirectory() as folder:
        path = Path(folder, "c")
        ds.snapshot([from_pytree("s", saved)], path).wait_committed()
        ds.restore([provider], path, verify="digest")
        loaded = ds.load(path)["s"]
    for (array, sharding), restored, whole in zip(drawn, provider.tree, loaded, strict=True):
        assert restored.sharding == sharding
        assert restored.dtype == array.dtype
        assert np.array(restored).tobytes() == np.array(array).tobytes() == whole.tobytes()


def test_a_restore_reads_what_it_needs(tmp_path: Path) -> None:
    by_rows = NamedSharding(mesh_of((8,)), PartitionSpec("a"))
    values = {key: np.random.default_rng(0).random((1024, 512), np.float32) for key in ("w", "v")}
    provider = from_pytree("s", jax.device_put(values, by_rows))
    ds.snapshot([provider], tmp_path / "c").wait_committed()
    shards = [shard for shard in provider.shards() if shard.key == "w"]
    assert [shard.offset for shard in shards] == [(128 * i, 0) for i in range(8)]
    views = [shard.data.unsafe_buffer_pointer() for shard in provider.tree["w"].addressable_shards]
    assert [shard.buffer and shard.buffer.pointer for shard in shards] == views  # nothing was copied
    by_columns = NamedSharding(mesh_of((2, 4)), PartitionSpec(None, "b"))
    provider.tree = jax.device_put(jax.tree.map(np.zeros_like, values), by_columns)
    result = ds.restore([provider], tmp_path / "c")
    assert result.needed_nbytes == 2 * 1024 * 512 * 4  # each box once, though two devices have it
    assert result.read_nbytes <= 1.05 * result.needed_nbytes
    assert all(np.array_equal(provider.tree[key], whole) for key, whole in values.items())


def test_restored_arrays_lie_in_the_memory_that_was_read_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_into: list[int] = []

    def landings(like: Any) -> Any:
        found = original(like)
        read_into.extend(memory.ctypes.data for _, memory in found)
        return found

    original = jax_arrays.landings
    monkeypatch.setattr(jax_arrays, "landings", landings)
    copies = NamedSharding(mesh_of((2, 4)), PartitionSpec("b"))  # two devices have each box
    saved = {"large": np.random.default_rng(0).random((256, 512), np.float32), "small": np.arange(8, dtype=np.int8)}
    ds.snapshot([from_pytree("s", saved)], tmp_path / "c").wait_committed()
    like = {key: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=copies) for key, x in saved.items()}
    state = ds.load(tmp_path / "c", like={"s": like})["s"]
    shards = [shard for array in state.values() for shard in array.addressable_shards]
    assert {shard.data.unsafe_buffer_pointer() for shard in shards} == set(read_into)
    assert len(shards) == 2 * len(read_into)
    doubled = jax.jit(lambda x: x * 2, donate_argnums=0)
    for key, array in state.items():
        first = array.addressable_data(0) + 0
        now = doubled(array)
        assert np.array_equal(now, saved[key] * 2)
        assert np.array_equal(first, saved[key][: len(first)])


def test_arrays_that_were_one_are_restored_each_as_it_is_wanted(tmp_path: Path) -> None:
    one = jnp.arange(8.0)
    ds.snapshot([from_pytree("s", [one, one, one])], tmp_path / "c").wait_committed()
    by_rows = NamedSharding(mesh_of((8,)), PartitionSpec("a"))
    like = [jax.ShapeDtypeStruct((8,), jnp.float32, sharding=by_rows), jnp.zeros(8), np.zeros(8, np.float32)]
    found = ds.load(tmp_path / "c", like={"s": like})["s"]
    assert [found[0].sharding, found[1].sharding, type(found[2])] == [by_rows, like[1].sharding, np.ndarray]
    assert all(np.array_equal(array, one) for array in found)
    live = [jnp.zeros(8, jnp.int32), jnp.zeros(8), jnp.zeros(7)]
    provider = from_pytree("s", live)
    result = ds.restore([provider], tmp_path / "c", strict=False)
    assert list(result.mismatched_keys) == ["s/0", "s/2"]
    assert [now is was for now, was in zip(provider.tree, live, strict=True)] == [True, False, True]
    assert np.array_equal(provider.tree[1], one)
    provider.tree = live = [jnp.zeros(8), jnp.zeros(8), jnp.zeros(8)]
    ds.restore([provider], tmp_path / "c", keys="s/1")
    assert [now is was for now, was in zip(provider.tree, live, strict=True)] == [True, False, True]


def test_random_keys_are_sharded_like_arrays(tmp_path: Path) -> None:
    sharding = NamedSharding(mesh_of((4,)), PartitionSpec("a"))
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), sharding)
    provider = from_pytree("s", {"keys": keys})
    ds.snapshot([provider], tmp_path / "c").wait_committed()
    provider.tree = {"keys": jax.device_put(jax.random.split(jax.random.key(1), 8), sharding)}
    ds.restore([provider], tmp_path / "c")
    assert (jax.random.key_data(provider.tree["keys"]) == jax.random.key_data(keys)).all()
    assert provider.tree["keys"].sharding == sharding


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="this version of JAX sets no mesh")
def test_a_description_over_the_axes_of_the_mesh_that_is_set(tmp_path: Path) -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)

    def init() -> Any:
        keys = jax.random.split(jax.random.key(0), 8)
        return {
            "w": jnp.ones((8, 4), out_sharding=PartitionSpec("a", "b")),
            "b": jnp.zeros(4),
            "keys": jax.sharding.reshard(keys, PartitionSpec("a")),
        }

    with jax.set_mesh(mesh):
        saved, described = init(), jax.eval_shape(init)
        described["named"] = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=PartitionSpec("b"))
        saved["named"] = jax.device_put(jnp.arange(8.0), PartitionSpec("b"))
        ds.snapshot([from_pytree("s", saved)], tmp_path / "c").wait_committed()
        found = ds.load(tmp_path / "c", like={"s": described})["s"]
        assert {key: array.sharding for key, array in found.items()} == {k: a.sharding for k, a in saved.items()}
        assert found["w"].tolist() == saved["w"].tolist()
        assert (jax.random.key_data(found["keys"]) == jax.random.key_data(saved["keys"])).all()
        by_name = {key: described[key] for key in ("w", "named")}
        provider = from_pytree("t", by_name)
        ds.restore([provider], tmp_path / "c", rename={"s/": "t/"}, strict=False)
        assert {key: provider.tree[key].sharding for key in by_name} == {k: saved[k].sharding for k in by_name}
    with pytest.raises(RestoreError) as caught:
        ds.load(tmp_path / "c", like={"s": described})
    assert "'s/w': described by a sharding over AbstractMesh('a': 4, 'b': 2" in str(caught.value)
    assert "'s/named': described by a PartitionSpec, while no mesh is set: use jax.set_mesh" in str(caught.value)
    with (
        jax.set_mesh(jax.make_mesh((2, 4), ("a", "b"))),
        pytest.raises(RestoreError, match="while no such mesh is set"),
    ):
        ds.load(tmp_path / "c", like={"s": described})


class _Device:
    """A device of another process."""

    def __init__(self, number: int) -> None:
        self.process_index = number // 2


class _Sharding:
    """Four processes of two devices each; each box is on two devices."""

    def __init__(self, order: list[int]) -> None:
        self.order = order

    def devices_indices_map(self, shape: tuple[int, ...]) -> dict[_Device, tuple[slice, ...]]:
        size = shape[0] // 4
        boxes = [(slice(i * size, (i + 1) * size), slice(None)) for i in range(4)]
        return dict(zip(map(_Device, range(8)), [boxes[i] for i in self.order], strict=True))


def test_every_process_finds_which_hold_the_same_box() -> None:
    inside = _Sharding([0, 0, 1, 1, 2, 2, 3, 3])
    assert jax_arrays.holders(inside, (8, 3)) == {(0, 0): (), (2, 0): (), (4, 0): (), (6, 0): ()}
    across = _Sharding([0, 1, 2, 3, 0, 1, 2, 3])
    assert jax_arrays.holders(across, (8, 3)) == {(0, 0): (0, 2), (2, 0): (0, 2), (4, 0): (1, 3), (6, 0): (1, 3)}
