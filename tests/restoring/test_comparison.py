"""``compare`` tells what a restore would do, and changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import datastates as ds
from datastates.errors import CheckpointNotFoundError, RestoreError, TrustError
from datastates.providers import PickledObjectProvider, from_state_dict, from_stateful


class _Own:
    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Own, ()


def _state(fill: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((4,), fill), "head": torch.full((2, 2), fill), "old": torch.full((1,), fill)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    providers = [from_state_dict("s", _state(1.0)), from_stateful("optim", optimizer)]
    ds.snapshot(providers, tmp_path / "c", step=7).wait_committed()
    return tmp_path / "c"


def test_what_would_be_restored_cast_and_left(saved: Path) -> None:
    live = {"w": torch.zeros(4, dtype=torch.bfloat16), "head": torch.zeros(3, 2), "new": torch.zeros(1)}
    plan = ds.compare([from_state_dict("s", live)], saved, cast=True)
    assert (plan.path, plan.step, plan.fits) == (saved, 7, False)
    assert plan.restored_keys == ("s/w", "s")  # the object has what is no array
    assert plan.cast_keys == {"s/w": "float32 to bfloat16"}
    assert plan.missing_keys == ("s/new",)
    assert plan.unexpected_keys == ("s/old",)
    difference = "float32 of shape (2, 2) in the checkpoint, float32 of shape (3, 2) in the live state"
    assert plan.mismatched_keys == {"s/head": difference}
    assert not any(value.any() for value in live.values())
    assert str(plan).splitlines() == [
        f"{saved}, step 7",
        "  restored    s",
        "  cast        s/w  float32 to bfloat16",
        f"  mismatched  s/head  {difference}",
        "  missing     s/new  not in the checkpoint",
        "  unexpected  s/old  not in the live state",
    ]


def test_it_agrees_with_the_restore(saved: Path) -> None:
    live = _state(0.0)
    plan = ds.compare([from_state_dict("s", live)], saved, keys=["s/w", "s/h*"])
    assert plan.fits
    assert plan.nbytes == 32
    restored = ds.restore([from_state_dict("s", live)], saved, keys=["s/w", "s/h*"])
    assert list(plan.left_out_keys) == restored.left_out_keys == ["s/old"]
    assert plan.nbytes == restored.needed_nbytes


def test_renames_and_a_fresh_optimizer(saved: Path) -> None:
    fresh = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    providers = [from_state_dict("t", _state(0.0)), from_stateful("optim", fresh)]
    plan = ds.compare(providers, saved, rename={"s/": "t/"})
    assert plan.fits
    assert {"t/w", "t/head", "t/old", "optim"} < set(plan.restored_keys)
    assert not fresh.state
    ds.restore(providers, saved, rename={"s/": "t/"})
    assert fresh.state


def test_nothing_fits(saved: Path) -> None:
    plan = ds.compare([from_state_dict("other", _state(0.0))], saved)
    assert (plan.restored_keys, plan.missing_keys) == ((), ("other",))


def test_what_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        ds.compare([from_state_dict("s", _state(0.0))], tmp_path / "none")
    with pytest.raises(CheckpointNotFoundError, match="step 8"):
        ds.compare([from_state_dict("s", _state(0.0))], saved, step=8)
    with pytest.raises(RestoreError, match="nothing of the providers matches 'x'"):
        ds.compare([from_state_dict("s", _state(0.0))], saved, keys="x")
    loop = PickledObjectProvider("loop", _Own, print)
    ds.snapshot([loop], tmp_path / "loop").wait_committed()
    with pytest.raises(TrustError, match="_Own"):
        ds.compare([loop], tmp_path / "loop")
    assert ds.compare([loop], tmp_path / "loop", trust="all").restored_keys == ("loop",)


def test_a_generator_and_what_is_no_list(saved: Path) -> None:
    assert ds.compare((from_state_dict(name, _state(0.0)) for name in ["s"]), saved).fits  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a list of StateProviders is wanted"):
        ds.compare(from_state_dict("s", _state(0.0)), saved)  # type: ignore[arg-type]
