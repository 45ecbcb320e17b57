"""``rename=`` matches arrays of a checkpoint to live arrays of other names."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates as ds
from datastates.errors import CorruptError, RestoreError
from datastates.providers import from_state_dict, from_stateful
from datastates.restoring.renaming import LiveKeys
from datastates.restoring.request import RestoreRequest


class _Net(torch.nn.Module):
    def __init__(self, names: tuple[str, ...] = ("first", "second"), fill: float = 0.0) -> None:
        super().__init__()
        for i, name in enumerate(names):
            self.add_module(name, torch.nn.Linear(3, 3))
            torch.nn.init.constant_(getattr(self, name).weight, fill * (i + 1))
            torch.nn.init.constant_(getattr(self, name).bias, -fill * (i + 1))


def _saved(path: Path, *providers: ds.StateProvider) -> Path:
    ds.snapshot(list(providers), path).wait_committed()
    return path


def _weights(module: torch.nn.Module) -> dict[str, float]:
    return {key: float(value.flatten()[0]) for key, value in module.state_dict().items()}


def test_a_prefix_of_keys(tmp_path: Path) -> None:
    path = _saved(tmp_path / "c", from_stateful("model", _Net(fill=1)))
    live = _Net(("encoder", "second"))
    restored = ds.restore(
        [from_stateful("model", live)], path, rename={"model/first.": "model/encoder."}, verify="digest"
    )
    assert _weights(live) == {"encoder.weight": 1, "encoder.bias": -1, "second.weight": 2, "second.bias": -2}
    assert not restored.unverified_keys
    assert restored.needed_nbytes == 4 * 2 * (9 + 3)


def test_a_pattern_and_a_provider_of_another_name(tmp_path: Path) -> None:
    optimizer = torch.optim.AdamW(_Net().parameters(), lr=0.5)
    path = _saved(tmp_path / "c", from_stateful("model", _Net(fill=1)), from_stateful("optim", optimizer))
    live, other = _Net(("l1", "l2")), torch.optim.AdamW(_Net().parameters(), lr=0.1)
    rename = {re.compile(r"^model/(first|second)"): lambda m: m}  # not a string
    with pytest.raises(TypeError, match=r"rename: .* is no string or pattern, and a string"):
        ds.restore([from_stateful("net", live)], path, rename=rename)  # type: ignore[dict-item]
    names = {re.compile(r"^model/first\b"): "net/l1", "model/second": "net/l2"}
    providers = [from_stateful("net", live), from_stateful("optim", other)]
    ds.restore(providers, path, rename=names)
    assert _weights(live) == {"l1.weight": 1, "l1.bias": -1, "l2.weight": 2, "l2.bias": -2}
    assert other.param_groups[0]["lr"] == 0.5  # no rename concerns it: it is restored as usual


def test_what_does_not_fit_is_named_and_nothing_changes(tmp_path: Path) -> None:
    path = _saved(tmp_path / "c", from_stateful("model", _Net(fill=1)))
    live = _Net(("encoder", "head"), fill=7)
    before = _weights(live)
    rename = {"model/first.": "model/encoder."}
    with pytest.raises(RestoreError) as caught:
        ds.restore([from_stateful("model", live)], path, rename=rename)
    assert caught.value.missing == ["model/head.weight", "model/head.bias"]
    assert caught.value.unexpected == ["model/second.weight", "model/second.bias"]
    assert _weights(live) == before
    restored = ds.restore([from_stateful("model", live)], path, rename=rename, strict=False)
    assert _weights(live) == {**before, "encoder.weight": 1, "encoder.bias": -1}
    assert restored.unexpected_keys == caught.value.unexpected
    ds.restore([from_stateful("model", live)], path, rename=rename, keys="model/encoder.*")


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"modle/": "model/"}, "no array of the checkpoint matches 'modle/'"),
        ({"model/first": "model/second"}, "'model/first.weight' and 'model/second.weight' would both be"),
    ],
)
def test_a_rename_that_cannot_be(rename: dict[str, str], message: str, tmp_path: Path) -> None:
    path = _saved(tmp_path / "c", from_stateful("model", _Net(fill=1)))
    with pytest.raises(RestoreError, match=message):
        ds.restore([from_stateful("model", _Net())], path, rename=rename)


def test_an_optimizer_is_not_renamed(tmp_path: Path) -> None:
    model = _Net(fill=1)
    optimizer = torch.optim.AdamW(model.parameters())
    model.first(torch.ones(3)).sum().backward()
    optimizer.step()
    path = _saved(tmp_path / "c", from_stateful("optim", optimizer))
    with pytest.raises(RestoreError, match="'other' can be restored only as a whole, under its own keys"):
        ds.restore([from_stateful("other", optimizer)], path, rename={"optim/": "other/"})


def test_tied_weights_of_which_one_was_saved(tmp_path: Path) -> None:
    path = _saved(tmp_path / "c", from_state_dict("w", {"embed": torch.ones(4)}))
    shared = torch.zeros(4)
    live = {"embed": shared, "head": shared, "apart": torch.zeros(4)}
    with pytest.raises(RestoreError) as caught:
        ds.restore([from_state_dict("m", live)], path, rename={"w/": "m/"})
    assert caught.value.missing == ["m/apart"]
    del live["apart"]
    ds.restore([from_state_dict("m", live)], path, rename={"w/": "m/"})
    assert shared.tolist() == [1, 1, 1, 1]


def test_values_that_are_no_arrays_stay(tmp_path: Path) -> None:
    path = _saved(tmp_path / "c", from_state_dict("a", {"w": torch.ones(2), "epoch": 3}))
    live: dict[str, Any] = {"w": torch.zeros(2, dtype=torch.bfloat16), "epoch": 9}
    restored = ds.restore([from_state_dict("b", live)], path, rename={"a/": "b/"}, cast=True)
    assert live["w"].tolist() == [1, 1]
    assert live["epoch"] == 9
    assert restored.cast_keys == {"b/w": "float32 to bfloat16"}


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    path = _saved(tmp_path / "c", from_state_dict("a", {"w": torch.ones(100_000)}))
    (file,) = path.glob("*.pt")
    data = bytearray(file.read_bytes())
    data[200_000] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match="a/w"):
        ds.restore([from_state_dict("b", {"w": torch.zeros(100_000)})], path, rename={"a/": "b/"})


def test_two_ranks_rename_alike_or_are_told(tmp_path: Path) -> None:
    path = _saved(tmp_path / "c", from_state_dict("a", {"x": torch.ones(2), "y": torch.ones(2), "z": torch.ones(2)}))
    live = [{"x": torch.zeros(2)}, {"y": torch.zeros(2)}]
    said: dict[tuple[int, str], ds.Restored | Exception] = {}

    def restore(rank: int, old: str, strict: bool) -> None:
        try:
            providers = [from_state_dict("b", live[rank])]
            said[rank, old] = ds.restore(providers, path, rename={old: "b/"}, strict=strict, rank=rank, world_size=2)
        except RestoreError as error:
            said[rank, old] = error

    def both(olds: tuple[str, str], strict: bool = True) -> list[Any]:
        said.clear()
        threads = [threading.Thread(target=restore, args=(r, old, strict)) for r, old in enumerate(olds)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [said[rank, old] for rank, old in enumerate(olds)]

    for error in both(("a/", "a")):
        assert "in different ways" in str(error)
    for error in both(("a/", "a/")):
        assert error.unexpected == ["b/z"]  # each of the others is wanted by one rank
    assert both(("a/", "a/"), strict=False)[1].unexpected_keys == ["b/z"]
    assert [float(next(iter(state.values()))[0]) for state in live] == [1, 1]


def test_live_keys() -> None:
    live = LiveKeys(["a/x", "a/y", "c/z"], {"a/x": "b/x"})
    assert live.stored == {"b/x": "a/x", "a/y": "a/y", "c/z": "c/z"}
    assert live.providers == {"a", "b"}


def test_requests_have_one_text_only_if_they_are_equal() -> None:
    renames: list[dict[Any, str]] = [
        {"a.b": "x"},
        {re.compile("a.b"): "x"},
        {re.compile("a.b", re.IGNORECASE): "x"},
        {"a": "x", re.compile("a"): "y"},
        {"a": "x"},
    ]
    assert len({RestoreRequest(rename=each).wish for each in renames}) == len(renames)


def test_a_pattern_of_bytes_and_a_group_that_is_not_there(tmp_path: Path) -> None:
    path = _saved(tmp_path / "c", from_state_dict("a", {"w": torch.ones(2)}))
    with pytest.raises(TypeError, match="rename: "):
        ds.restore([from_state_dict("a", {"w": torch.zeros(2)})], path, rename={re.compile(b"a"): "b"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"rename: '\\\\2' does not fit 'a'"):
        ds.restore([from_state_dict("a", {"w": torch.zeros(2)})], path, rename={re.compile("a"): r"\2"})
