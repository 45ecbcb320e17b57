"""``keys=`` restores what globs match and leaves the rest; ``cast=True`` converts floating-point types."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import datastates as ds
from datastates.errors import CorruptError, RestoreError
from datastates.providers import PickledObjectProvider, from_state_dict, from_stateful
from datastates.reading import casting
from datastates.restoring.selection import Selection, checked_keys


class _Lora(torch.nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.base = torch.nn.Linear(3, 4)
        self.lora_A = torch.nn.Linear(3, 2, bias=False)
        self.lora_B = torch.nn.Linear(2, 4, bias=False)
        for parameter in self.parameters():
            torch.nn.init.constant_(parameter, fill)


def _values(module: torch.nn.Module) -> dict[str, float]:
    return {key: float(value.flatten()[0]) for key, value in module.state_dict().items()}


def _saved(path: Path, *providers: ds.StateProvider) -> Path:
    ds.snapshot(list(providers), path).wait_committed()
    return path


def _state(fill: float) -> dict[str, Any]:
    return {"a": torch.full((2,), fill), "n": {"lr": fill, "b": np.full(3, fill)}, "l": [fill, torch.full((1,), fill)]}


def test_adapters_alone(tmp_path: Path) -> None:
    path = _saved(tmp_path / "c", from_stateful("model", _Lora(1)))
    live = _Lora(0)
    restored = ds.restore([from_stateful("model", live)], path, keys="model/*lora_*")
    assert _values(live) == {"base.weight": 0, "base.bias": 0, "lora_A.weight": 1, "lora_B.weight": 1}
    assert restored.left_out_keys == ["model/base.weight", "model/base.bias"]
    assert not restored.missing_keys
    assert not restored.unexpected_keys


def test_what_is_not_selected_is_not_compared(tmp_path: Path) -> None:
    path = _saved(tmp_path / "c", from_stateful("model", _Lora(1)), from_state_dict("s", _state(1)))
    live = _Lora(0)
    live.base = torch.nn.Linear(3, 9)  # another head
    ds.restore([from_stateful("model", live), from_state_dict("s", {"z": 1})], path, keys=["model/lora_*"])
    assert _values(live)["lora_A.weight"] == 1
    with pytest.raises(RestoreError, match=r"'model/base\.bias'"):
        ds.restore([from_stateful("model", live)], path, keys=["model/*"])


@pytest.mark.parametrize(
    ("glob", "changed"),
    [("s/n/*", {"lr", "b"}), ("s/n/lr", {"lr"}), ("s/a", {"a"}), ("s/l/0", {"l0"}), ("s/l/1", {"l1"})],
)
def test_no_other_leaf_changes(glob: str, changed: set[str], tmp_path: Path) -> None:
    path, live = _saved(tmp_path / "c", from_state_dict("s", _state(1))), _state(0)
    ds.restore([from_state_dict("s", live)], path, keys=glob)
    found = {"a": live["a"][0], "lr": live["n"]["lr"], "b": live["n"]["b"][0], "l0": live["l"][0], "l1": live["l"][1]}
    assert {name for name, value in found.items() if value == 1} == changed


@pytest.mark.parametrize("name", ["a/b", "a~b", "7"])
def test_globs_match_the_keys_that_a_comparison_shows(name: str, tmp_path: Path) -> None:
    path = _saved(tmp_path / "c", from_state_dict(name, _state(1)), from_state_dict("other", _state(1)))
    live, other = _state(0), _state(0)
    providers = [from_state_dict(name, live), from_state_dict("other", other)]
    key = ds.compare(providers, path).restored_keys[0]
    for glob in (key, f"{key.rpartition('/')[0]}/*"):
        live["a"].zero_()
        assert "other/a" in ds.restore(providers, path, keys=glob).left_out_keys
        assert live["a"][0] == 1


def test_a_size_is_left_out_or_taken_as_a_whole(tmp_path: Path) -> None:
    path = _saved(tmp_path / "c", from_state_dict("s", {"a": torch.ones(1), "size": torch.Size([1, 2])}))
    live: dict[str, Any] = {"a": torch.zeros(1), "size": torch.Size([8, 9])}
    ds.restore([from_state_dict("s", live)], path, keys="s/a")
    assert live == {"a": torch.ones(1), "size": torch.Size([8, 9])}
    ds.restore([from_state_dict("s", live)], path, keys="s/size/*")
    assert live["size"] == torch.Size([1, 2])
    assert type(live["size"]) is torch.Size


def test_only_the_model(tmp_path: Path) -> None:
    model, epoch = _Lora(1), {"epoch": 7}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    loop = PickledObjectProvider("loop", lambda: epoch, epoch.update)
    path = _saved(tmp_path / "c", from_stateful("model", model), from_stateful("optim", optimizer), loop)
    live, epoch["epoch"] = _Lora(0), 0
    other = torch.optim.AdamW(live.parameters(), lr=0.1)
    providers = [from_stateful("model", live), from_stateful("optim", other), loop]
    restored = ds.restore(providers, path, keys="model/*")
    assert set(_values(live).values()) == {1}
    assert (other.param_groups[0]["lr"], epoch["epoch"]) == (0.1, 0)
    assert restored.left_out_keys == ["optim", "loop"]
    ds.restore(providers, path, keys=["optim/*", "loop"])
    assert (other.param_groups[0]["lr"], epoch["epoch"]) == (0.5, 7)
    with pytest.raises(RestoreError, match=r"'optim' can be restored only as a whole: select it with 'optim/\*'"):
        ds.restore(providers, path, keys=["optim/state/*"])


def test_a_glob_that_matches_nothing_is_named(tmp_path: Path) -> None:
    path, live = _saved(tmp_path / "c", from_state_dict("s", _state(1))), _state(0)
    with pytest.raises(RestoreError, match=r"nothing of the providers matches 's/x\\ud800\*'"):
        ds.restore([from_state_dict("s", live)], path, keys=["s/a", "s/x\ud800*"])
    assert live["a"][0] == 0


@pytest.mark.parametrize(("name", "given"), [("verify", "digests"), ("verify", False), ("cast", "float32")])
def test_values_that_an_argument_does_not_have_are_named(name: str, given: Any, tmp_path: Path) -> None:
    path, live = _saved(tmp_path / "c", from_state_dict("s", _state(1))), _state(0)
    with pytest.raises((TypeError, ValueError), match=f"{name}: {given!r} is"):
        ds.restore([from_state_dict("s", live)], path, **{name: given})
    assert live["a"][0] == 0


@pytest.mark.parametrize("keys", [(), 3, [b"s"]])
def test_keys_that_are_no_globs(keys: Any, tmp_path: Path) -> None:
    path = _saved(tmp_path / "c", from_state_dict("s", _state(1)))
    with pytest.raises((TypeError, ValueError), match="keys: "):
        ds.restore([from_state_dict("s", _state(0))], path, keys=keys)


FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("wanted", FLOATS)
def test_floats_are_cast_as_torch_casts(stored: str, wanted: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(casting, "WINDOW", 64)  # many windows, and arrays larger than one
    values = torch.randn(7, 5).to(getattr(torch, stored))
    path = _saved(tmp_path / "c", from_state_dict("s", {"w": values, "t": values.t()}))
    live = {"w": torch.zeros(7, 5).to(getattr(torch, wanted)), "t": torch.zeros(5, 7).to(getattr(torch, wanted))}
    restored = ds.restore([from_state_dict("s", live)], path, cast=True, verify="digest")
    assert torch.equal(live["w"].double(), values.to(getattr(torch, wanted)).double())
    assert torch.equal(live["t"].double(), values.t().to(getattr(torch, wanted)).double())
    same = stored == wanted
    assert restored.cast_keys == ({} if same else {f"s/{k}": f"{stored} to {wanted}" for k in ("w", "t")})


def test_numpy_is_cast_and_without_asking_nothing_is(tmp_path: Path) -> None:
    path, live = _saved(tmp_path / "c", from_state_dict("s", {"w": np.ones(9)})), {"w": np.zeros(9, np.float32)}
    with pytest.raises(RestoreError, match="float64 of shape"):
        ds.restore([from_state_dict("s", live)], path)
    ds.restore([from_state_dict("s", live)], path, cast=True)
    assert live["w"].sum() == 9


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_only_floats_are_cast(dtype: str, tmp_path: Path) -> None:
    path = _saved(tmp_path / "c", from_state_dict("s", {"w": torch.ones(3, dtype=getattr(torch, dtype))}))
    with pytest.raises(RestoreError, match=f"'s/w': {dtype} of shape"):
        ds.restore([from_state_dict("s", {"w": torch.zeros(3)})], path, cast=True)


def test_what_is_cast_is_verified(tmp_path: Path) -> None:
    path = _saved(tmp_path / "c", from_state_dict("s", {"w": torch.full((5000,), 3.0)}))
    (file,) = path.glob("*.pt")
    data = bytearray(file.read_bytes())
    data[data.index(torch.full((9,), 3.0).numpy().tobytes()) + 2000] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match="s/w"):
        ds.restore([from_state_dict("s", {"w": torch.zeros(5000).half()})], path, cast=True)


@pytest.mark.parametrize(
    ("ways", "told"),
    [
        ([{"keys": "s/a"}, {"keys": "s/n/b"}], "rank 1 the newest with keys=['s/n/b']"),
        ([{}, {"verify": "digest"}], "rank 0 the newest, rank 1 the newest with verify=digest"),
    ],
    ids=["keys", "verify"],
)
def test_ranks_that_restore_in_different_ways_are_told(ways: list[dict[str, Any]], told: str, tmp_path: Path) -> None:
    path = _saved(tmp_path / "c", from_state_dict("s", _state(1)))
    said: list[str] = []

    def restore(rank: int) -> None:
        with pytest.raises(RestoreError, match="in different ways") as caught:
            ds.restore([from_state_dict("s", _state(0))], path, **ways[rank], rank=rank, world_size=2)
        said.append(str(caught.value))

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(restore, range(2)))
    assert len(said) == 2
    assert told in said[0]


@given(st.text("ab*?/", min_size=1), st.text("ab", min_size=1), st.text("ab/"))
def test_what_covers_a_provider_takes_all_its_keys(glob: str, name: str, key: str) -> None:
    assert checked_keys(glob) == (glob,)
    selection = Selection([glob])
    if glob != name and selection.covers(name) and not Selection([glob]).takes(name):
        assert Selection([glob]).takes(f"{name}/{key}")
        assert not selection.unmatched


def test_each_of_two_ranks_restores_and_casts_what_it_selects(tmp_path: Path) -> None:
    path = _saved(tmp_path / "c", from_state_dict("s", _state(1.0)))
    live = [_state(0.0), _state(0.0)]
    for state in live:
        state["a"] = state["a"].bfloat16()
    del live[1]["n"]  # only rank 0 has what this glob matches
    results: dict[int, ds.Restored] = {}

    def restore(rank: int) -> None:
        provider = from_state_dict("s", live[rank])
        results[rank] = ds.restore([provider], path, keys=["s/a", "s/n/b*"], cast=True, rank=rank, world_size=2)

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(restore, range(2)))
    assert [float(state["a"][0]) for state in live] == [1, 1]
    assert live[0]["n"]["b"].sum() == 3
    assert [state["l"][0] for state in live] == [0, 0]
    assert {rank: list(r.cast_keys) for rank, r in results.items()} == {0: ["s/a"], 1: ["s/a"]}


@pytest.mark.parametrize("other", [torch.float32, torch.float16], ids=["both converted", "one converted"])
def test_memory_that_is_shared_cannot_be_converted_from_tensors_saved_apart(tmp_path: Path, other: torch.dtype) -> None:
    saved = {"a": torch.ones(1000), "b": torch.zeros(1000, dtype=other)}
    ds.snapshot([from_state_dict("s", saved)], tmp_path / "saved").wait_committed()
    live = torch.full((1000,), 7.0, dtype=torch.float16)
    with pytest.raises(RestoreError, match=r"shares live memory with a tensor that was saved apart"):
        ds.restore([from_state_dict("s", {"a": live, "b": live})], tmp_path / "saved", cast=True)
    assert (live == 7).all()


def test_tied_tensors_are_converted(tmp_path: Path) -> None:
    tied = torch.arange(1000.0)
    ds.snapshot([from_state_dict("s", {"a": tied, "b": tied})], tmp_path / "saved").wait_committed()
    live = torch.zeros(1000, dtype=torch.bfloat16)
    ds.restore([from_state_dict("s", {"a": live, "b": live})], tmp_path / "saved", cast=True)
    assert torch.equal(live, tied.bfloat16())
