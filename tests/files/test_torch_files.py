"""Safetensors files that the engine writes: what the library itself would write, captured lazily."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hold import GATE, held

from datastates.errors import ProviderError, TornSnapshotError

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save  # noqa: E402

from datastates.files.settings import FileSettings  # noqa: E402
from datastates.files.torch_files import TorchFiles  # noqa: E402
from datastates.saving import gate  # noqa: E402
from datastates.saving.snapshot import Snapshot  # noqa: E402

PT = {"format": "pt"}


@pytest.fixture
def files() -> Iterator[TorchFiles]:
    made = TorchFiles(FileSettings(host_cache="2MiB", block="1MiB", on_error="warn"))
    yield made
    made.close()


def written(files: TorchFiles, tensors: dict[str, torch.Tensor], path: Path) -> Snapshot:
    snapshot = files.write_tensors(tensors, path, PT, lambda _, tensor: tensor.numel() >= 16)
    snapshot.wait_committed()
    return snapshot


def test_it_is_the_file_that_the_library_writes(files: TorchFiles, tmp_path: Path) -> None:
    table = torch.randn(600, 1000)
    for number in range(2):  # the second one takes the plan of the first
        tensors = {
            "layer.weight": torch.randn(1000, 700) + number,
            "layer/odd": torch.randn(3, 5).bfloat16(),
            "7": torch.arange(5),
            "mask": torch.ones(4097, dtype=torch.bool),
            "none": torch.empty(0, 3),
            "nothing": torch.empty(0),
            "scalar": torch.tensor(2.5, dtype=torch.float64),
            "upper": table[:300],
            "lower": table[300:],
            "permuted": table[:10].T,
        }
        path = tmp_path / str(number) / "model.safetensors"
        path.parent.mkdir()
        written(files, tensors, path)
        loaded = load_file(path)
        assert loaded.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert loaded[name].dtype == tensor.dtype
            assert torch.equal(loaded[name], tensor), name
        assert path.read_bytes() == save({name: t.contiguous() for name, t in tensors.items()}, metadata=PT)
        assert [entry.name for entry in path.parent.iterdir()] == ["model.safetensors"]


def test_no_tensors_at_all(files: TorchFiles, tmp_path: Path) -> None:
    written(files, {}, tmp_path / "empty.safetensors")
    assert (tmp_path / "empty.safetensors").read_bytes() == save({}, metadata=PT)


def test_an_update_waits_for_the_capture_of_what_is_lazy(files: TorchFiles, tmp_path: Path) -> None:
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 1024)).sum().backward()
    seen = torch.zeros(1)  # not lazy: it may change at once
    expected = {"w": model.weight.detach().clone(), "seen": seen.clone()}
    tensors = {"w": model.weight.detach(), "seen": seen}
    with held(until=GATE):
        snapshot = files.write_tensors(tensors, tmp_path / "file", PT, lambda name, _: name == "w")
        seen += 1
        assert not snapshot.captured
        optimizer.step()  # it waits: what was saved is what was there before
    snapshot.wait_persisted()
    loaded = load_file(tmp_path / "file")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    assert not torch.equal(loaded["w"], model.weight)


@pytest.mark.parametrize("before", [8, 3], ids=["on a word", "between words"])
def test_what_is_changed_before_its_capture_is_named(before: int, files: TorchFiles, tmp_path: Path) -> None:
    weight = torch.zeros(1024, 1025)
    tensors = {"a": torch.zeros(before), "net.weight": weight, "z": torch.zeros(1024, 1024)}
    with held():
        snapshot = files.write_tensors(tensors, tmp_path / "file", PT, lambda *_: True)
        weight.data[-1] += 1  # torch's counter does not see it
    gate.pass_all()
    with pytest.raises(TornSnapshotError, match=r"net\.weight"):
        snapshot.wait_persisted()
    assert list(tmp_path.iterdir()) == []


def test_what_the_format_cannot_hold_is_refused_by_name(files: TorchFiles, tmp_path: Path) -> None:
    shared = torch.ones(64)
    for tensors, hint in (
        ({"a": shared, "b": shared}, "'x/a' and 'x/b' share memory"),
        ({"a": torch.ones(64, dtype=torch.complex128)}, "'x/a' is of type complex128"),
        ({"__metadata__": torch.ones(64)}, "'x/__metadata__' cannot be named"),
        ({"a": torch.ones(64, device="meta")}, "'a' is not an array"),
    ):
        with pytest.raises(ProviderError, match=hint):
            written(files, tensors, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
