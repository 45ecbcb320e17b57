"""Files that this package writes for other frameworks are read alone, and in the folders of these frameworks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import datastates as ds
from datastates.container import file
from datastates.files.settings import FileSettings
from datastates.files.torch_files import TorchFiles
from datastates.formats import hugging_face, own
from datastates.formats.composite import TRAINER
from datastates.formats.recognise import recognise
from datastates.formats.seen import Seen
from datastates.storage import Location


def write(folder: Path, **states: object) -> None:
    files = TorchFiles(FileSettings(host_cache="8MiB", block="1MiB"))
    for name, state in states.items():
        suffix = ".bin" if name == "pytorch_model" else ".pt"
        files.write(name, state, folder / f"{name}{suffix}", lambda *_: False).wait_committed()
    files.close()


def test_the_index_of_a_single_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, optimizer={"w": torch.ones(300)})
    read: list[Location] = []
    read_index = file.read_index

    def note(path: Location, expected: int | None = None) -> file.EncodedIndex:
        read.append(path)
        return read_index(path, expected)

    monkeypatch.setattr(file, "read_index", note)
    opened = own.open(Location.of(tmp_path / "optimizer.pt"))
    assert [container.path for container in opened.files] == read == [Location.of(tmp_path / "optimizer.pt")]


def test_a_folder_of_weights_and_a_trainers(tmp_path: Path) -> None:
    model = torch.nn.Linear(300, 20)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    write(tmp_path, pytorch_model=model.state_dict(), optimizer=optimizer.state_dict())
    assert recognise(Seen(Location(tmp_path))) is hugging_face
    assert torch.equal(ds.load(tmp_path)["weight"], model.weight)
    (tmp_path / "trainer_state.json").write_text('{"global_step": 2}')
    assert recognise(Seen(Location(tmp_path))) is TRAINER
    with ds.open(tmp_path) as opened:
        assert opened.step == 2
        assert torch.equal(opened["weight"], model.weight)
        moment = optimizer.state_dict()["state"][0]["exp_avg"]
        assert torch.equal(opened["optimizer/state/0/exp_avg"], moment)
    assert ds.load(tmp_path)["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
