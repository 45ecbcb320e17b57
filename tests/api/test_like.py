"""``load(like=)``: trees of new arrays like those that are given."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict

import datastates as ds
from datastates.errors import RestoreError
from datastates.providers import (
    CompositeProvider,
    PickledObjectProvider,
    ReplicatedProvider,
    from_pytree,
    from_stateful,
)

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


def test_what_like_cannot_say(saved: Path) -> None:
    with pytest.raises(TypeError, match="like: a tree for each provider's name is wanted, not a list"):
        ds.load(saved, like=[1])  # type: ignore[arg-type]


# --- other formats, and arrays that are found by their names


SHAPES = {
    "model.embed_tokens.weight": (512, 256),
    "model.layers.0.mlp.up_proj.weight": (1024, 256),
    "model.layers.0.mlp.down_proj.weight": (256, 1024),
    "model.norm.weight": (256,),
}
SPECS = dict(zip(SHAPES, [("b", "a"), ("a", None), (None, "a"), ()], strict=True))
PARTS = ("up_proj", "down_proj")
LLAMA = {
    name: torch.arange(math.prod(shape)).view(shape).to(torch.bfloat16 if "embed" in name else torch.float32)
    for name, shape in SHAPES.items()
}


def described(name: str, dtype: Any = None) -> Any:
    sharding = NamedSharding(jax.make_mesh((4, 2), ("a", "b")), PartitionSpec(*SPECS[name]))
    return jax.ShapeDtypeStruct(SHAPES[name], dtype or str(LLAMA[name].dtype)[6:], sharding=sharding)


def check(name: str, found: Any, dtype: Any = None) -> None:
    like = described(name, dtype)
    assert (found.sharding, found.dtype) == (like.sharding, like.dtype)
    assert np.array_equal(np.asarray(found, np.float32), LLAMA[name].float().numpy().astype(like.dtype))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_torch_state_dict(LLAMA, path, max_shard_size="1500KB")
    assert len(list(path.glob("*.safetensors"))) == 2
    return path


def test_a_folder_of_hugging_face_is_read_onto_a_mesh(folder: Path) -> None:
    like = {name: described(name) for name in LLAMA}
    for found in (ds.load(folder, like=like), ds.load(folder, like={"model": like})["model"]):
        assert found.keys() == like.keys()
        for name in LLAMA:
            check(name, found[name])
    provider = from_pytree("m", like)
    assert ds.compare([provider], folder).restored_keys == tuple(f"m/{name}" for name in sorted(like))
    restored = ds.restore([provider], folder)
    assert restored.needed_nbytes == sum(tensor.nbytes for tensor in LLAMA.values())
    assert restored.read_nbytes <= 1.05 * restored.needed_nbytes
    check("model.norm.weight", provider.tree["model.norm.weight"])


def test_names_are_changed_types_converted_and_keys_chosen(folder: Path) -> None:
    def tree() -> Any:
        layer = {part: {"weight": described(f"model.layers.0.mlp.{part}.weight", "bfloat16")} for part in PARTS}
        return {"layers": [{"mlp": layer}], "norm": {"weight": jnp.zeros(256)}, "head": jnp.ones((2, 3)), "epoch": 3}

    names: Any = {re.compile(r"\."): "/"}
    provider = from_pytree("model", tree())
    with pytest.raises(RestoreError) as caught:
        ds.restore([provider], folder, rename=names)
    assert caught.value.missing == ["model/head"]
    assert caught.value.unexpected == ["model/embed_tokens/weight"]
    said = str(caught.value)
    assert all(f"'model/layers/0/mlp/{part}/weight': float32 of shape" in said for part in PARTS)
    assert isinstance(provider.tree["layers"][0]["mlp"]["up_proj"]["weight"], jax.ShapeDtypeStruct)
    restored = ds.restore([provider], folder, rename=names, cast=True, strict=False)
    assert set(restored.cast_keys) == {f"model/layers/0/mlp/{part}/weight" for part in PARTS}
    for part in PARTS:
        found = provider.tree["layers"][0]["mlp"][part]["weight"]
        check(f"model.layers.0.mlp.{part}.weight", found, "bfloat16")
    assert provider.tree["norm"]["weight"].tolist() == list(range(256))
    assert (provider.tree["head"].tolist(), provider.tree["epoch"]) == ([[1, 1, 1]] * 2, 3)
    provider = from_pytree("model", {**tree(), "norm": {"weight": np.zeros(256, np.float32)}})
    before = provider.tree
    assert ds.restore([provider], folder, rename=names, keys="model/norm/*").left_out_keys
    assert isinstance(provider.tree["norm"]["weight"], np.ndarray)
    assert provider.tree["norm"]["weight"].tolist() == list(range(256))
    assert provider.tree["layers"] == before["layers"]
    assert not before["norm"]["weight"].any()


@pytest.mark.parametrize("how", ["torch", "dcp"])
def test_files_of_torch_are_read_into_trees(how: str, tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(6.0).view(3, 2).t()}, "optimizer": {"state": {0: {"m": torch.ones(4)}}}}
    if how == "torch":
        torch.save(state | {"scale": torch.full((2,), 3.0), "epoch": 3}, tmp_path / "c")
        like: Any = {"model": {"w": jnp.zeros((2, 3))}, "optimizer": {"state": [{"m": np.zeros(4, np.float32)}]}}
        found = ds.load(tmp_path / "c", like={**like, "scale": jnp.zeros(2)})
        assert found["optimizer"]["state"][0]["m"].tolist() == [1, 1, 1, 1]
        assert found["scale"].tolist() == [3, 3]
        with pytest.raises(RestoreError, match="the checkpoint lacks 'scales'"):
            ds.load(tmp_path / "c", like={**like, "scales": jnp.zeros(2)})
    else:
        dcp.save({"model": state["model"]}, checkpoint_id=tmp_path / "c", no_dist=True)
        found = {"model": {"w": ds.load(tmp_path / "c", like={"model.w": jnp.zeros((2, 3))})["model.w"]}}
    assert isinstance(found["model"]["w"], jax.Array)
    assert found["model"]["w"].tolist() == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": np.zeros(3)}, "the checkpoint lacks 'like/x'"),
        (
            {"model.norm.weight": jnp.zeros(3)},
            "'like/model.norm.weight': .* of shape .256,. in the .*float32 of shape .3,",
        ),
        ({"model.norm.weight": np.zeros(256)}, "'like/model.norm.weight': float32 of .*, float64 of shape"),
        (
            {"model.norm.weight": jax.ShapeDtypeStruct((256,), np.float64)},
            "'like/model.norm.weight': float64 in the live state, of which JAX makes float32",
        ),
        ({"model.norm.weight": None}, "the live state lacks 'like/model.norm.weight'"),
    ],
)
def test_misfits_of_other_formats_are_named(folder: Path, change: Any, said: str) -> None:
    like = {name: described(name) for name in LLAMA} | change
    with pytest.raises(RestoreError, match=said):
        ds.load(folder, like={name: leaf for name, leaf in like.items() if leaf is not None})


def test_an_export_for_torch_has_the_boxes_of_a_process_as_one_tensor(tmp_path: Path) -> None:
    arrays = {
        name: jax.device_put(np.asarray(tensor.float()), described(name).sharding) for name, tensor in LLAMA.items()
    }
    ds.snapshot([from_pytree("m", arrays)], tmp_path / "c").wait_committed()
    ds.export(tmp_path / "c", tmp_path / "w.pt")
    found = torch.load(tmp_path / "w.pt", weights_only=True)
    assert found.keys() == LLAMA.keys()
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in LLAMA.items())


def test_trees_are_restored_under_other_names(saved: Path) -> None:
    live = {"v": jnp.zeros((64, 16)), "n": 7, "key": jax.random.key(0)}
    inner = from_pytree("t", live)
    for provider, begin in ((inner, "t/"), (CompositeProvider("all", [ReplicatedProvider(inner)]), "all/t/")):
        inner.tree = live
        ds.restore([provider], saved, rename={"s/w": f"{begin}v", "s/": begin}, keys=f"{provider.name}/*")
        assert np.array_equal(inner.tree["v"], WEIGHT)
        assert inner.tree["n"] == 7
        assert (jax.random.key_data(inner.tree["key"]) == jax.random.key_data(jax.random.key(1))).all()
    wide = {"v": jax.ShapeDtypeStruct((64, 16), np.float64)}
    with pytest.raises(RestoreError, match="'all/t/v': float64 in the live state, of which JAX makes float32"):
        ds.restore([CompositeProvider("all", [from_pytree("t", wide)])], saved, rename={"s/w": "all/t/v"})
