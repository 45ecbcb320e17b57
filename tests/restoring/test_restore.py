"""Restoring in place: what fits, what does not, and what is left as it was."""

from __future__ import annotations

import copy
import dataclasses
import errno
import gc
import os
import pickle
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import torch
from hold import GATE, held

import datastates as ds
from datastates import _native
from datastates.commit.manifest import container_name
from datastates.container.file import open_container
from datastates.errors import (
    CheckpointNotFoundError,
    CorruptError,
    ProviderError,
    RestoreError,
    StorageError,
    TrustError,
)
from datastates.providers import (
    CompositeProvider,
    HostTensorProvider,
    PickledObjectProvider,
    from_state_dict,
    from_stateful,
)
from datastates.state.shards import ArrayRef
from datastates.testing import equal


def saved(state: Any, path: Path) -> Path:
    ds.snapshot([from_state_dict("s", state)], path).wait_committed()
    return path


def original() -> dict[str, Any]:
    return {"w": torch.arange(6.0).reshape(2, 3), "n": {"b": torch.ones(2), "lr": 0.5}, "list": [torch.zeros(1), 7]}


@pytest.mark.parametrize(
    ("change", "attribute", "key"),
    [
        (lambda s: s.update(w=torch.zeros(3, 2)), "mismatched", "s/w"),
        (lambda s: s.update(w=torch.zeros(2, 3, dtype=torch.float64)), "mismatched", "s/w"),
        (lambda s: s.update(w=1.0), "mismatched", "s/w"),
        (lambda s: s["n"].update(lr=torch.ones(1)), "mismatched", "s/n/lr"),
        (lambda s: s.update(n=[1]), "mismatched", "s/n"),
        (lambda s: s.update(extra=torch.ones(1)), "missing", "s/extra"),
        (lambda s: s["n"].update(extra=1), "missing", "s/n/extra"),
        (lambda s: s["list"].append(1), "missing", "s/list/2"),
        (lambda s: s.pop("w"), "unexpected", "s/w"),
        (lambda s: s["n"].pop("lr"), "unexpected", "s/n/lr"),
        (lambda s: s["list"].pop(), "unexpected", "s/list/1"),
    ],
)
def test_a_difference_is_named_and_nothing_changes(change: Any, attribute: str, key: str, tmp_path: Path) -> None:
    path = saved(original(), tmp_path / "c")
    live = copy.deepcopy(original())
    live["n"]["b"].zero_()
    change(live)
    before = copy.deepcopy(live)
    with pytest.raises(RestoreError, match=f"'{key}'") as caught:
        ds.restore([from_state_dict("s", live)], path)
    assert any(k.startswith(key) for k in getattr(caught.value, attribute))
    assert equal(live, before)


def test_not_strict_restores_what_both_have(tmp_path: Path) -> None:
    path = saved(original(), tmp_path / "c")
    live = {"w": torch.zeros(3, 2), "n": {"b": torch.zeros(2), "extra": 1}, "list": [torch.ones(1), 0, "more"]}
    result = ds.restore([from_state_dict("s", live)], path, strict=False)
    assert result.missing_keys == ["s/n/extra", "s/list/2"]
    assert result.unexpected_keys == ["s/n/lr"]
    assert list(result.mismatched_keys) == ["s/w"]
    assert equal(
        live, {"w": torch.zeros(3, 2), "n": {"b": torch.ones(2), "extra": 1}, "list": [torch.zeros(1), 7, "more"]}
    )


def test_a_module_that_differs_is_refused_by_name(tmp_path: Path) -> None:
    ds.snapshot([from_stateful("m", torch.nn.Linear(3, 2))], tmp_path / "c").wait_committed()
    other = torch.nn.Linear(3, 2, bias=False)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(RestoreError, match="'m/bias'"):
        ds.restore([from_stateful("m", other)], tmp_path / "c")
    with pytest.raises(RestoreError, match=r"'m/weight': .*\(2, 3\).*\(2, 4\)"):
        ds.restore([from_stateful("m", torch.nn.Linear(4, 2))], tmp_path / "c")
    assert equal(dict(other.state_dict()), dict(before))
    assert ds.restore([from_stateful("m", other)], tmp_path / "c", strict=False).unexpected_keys == ["m/bias"]


def test_an_optimizer_of_other_groups_is_refused(tmp_path: Path) -> None:
    a, b = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    ds.snapshot([from_stateful("o", torch.optim.SGD([a, b]))], tmp_path / "c").wait_committed()
    with pytest.raises(RestoreError, match="o/param_groups"):
        ds.restore([from_stateful("o", torch.optim.SGD([a]))], tmp_path / "c")


def test_every_layout_of_the_live_tensor_is_restored(tmp_path: Path) -> None:
    state = torch.arange(12.0).reshape(3, 4)
    path = saved({"a": state, "b": state.t().contiguous().t(), "c": state[:, ::2], "d": state}, tmp_path / "c")
    base = torch.full((3, 8), -1.0)
    live = {"a": torch.zeros(4, 3).t(), "b": torch.zeros(3, 4), "c": torch.zeros(3, 2), "d": base[:, ::2]}
    ds.restore([from_state_dict("s", live)], path)
    assert equal(live, {"a": state, "b": state, "c": state[:, ::2], "d": state})
    assert (base[:, 1::2] == -1).all()


def test_numpy_and_torch_restore_into_each_other(tmp_path: Path) -> None:
    path = saved({"a": torch.arange(4.0), "b": np.arange(4)}, tmp_path / "c")
    live = {"a": np.zeros(4, np.float32), "b": torch.zeros(4, dtype=torch.int64)}
    ds.restore([from_state_dict("s", live)], path)
    assert equal(live, {"a": np.arange(4, dtype=np.float32), "b": torch.arange(4)})


def test_a_read_only_array_is_refused(tmp_path: Path) -> None:
    path = saved({"a": np.arange(3)}, tmp_path / "c")
    live = np.zeros(3, np.int64)
    live.flags.writeable = False
    with pytest.raises(RestoreError, match=r"'s/a'.*read-only"):
        ds.restore([from_state_dict("s", {"a": live})], path)


def test_what_a_callable_builds_takes_arrays_but_not_other_values(tmp_path: Path) -> None:
    weight, epoch = torch.ones(2), 1
    provider = from_state_dict("s", lambda: {"w": weight, "epoch": epoch})
    ds.snapshot([provider], tmp_path / "c").wait_committed()
    weight.zero_()
    ds.restore([provider], tmp_path / "c")
    assert weight.tolist() == [1, 1]
    epoch = 2
    with pytest.raises(RestoreError, match="s/epoch"):
        ds.restore([provider], tmp_path / "c")


def test_a_live_mapping_behind_a_callable_takes_everything(tmp_path: Path) -> None:
    state = {"epoch": 1}
    provider = from_state_dict("s", lambda: state)
    ds.snapshot([provider], tmp_path / "c").wait_committed()
    state["epoch"] = 2
    ds.restore([provider], tmp_path / "c")
    assert state == {"epoch": 1}


def test_an_object_whose_state_dict_is_a_copy_gets_its_state_through_load_state_dict(tmp_path: Path) -> None:
    class Ema:
        def __init__(self) -> None:
            self.shadow = torch.ones(3)

        def state_dict(self) -> dict[str, Any]:
            return {"shadow": self.shadow.clone()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.shadow = state["shadow"]

    ema = Ema()
    ds.snapshot([from_stateful("ema", ema)], tmp_path / "c").wait_committed()
    ema.shadow.zero_()
    ds.restore([from_stateful("ema", ema)], tmp_path / "c")
    assert ema.shadow.tolist() == [1, 1, 1]


def test_a_module_with_extra_state_gets_it(tmp_path: Path) -> None:
    class Counting(torch.nn.Linear):
        calls = 3

        def get_extra_state(self) -> Any:
            return {"calls": self.calls}

        def set_extra_state(self, state: Any) -> None:
            self.calls = state["calls"]

    ds.snapshot([from_stateful("m", Counting(2, 2))], tmp_path / "c").wait_committed()
    other = Counting(2, 2)
    other.calls = 0
    ds.restore([from_stateful("m", other)], tmp_path / "c")
    assert other.calls == 3


def test_only_what_is_asked_for_is_restored(tmp_path: Path) -> None:
    a, b = torch.ones(2), torch.ones(2)
    providers = [HostTensorProvider("a", {"t": a}), HostTensorProvider("b", {"t": b})]
    ds.snapshot(providers, tmp_path / "c").wait_committed()
    a.zero_(), b.zero_()
    assert ds.restore(providers[:1], tmp_path / "c").step == 0
    assert (a.sum(), b.sum()) == (2, 0)


def test_a_provider_that_was_not_saved_is_missing(tmp_path: Path) -> None:
    path = saved(original(), tmp_path / "c")
    with pytest.raises(RestoreError, match="'other'"):
        ds.restore([HostTensorProvider("other", {"t": torch.ones(1)})], path)


@pytest.mark.usefixtures("nothing_declared")
def test_the_class_to_trust_is_named_before_anything_changes(tmp_path: Path) -> None:
    path = saved({"w": torch.ones(2), "id": UUID(int=1)}, tmp_path / "c")
    live = {"w": torch.zeros(2), "id": UUID(int=2)}
    with pytest.raises(TrustError) as caught:
        ds.restore([from_state_dict("s", live)], path)
    assert live["w"].sum() == 0
    ds.restore([from_state_dict("s", live)], path, trust=[caught.value.name])
    assert live["w"].sum() == 2
    assert live["id"] == UUID(int=1)


def test_damage_is_named(tmp_path: Path) -> None:
    path = saved({"good": torch.ones(4), "bad": torch.arange(50_000.0)}, tmp_path / "c")
    file = path / "rank-00000.pt"
    data = bytearray(file.read_bytes())
    data[file.stat().st_size // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match="'s/bad'") as caught:
        ds.restore([from_state_dict("s", {"good": torch.zeros(4), "bad": torch.zeros(50_000)})], path)
    assert caught.value.key == "s/bad"
    with pytest.raises(CorruptError, match="'s/bad'"):
        ds.load(path)


def test_a_checkpointer_restores_the_newest_or_the_one_named(tmp_path: Path) -> None:
    state = {"n": 0}
    provider = from_state_dict("s", state)
    with ds.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore([provider]) is None
        assert checkpointer.latest() is None
        for state["n"] in (1, 2, 3):
            checkpointer.snapshot([provider], step=10 * state["n"]).wait_committed()
        assert checkpointer.restore([provider], step=20).step == 20
        assert state["n"] == 2
        assert checkpointer.restore([provider]).step == 30
        assert state["n"] == 3
        assert (checkpointer.steps(), checkpointer.latest()) == ([10, 20, 30], 30)
        with pytest.raises(CheckpointNotFoundError, match="step 15"):
            checkpointer.restore([provider], step=15)
    assert ds.restore([provider], tmp_path).step == 30


def test_load_takes_a_directory_a_checkpoint_and_a_file(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path) as checkpointer:
        snapshot = checkpointer.snapshot([from_state_dict("s", original())], step=1)
    for path in (tmp_path, snapshot.path, snapshot.path / "rank-00000.pt", os.fspath(tmp_path)):
        assert equal(ds.load(path), {"s": original()})


def test_no_checkpoint_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=str(tmp_path)):
        ds.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        ds.restore([], tmp_path / "nothing")


def test_views_of_one_storage_in_two_providers_are_written_once(tmp_path: Path) -> None:
    weight = torch.randn(300, 300)
    snapshot = ds.snapshot(
        [HostTensorProvider("a", {"w": weight}), HostTensorProvider("b", {"w": weight})], tmp_path / "c"
    )
    snapshot.wait_committed()
    assert snapshot.report.file_nbytes < 1.1 * weight.nbytes
    other = {"w": torch.zeros(300, 300)}
    ds.restore([HostTensorProvider("b", other)], tmp_path / "c")
    assert torch.equal(other["w"], weight)


def test_composites_name_the_child_in_differences(tmp_path: Path) -> None:
    def composite(**tensors: torch.Tensor) -> CompositeProvider:
        return CompositeProvider("all", [HostTensorProvider("child", tensors)])

    ds.snapshot([composite(a=torch.ones(1), b=torch.ones(1))], tmp_path / "c").wait_committed()
    with pytest.raises(RestoreError) as caught:
        ds.restore([composite(a=torch.ones(2), c=torch.ones(1))], tmp_path / "c")
    assert caught.value.missing == ["all/child/c"]
    assert caught.value.unexpected == ["all/child/b"]
    assert caught.value.mismatched[0].startswith("all/child/a: ")


def test_an_object_with_tensors_inside_restores(tmp_path: Path) -> None:
    live: dict[str, Any] = {"sparse": torch.eye(3).to_sparse()}
    ds.snapshot([PickledObjectProvider("o", get=lambda: live, set=live.update)], tmp_path / "c").wait_committed()
    before, live["sparse"] = live["sparse"], None
    ds.restore([PickledObjectProvider("o", get=lambda: live, set=live.update)], tmp_path / "c")
    assert torch.equal(live["sparse"].to_dense(), before.to_dense())


def test_restoring_waits_for_what_is_still_to_be_captured(tmp_path: Path) -> None:
    state = {"w": torch.zeros(3 << 20)}
    provider = from_state_dict("s", state)
    with ds.Checkpointer(tmp_path, host_cache="2MiB", block="1MiB") as checkpointer:
        checkpointer.snapshot([provider], step=1).wait_committed()
        state["w"].fill_(1)
        with held(until=GATE):
            later = checkpointer.snapshot([provider], step=2)
            checkpointer.restore([provider], step=1)
        later.wait_committed()
    assert (state["w"] == 0).all()
    assert (ds.load(tmp_path)["s"]["w"] == 1).all()


def test_not_strict_leaves_an_optimizer_of_other_groups_alone(tmp_path: Path) -> None:
    def optimizer(count: int) -> torch.optim.Optimizer:
        made = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2)) for _ in range(count)])
        made.param_groups[0]["params"][0].grad = torch.ones(2)
        made.step()
        return made

    other = from_state_dict("other", {"w": torch.ones(2)})
    ds.snapshot([from_stateful("o", optimizer(2)), other], tmp_path / "c").wait_committed()
    live = optimizer(1)
    before = copy.deepcopy(live.state_dict())
    result = ds.restore([from_stateful("o", live), other], tmp_path / "c", strict=False)
    assert list(result.mismatched_keys) == ["o/param_groups"]
    assert equal(live.state_dict(), before)


def test_a_module_with_load_hooks_gets_them(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    ds.snapshot([from_stateful("m", module)], tmp_path / "c").wait_committed()
    seen: list[object] = []
    module.register_load_state_dict_post_hook(lambda *arguments: seen.append(arguments))
    ds.restore([from_stateful("m", module)], tmp_path / "c")
    assert seen


def test_inference_tensors_are_restored(tmp_path: Path) -> None:
    path = saved({"t": torch.arange(6.0).reshape(2, 3)}, tmp_path / "c")
    with torch.inference_mode():
        live = torch.zeros(3, 2).t()
    ds.restore([from_state_dict("s", {"t": live})], path)
    assert torch.equal(live, torch.arange(6.0).reshape(2, 3))


def test_numpy_and_torch_over_one_memory_come_back_as_they_were(tmp_path: Path) -> None:
    tensor = torch.arange(5.0)
    state = {"t": tensor, "n": tensor.numpy()}
    assert equal(ds.load(saved(state, tmp_path / "c"))["s"], state)


@pytest.mark.parametrize(
    "change",
    [
        {"global_shape": (4,), "offset": (3,)},
        {"buffer_offset": -4},
        {"shape": (-1,)},
        {"kind": "mxnet"},
        {"offset": None, "flat": (0, 5)},
        {"buffer_offset": 4},
    ],
)
def test_a_shard_that_no_reader_would_take_is_not_written(change: dict[str, Any], tmp_path: Path) -> None:
    class Wrong(HostTensorProvider):
        def shards(self) -> list[ds.Shard]:
            return [dataclasses.replace(shard, **change) for shard in super().shards()]

    with pytest.raises(ProviderError):
        ds.snapshot([Wrong("w", {"a": torch.ones(2)})], tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_sparse_buffers_restore_through_live_containers(tmp_path: Path) -> None:
    live = {"coo": torch.eye(3).to_sparse(), "w": torch.ones(2)}
    path = saved(live, tmp_path / "c")
    other = {"coo": torch.zeros(3, 3).to_sparse(), "w": torch.zeros(2)}
    ds.restore([from_state_dict("s", other)], path)
    assert torch.equal(other["coo"].to_dense(), torch.eye(3))


def test_objects_that_want_real_tensors_when_built_are_pickled_with_them(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    expected = torch.Generator().manual_seed(5)
    path = saved({"g": generator}, tmp_path / "c")
    loaded = ds.load(path, trust="all")["s"]["g"]
    assert torch.equal(torch.rand(3, generator=loaded), torch.rand(3, generator=expected))


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_array_subclasses_load_with_trust(tmp_path: Path) -> None:
    path = saved({"m": np.matrix([[1.0, 2.0]])}, tmp_path / "c")
    with pytest.raises(TrustError, match="matrix"):
        ds.load(path)
    loaded = ds.load(path, trust="all")["s"]["m"]
    assert type(loaded) is np.matrix
    assert loaded.tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("data", [b"", b"junk", pickle.dumps([1]), pickle.dumps([1], 2) + b".", "text", None])
def test_serialize_must_return_the_dialect(data: Any, tmp_path: Path) -> None:
    class Wrong(ds.StateProvider):
        def shards(self) -> list[ds.Shard]:
            return [ds.object_shard("a")]

        def serialize(self, shard: ds.Shard) -> bytes:
            return data  # type: ignore[no-any-return]

    with pytest.raises(ProviderError, match=r"'q/a'.*datastates\.dumps"):
        ds.snapshot([Wrong("q")], tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [-1, "3", 2.5, True, None, 10**18])
def test_steps_that_are_none(step: Any, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError), match="step: "):
        ds.snapshot([], tmp_path / "c", step=step)
    with ds.Checkpointer(tmp_path / "run") as checkpointer, pytest.raises((TypeError, ValueError), match="step: "):
        checkpointer.snapshot([], step=step)


def test_a_step_may_be_any_integer(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path) as checkpointer:
        checkpointer.snapshot([], step=np.int64(4))  # type: ignore[arg-type]
    assert checkpointer.steps() == [4]


@pytest.mark.parametrize(
    "providers", [torch.nn.Linear(1, 1), {"a": 1}, [torch.ones(1000)], HostTensorProvider("a", {}), "ab"]
)
def test_what_is_no_list_of_providers_is_said_so(providers: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="providers: ") as caught:
        ds.snapshot(providers, tmp_path / "c")
    assert len(str(caught.value)) < 200


def test_a_path_that_is_no_text_is_restored_from(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    ds.snapshot([HostTensorProvider("s", {"a": np.arange(5.0)})], path, step=3).wait_committed()
    live = {"a": np.zeros(5)}
    assert ds.restore([HostTensorProvider("s", live)], path).step == 3
    assert live["a"].tolist() == [0, 1, 2, 3, 4]


def test_an_error_names_a_path_that_is_no_text(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    provider = HostTensorProvider("s", {"a": np.arange(5.0)})
    ds.snapshot([provider], path).wait_committed()
    file = path / container_name(0)
    _native.arm_fault("read", "fail", errno.EIO)
    try:
        with pytest.raises(StorageError) as failed:
            ds.restore([provider], path)
    finally:
        _native.clear_faults()
    assert (failed.value.errno, failed.value.filename) == (errno.EIO, str(file))
    begin = int(open_container(file).data_offset[0])
    with file.open("r+b") as damaged:
        damaged.seek(begin)
        damaged.write(b"\1")
    with pytest.raises(CorruptError) as corrupt:
        ds.restore([provider], path)
    assert (corrupt.value.key, corrupt.value.path) == ("s/a", str(file))


def test_nothing_of_the_comparison_is_left_to_the_garbage_collector(tmp_path: Path) -> None:
    path, live = saved(original(), tmp_path / "c"), original()
    gc.collect()
    gc.disable()
    try:
        ds.restore([from_state_dict("s", live)], path)
        assert not [each for each in gc.get_objects() if type(each) is ArrayRef]
    finally:
        gc.enable()


def test_providers_may_come_from_a_generator(tmp_path: Path) -> None:
    saved, live = {"w": torch.ones(5)}, {"w": torch.zeros(5)}
    path = tmp_path / "step-00000001"
    ds.snapshot((provider for provider in [HostTensorProvider("s", saved)]), path, step=1).wait_committed()
    for fallback in (False, True):
        live["w"].zero_()
        ds.restore((provider for provider in [HostTensorProvider("s", live)]), tmp_path, fallback=fallback)
        assert (live["w"] == 1).all()
