"""The metadata of safetensors travels with the tensors, or is named where the target has no place for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command import run_json
from safetensors import safe_open
from safetensors.torch import save_file

import datastates as ds
from datastates.cli import commands

TENSORS = {"a": torch.arange(2000.0), "b": torch.ones(3, dtype=torch.int8)}
TEXTS = {"format": "mlx", "w": '{"scale": [1]}', "caf\u00e9": "\u00fc" * 200, "empty": ""}


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        found: dict[str, str] = file.metadata()
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "source.safetensors", TEXTS)
    return tmp_path / "source.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files, an index, and a text of which each file has its own."""
    made = tmp_path / "source"
    made.mkdir()
    names = {key: f"model-0000{i}-of-00002.safetensors" for i, key in enumerate(TENSORS, start=1)}
    for key, name in names.items():
        save_file({key: TENSORS[key]}, made / name, {**TEXTS, "own": key})
    said = {"total_size": 8003, "merged_by": "a tool", "layers": 2}
    (made / "model.safetensors.index.json").write_text(json.dumps({"metadata": said, "weight_map": names}))
    return made


def test_it_travels_from_file_to_file(file: Path, tmp_path: Path) -> None:
    done = ds.export(file, tmp_path / "out.safetensors")
    assert metadata_of(tmp_path / "out.safetensors") == TEXTS
    assert done.metadata == ()
    ds.export(file, tmp_path / "part.safetensors", keys="b", rename={"b": "c"})
    assert metadata_of(tmp_path / "part.safetensors") == TEXTS


def test_it_travels_into_all_files_of_a_folder_and_its_index(folder: Path, tmp_path: Path) -> None:
    done = ds.export(folder, tmp_path / "out", shard_size="4KB")
    assert len(done.files) == 2
    assert all(metadata_of(tmp_path / "out" / name) == TEXTS for name in done.files)
    said = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["metadata"]
    assert said == {"total_size": 8003, "merged_by": "a tool", "layers": 2}
    assert done.metadata == ("own",)


@pytest.mark.parametrize("target", ["out.safetensors", "out"])
def test_that_of_an_index_goes_into_the_only_file(target: str, folder: Path, tmp_path: Path) -> None:
    ds.export(folder, tmp_path / target)
    file = tmp_path / target if target != "out" else tmp_path / "out" / "model.safetensors"
    assert metadata_of(file) == {**TEXTS, "merged_by": "a tool", "layers": "2"}


def test_what_a_torch_file_has_no_place_for_is_named(
    file: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(ds.export(file, tmp_path / "a.pt").metadata) == TEXTS.keys() - {"format"}
    assert commands.main(["export", str(folder), str(tmp_path / "b.pt")]) == 0
    said = capsys.readouterr().out
    for name in ("w", "merged_by", "own"):
        assert f"\n{name}: this metadata of the source has no place in the target, and is left out\n" in f"\n{said}"
    assert "format" not in said
    status, found = run_json(capsys, "export", folder, tmp_path / "c.pt")
    assert (status, found["metadata"][-1]) == (0, "own")


def test_it_is_shown(file: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ds.open(file) as opened:
        assert opened.metadata == TEXTS
    with ds.open(folder) as opened:
        assert opened.metadata == TEXTS
    assert commands.main(["inspect", str(folder)]) == 0
    said = capsys.readouterr().out
    assert '\nmetadata w: {"scale": [1]}\n' in said
    assert "... (200 characters)\n" in said
    assert "\nmetadata merged_by: a tool\n" in said
    assert "\nmetadata own: differs from file to file\n" in said
    _, found = run_json(capsys, "inspect", folder)
    assert (found["metadata"], found["index_metadata"]) == (TEXTS, {"merged_by": "a tool", "layers": 2})


def test_other_sources_have_none(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "a.pt")
    ds.export(tmp_path / "a.pt", tmp_path / "a.safetensors")
    assert metadata_of(tmp_path / "a.safetensors") == {"format": "pt"}
    with ds.open(tmp_path / "a.pt") as opened:
        assert opened.metadata == {}
