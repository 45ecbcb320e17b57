"""``map_location`` puts loaded tensors where ``torch.load`` puts them, but before they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from datastates.config import IoSettings
from datastates.errors import CorruptError
from datastates.files import torch_loads

SETTINGS = IoSettings(host_cache="8MiB", block="1MiB")
DEVICES = ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]


def load(path: Path, map_location: Any) -> Any:
    return torch_loads.load(path, SETTINGS, map_location, trust="all")


def forms(device: str) -> dict[str, Any]:
    return {
        "name": device,
        "device": torch.device(device),
        "names": {"cpu": device},
        "callable": lambda storage, location: storage.to(device=torch.device(device)),
        "callable that does not care": lambda storage, location: None,
        "other names": {"cuda:7": device},
        "nothing": None,
    }


@pytest.fixture
def file(tmp_path: Path, write_file: Any) -> Path:
    flat = torch.arange(300_000, dtype=torch.float32)
    state = {
        "module": {"a": flat[:1000].view(10, 100), "b": flat[1000:], "half": flat[:77].bfloat16(), "none": flat[:0]},
        "tied": flat[:1000].view(10, 100),
        "array": flat[:5].numpy().copy(),
        "step": 3,
    }
    path = tmp_path / "file.pt"
    write_file(path, state).wait_committed()
    return path


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", list(forms("cpu")))
def test_tensors_are_where_torch_puts_them(file: Path, device: str, form: str) -> None:
    map_location = forms(device)[form]
    found, expected = load(file, map_location), torch.load(file, map_location=map_location, weights_only=False)
    for name, tensor in expected["module"].items():
        assert found["module"][name].device == tensor.device
        assert torch.equal(found["module"][name], tensor)
        assert found["module"][name].stride() == tensor.stride()
    assert found["tied"].data_ptr() == found["module"]["a"].data_ptr()
    assert (found["array"] == expected["array"].cpu().numpy()).all()  # for torch it is a tensor
    assert found["step"] == 3


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_damaged_is_found_wherever_it_goes(file: Path, device: str) -> None:
    data = bytearray(file.read_bytes())
    data[500_000] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match="file/module/b"):
        load(file, device)


@pytest.mark.parametrize("wrong", [3, ["cpu"], object()])
def test_what_is_no_location_is_refused(file: Path, wrong: object) -> None:
    with pytest.raises(TypeError, match="map_location"):
        load(file, wrong)


def test_a_callable_is_asked_as_torch_asks_it(file: Path) -> None:
    asked: list[tuple[type, str]] = []

    def note(storage: Any, location: str) -> Any:
        asked.append((type(storage), location))
        return storage

    load(file, note)
    ours = list(asked)
    asked.clear()
    torch.load(file, map_location=note, weights_only=False)
    assert set(ours) == set(asked)
