"""A Checkpointer on, or beside, checkpoints that are not of its training run: it refuses, or says where they are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
safetensors = pytest.importorskip("safetensors.torch")

import datastates as ds  # noqa: E402 - after what may be missing
from datastates.errors import CheckpointNotFoundError, FormatError  # noqa: E402
from datastates.formats import recognise  # noqa: E402
from datastates.formats.seen import Seen  # noqa: E402
from datastates.providers import from_state_dict  # noqa: E402
from datastates.storage import Location  # noqa: E402

STATE = {"w": torch.arange(8.0)}


def save_dcp(path: Path) -> None:
    dcp.save(STATE, checkpoint_id=str(path), no_dist=True)


def save_megatron(path: Path) -> None:
    save_dcp(path)
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({}, path / "common.pt")


def save_weights(path: Path) -> None:
    path.mkdir()
    safetensors.save_file(STATE, path / "model.safetensors")


def save_trainer(path: Path) -> None:
    save_weights(path)
    (path / "trainer_state.json").write_text("{}")


def save_deepspeed(path: Path) -> None:
    (path / "global_step1").mkdir(parents=True)
    torch.save({}, path / "global_step1" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    (path / "latest").write_text("global_step1")


def save_lightning(path: Path) -> None:
    torch.save({"pytorch-lightning_version": "2.6.6", "state_dict": STATE}, path)


FORMATS: list[Callable[[Path], None]] = [
    save_dcp,
    save_megatron,
    save_weights,
    save_trainer,
    save_deepspeed,
    save_lightning,
    lambda path: torch.save(STATE, path),
    lambda path: safetensors.save_file(STATE, path),
]


def live() -> dict[str, Any]:
    return {"w": torch.zeros(8)}


@pytest.mark.parametrize("save", FORMATS)
def test_a_checkpoint_of_another_format_is_no_directory_of_checkpoints(
    save: Callable[[Path], None], tmp_path: Path
) -> None:
    save(tmp_path / "c")
    kind = recognise.recognise(Seen(Location(tmp_path / "c")))
    assert kind is not None
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"restore from this one by datastates\.restore\(providers, '") as refused:
        ds.Checkpointer(tmp_path / "c")
    assert f"directory: {tmp_path / 'c'} is {kind.NAME}: " in str(refused.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_the_refusal_advises_restores(tmp_path: Path) -> None:
    save_dcp(tmp_path / "c")
    state = live()
    ds.restore([from_state_dict("m", state)], str(tmp_path / "c"))
    assert torch.equal(state["w"], STATE["w"])


@pytest.mark.parametrize("save", [save_dcp, save_trainer, lambda path: torch.save(STATE, path)])
def test_checkpoints_of_others_in_the_directory_are_told(
    save: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "checkpoint-500")
    with caplog.at_level(logging.WARNING, "datastates"), ds.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore([from_state_dict("m", live())]) is None
        assert f"datastates.restore(providers, '{tmp_path / 'checkpoint-500'}') restores from it" in caplog.text
        caplog.clear()
        with pytest.raises(CheckpointNotFoundError, match=f"{tmp_path / 'checkpoint-500'} is a .*: give that path"):
            checkpointer.restore([from_state_dict("m", live())], step=500)
        checkpointer.snapshot([from_state_dict("m", live())], step=1).wait_committed()
        assert checkpointer.restore([from_state_dict("m", live())]) is not None
        assert caplog.text == ""
    with ds.Checkpointer(tmp_path) as checkpointer:  # it is a directory of checkpoints by now
        assert checkpointer.latest() == 1


def test_a_checkpoint_of_ours_under_another_name_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ds.snapshot([from_state_dict("m", live())], tmp_path / "final").wait_committed()
    with caplog.at_level(logging.WARNING, "datastates"), ds.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore([from_state_dict("m", live())]) is None
    assert f"{tmp_path / 'final'} is a checkpoint of datastates" in caplog.text
    for read in (ds.load, ds.open, lambda path: ds.restore([from_state_dict("m", live())], path)):
        with pytest.raises(CheckpointNotFoundError, match="final is a checkpoint of datastates: give that path"):
            read(tmp_path)


def test_an_absent_checkpoint_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"no committed checkpoint at .*nowhere, which does not exist$"):
        ds.load(tmp_path / "nowhere")
    (tmp_path / "step-00000010").mkdir()
    with pytest.raises(CheckpointNotFoundError, match=r"; step-00000010 has no manifest\.json$"):
        ds.load(tmp_path)
    with ds.Checkpointer(tmp_path) as checkpointer:
        for step in range(12):
            checkpointer.snapshot([from_state_dict("m", live())], step=step)
        checkpointer.wait()
        with pytest.raises(CheckpointNotFoundError, match=r", only of \.\.\., 4, 5, 6, 7, 8, 9, 10, 11$"):
            checkpointer.restore([from_state_dict("m", live())], step=99)


def test_a_name_that_means_the_folder_itself_is_none(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text(".")
    with pytest.raises(CheckpointNotFoundError):
        ds.load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "."}}')
    with pytest.raises(FormatError, match="is no index of weights"):
        ds.load(tmp_path)


def test_what_vanishes_is_not_advised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognise, "others", lambda root, known: {"gone": "a checkpoint"})
    with pytest.raises(CheckpointNotFoundError, match=r"no committed checkpoint at (?!.*give that path)"):
        ds.load(tmp_path)
