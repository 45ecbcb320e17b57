"""The seam for a tensor whose bytes lie in another checkpoint: ``Stored.placed``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import datastates as ds
from datastates._base.columns import I64
from datastates.commit.manifest import container_name
from datastates.container.file import Container, open_container
from datastates.errors import CorruptError
from datastates.providers import from_state_dict
from datastates.reading.stored import Stored
from datastates.reading.tensors import Held
from datastates.storage import Location

STATE = {"w": torch.arange(5000.0), "b": torch.arange(7.0)}


def restored(path: Path) -> dict[str, Any]:
    live = {key: torch.zeros_like(array) for key, array in STATE.items()}
    ds.restore([from_state_dict("s", live)], path, verify="digest")
    return live


def exported(path: Path) -> dict[str, Any]:
    ds.export(path, path / "new.safetensors")
    return load_file(path / "new.safetensors")


def opened(path: Path) -> dict[str, Any]:
    with ds.open(path) as checkpoint:
        return {key.removeprefix("s/"): checkpoint[key] for key in checkpoint}


READ: dict[str, Callable[[Path], dict[str, Any]]] = {
    "restore": restored,
    "open": opened,
    "export": exported,
    "load": lambda path: ds.load(path)["s"],
}


@pytest.mark.parametrize("how", READ)
def test_a_tensor_is_read_from_an_older_checkpoint(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("older", "newer"):
        ds.snapshot([from_state_dict("s", STATE)], tmp_path / name).wait_committed()
    older, newer = (open_container(Location(tmp_path / name / container_name(0))) for name in ("older", "newer"))
    row = newer.shards.row(newer.shards.by_key["s/w"])
    with Path(newer.path).open("r+b") as file:  # as if its bytes had not been saved again
        file.seek(int(newer.data_offset[row.record]) + row.offset)
        file.write(bytes(STATE["w"].nbytes))
    with pytest.raises(CorruptError):
        READ[how](tmp_path / "newer")

    def placed(stored: Stored, container: Container, part: I64, row: I64) -> list[Held]:
        if container.path != newer.path:
            return [Held(container, part, row)]
        moved = row == newer.shards.by_key["s/w"]
        there = np.full(int(moved.sum()), older.shards.by_key["s/w"])
        return [Held(newer, part[~moved], row[~moved]), Held(older, part[moved], there)]

    monkeypatch.setattr(Stored, "placed", placed)
    read = READ[how](tmp_path / "newer")
    assert {key: array.tolist() for key, array in read.items()} == {key: array.tolist() for key, array in STATE.items()}
