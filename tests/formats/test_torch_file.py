"""Files of torch.save: what torch.load returns, without running code, and every record against its checksum."""

from __future__ import annotations

import collections
import io
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from memory_folders import MemoryFolders
from values import KINDS, Own, equal, flat, state

import datastates as ds
from datastates.cli import commands
from datastates.errors import DatastatesError, FormatError, RestoreError, TrustError
from datastates.formats import torch_file
from datastates.providers import from_stateful
from datastates.storage import Location, stores


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.save(state(), tmp_path / "state.pt")
    return tmp_path / "state.pt"


def test_load_gives_what_torch_load_gives(file: Path) -> None:
    found, expected = ds.load(file), torch.load(file, weights_only=False)
    flattened = flat(expected)
    assert list(flat(found)) == list(flattened)
    for key, value in flat(found).items():
        if isinstance(value, torch.Tensor):
            assert type(value) is type(flattened[key]), key
            assert (value.dtype, value.layout) == (flattened[key].dtype, flattened[key].layout), key
            assert value.is_sparse or value.stride() == flattened[key].stride(), key
            assert torch.equal(value.to_dense(), flattened[key].to_dense()), key
        else:
            assert np.array_equal(value, flattened[key]), key
    assert found["parameter"].requires_grad
    found["tied"][0][5] = 100  # views share their memory, as they did
    assert found["tied"][1][0] == 100


def test_open_gives_each_tensor_by_the_keys_of_a_state_dict(file: Path) -> None:
    tensors = {k: v for k, v in flat(state()).items() if isinstance(v, torch.Tensor) and not v.is_sparse}
    with ds.open(file) as opened:
        assert list(opened) == list(tensors)
        assert "optimizer/state/0/exp_avg" in opened
        assert {"odd~1name/0", "odd~1name/~20", "odd~1name/~4"} <= set(opened)
        for key, tensor in tensors.items():
            assert torch.equal(opened[key], tensor), key
        assert opened.digest("half") is not None
        assert opened.digest("tied/1") is None


def test_export_names_what_is_no_tensor(file: Path, tmp_path: Path) -> None:
    done = ds.export(file, tmp_path / "out")
    assert done.objects == ("optimizer", "numpy", "nothing", "step", "sparse")
    assert ds.export(file, tmp_path / "model", keys="model/*").objects == ()


@pytest.mark.parametrize("how", ["open", "load", "verify", "inspect", "diff"])
def test_no_code_of_a_file_runs(tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return exec, (f"open({str(tmp_path / 'boom')!r}, 'w')",)

    path = tmp_path / "bomb.pt"
    torch.save({"w": torch.ones(3), "bomb": Bomb()}, path)
    if how == "load":
        with pytest.raises(TrustError, match=r"builtins\.exec"):
            ds.load(path)
    elif how == "open":
        with ds.open(path) as opened:
            assert opened["w"].tolist() == [1, 1, 1]
    else:
        assert commands.main([how, str(path), *[str(path)][: how == "diff"]]) in (0, 1)
    assert not (tmp_path / "boom").exists()


def test_a_class_is_built_with_trust_only(tmp_path: Path) -> None:
    torch.save({"own": Own(torch.ones(3))}, tmp_path / "own.pt")
    with pytest.raises(TrustError):
        ds.load(tmp_path / "own.pt")
    made = ds.load(tmp_path / "own.pt", trust=[f"{Own.__module__}.Own"])["own"]
    assert made.w.tolist() == [1, 1, 1]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_plain_pickle_is_named(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "other.pt"
    path.write_bytes(pickle.dumps({"w": 1}, protocol))
    with pytest.raises(FormatError, match="plain pickle"):
        ds.load(path)


@pytest.mark.parametrize("value", ["in a dict", "alone"])
def test_a_module_that_was_saved_whole_is_named(value: str, tmp_path: Path) -> None:
    module, path = torch.nn.Linear(2, 2), tmp_path / "whole.pt"
    torch.save({"model": module, "epoch": 3} if value == "in a dict" else module, path)
    told = r"whole\.pt.*is saved whole, as an object of torch\.nn\.modules\.linear\.Linear.*save its state_dict"
    with pytest.raises(FormatError, match=told):
        ds.export(path, tmp_path / "e.safetensors")
    with pytest.raises(RestoreError, match=told):
        ds.restore([from_stateful("model", module)], path)


def test_a_file_without_tensors_exports_nothing(tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "none.pt")
    with pytest.raises(FormatError, match=r"none\.pt: there is no tensor to export$"):
        ds.export(tmp_path / "none.pt", tmp_path / "e.safetensors")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript_is_named(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "script.pt")
    with pytest.raises(FormatError, match="TorchScript"):
        ds.load(tmp_path / "script.pt")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_it_is_read_through_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store, file = MemoryFolders(), io.BytesIO()
    monkeypatch.setitem(stores.KINDS, "", (lambda stage: store,) * 2)
    torch.save({"a": torch.arange(4)}, file)
    store.create(Location("/a.pt"), file.getvalue())
    assert list(torch_file.open(Location("/a.pt")).keys) == ["a"]
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), script := io.BytesIO())
    store.create(Location("/script.pt"), script.getvalue())
    with pytest.raises(FormatError, match="TorchScript"):
        torch_file.open(Location("/script.pt"))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:TypedStorage")
@pytest.mark.parametrize("protocol", range(1, 6))
@pytest.mark.parametrize("kind", KINDS)
def test_every_value_by_every_protocol(kind: str, protocol: int, tmp_path: Path) -> None:
    if kind == "numbers" and protocol == 1:
        pytest.skip("Python itself refuses to read an integer that is so long as a text")
    path = tmp_path / "kind.pt"
    torch.save({"it": KINDS[kind](), "w": torch.ones(3)}, path, pickle_protocol=protocol)
    stock = torch.load(path, weights_only=False)
    assert equal(ds.load(path), stock)
    with ds.open(path) as opened:
        assert opened["w"].tolist() == [1, 1, 1]
    assert ("it" in ds.export(path, tmp_path / "w.pt").objects) == (kind != "module")


class Strange:
    """It pickles as a type of NumPy with a state that no version of NumPy has."""

    def __reduce__(self) -> tuple[Any, ...]:
        return np.dtype, ("f4", False, True), ("of another version",)


def test_a_value_that_no_reader_builds_blocks_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"strange": Strange(), "w": torch.ones(3)}, tmp_path / "s.pt")
    with ds.open(tmp_path / "s.pt") as opened:
        assert opened["w"].tolist() == [1, 1, 1]
    assert commands.main(["inspect", str(tmp_path / "s.pt")]) == 0
    assert "strange" in capsys.readouterr().out
    with pytest.raises(FormatError, match=r"s\.pt"):
        ds.load(tmp_path / "s.pt")


@pytest.mark.parametrize("name", ["data/0", "data/3", "data.pkl", "version", "byteorder"])
def test_every_record_is_compared_with_its_checksum(file: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(file) as archive:
        info = archive.getinfo(f"state/{name}")
        data = archive.read(info)
    raw = bytearray(file.read_bytes())
    at = raw.index(data, info.header_offset)
    raw[at + len(data) // 2] ^= 4
    file.write_bytes(raw)
    assert commands.main(["verify", str(file)]) == 1
    said = capsys.readouterr()
    assert "checksum" in said.out + said.err or name == "byteorder"


def test_without_checksums_nothing_is_promised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(1000)}, tmp_path / "unchecked.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert commands.main(["verify", str(tmp_path / "unchecked.pt")]) == 0
    assert "there are no checksums" in capsys.readouterr().out
    assert ds.export(tmp_path / "unchecked.pt", tmp_path / "out").unproven == ("w",)


def rewritten(file: Path, to: Path, change: Callable[[bytes], bytes], method: int = zipfile.ZIP_STORED) -> Path:
    """A copy of an archive with another pickle."""
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(to, "w", method) as new:
        for info in old.infolist():
            data = old.read(info)
            new.writestr(info.filename, change(data) if info.filename.endswith("data.pkl") else data)
    return to


def test_a_compressed_archive_is_refused(file: Path, tmp_path: Path) -> None:
    made = rewritten(file, tmp_path / "z.pt", lambda data: data, zipfile.ZIP_DEFLATED)
    with pytest.raises(FormatError, match=r"z\.pt"):
        ds.open(made)


@pytest.mark.parametrize("behind", [b"\n", bytes(22), b"PK\5\6", b"x" * 60_000])
def test_bytes_behind_the_end_are_passed_over_as_by_torch(
    behind: bytes, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with file.open("ab") as opened:
        opened.write(behind)
    expected = torch.load(file, weights_only=False)["model"]
    assert equal(dict(ds.load(file)["model"]), dict(expected))
    assert commands.main(["verify", str(file)]) == 0
    assert "every tensor matches" in capsys.readouterr().out


@pytest.mark.parametrize("behind", [b"PK\5\6" + bytes(18), b"x" * 70_000])
def test_bytes_behind_the_end_that_torch_does_not_pass_over_are_refused(behind: bytes, file: Path) -> None:
    with file.open("ab") as opened:
        opened.write(behind)
    with pytest.raises(RuntimeError):
        torch.load(file, weights_only=False)
    with pytest.raises(FormatError, match=r"state\.pt"):
        ds.load(file)


def hostile(storage: int = 3, size: Any = (3,), stride: Any = (1,), offset: Any = 0, record: str = "0") -> bytes:
    """The pickle of a dict with one tensor, whatever its numbers are."""
    made = io.BytesIO()

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", torch.FloatStorage, record, "cpu", storage) if value is Pickler else None

    class Tensor:
        def __reduce__(self) -> Any:
            rebuild = torch._utils._rebuild_tensor_v2
            return rebuild, (Pickler, offset, size, stride, False, collections.OrderedDict())

    Pickler(made, 2).dump({"w": Tensor()})
    return made.getvalue()


@pytest.mark.parametrize(
    "numbers",
    [
        {"size": (2**40,)},
        {"size": (2**40,), "storage": 2**40},
        {"size": (2, 2), "stride": (2**61, 1)},
        {"size": (3,), "offset": 2**61},
        {"size": (2**62,), "stride": (0,)},
        {"size": (-3,)},
        {"size": (1,) * 70, "stride": (1,) * 70},
        {"record": "9"},
        {"size": (3,), "stride": (1, 1)},
        {"size": ("3",)},
    ],
)
@pytest.mark.parametrize("how", ["open", "load"])
def test_hostile_numbers_allocate_nothing(tmp_path: Path, numbers: dict[str, Any], how: str) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "good.pt")
    made = rewritten(tmp_path / "good.pt", tmp_path / "bad.pt", lambda _: hostile(**numbers))
    with pytest.raises(FormatError, match=r"bad\.pt"):
        getattr(ds, how)(made)


def test_a_nested_value_is_no_bomb(tmp_path: Path) -> None:
    value: Any = torch.ones(1)
    for _ in range(60):
        value = [value, value]
    value.append(value)
    torch.save({"w": value}, tmp_path / "bomb.pt")
    with ds.open(tmp_path / "bomb.pt") as opened:
        assert len(opened) < 200


def test_without_torch_tensors_are_arrays(file: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import datastates as ds\n"
        "with ds.open(sys.argv[1]) as opened:\n"
        "    print(opened['tied/1'].tolist(), opened['model/0.weight'].shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[float(n) for n in range(5, 20)]} (16, 8)\n"


@pytest.mark.parametrize("share", [0.2, 0.9, 0.99, 0.999])
def test_a_file_that_was_cut_short_is_named(file: Path, share: float) -> None:
    with file.open("r+b") as opened:
        opened.truncate(int(file.stat().st_size * share))
    with pytest.raises(FormatError, match=r"state\.pt.*cut short"):
        ds.load(file)


def test_each_byte_matters_or_does_not(tmp_path: Path) -> None:
    """A flipped bit anywhere is refused, or changes nothing that is read."""
    path = tmp_path / "small.pt"
    torch.save({"w": torch.arange(4.0), "n": 1}, path)
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        try:
            found = ds.load(path)
        except DatastatesError:
            continue
        assert found["n"] == 1
        assert found["w"].tolist() == [0, 1, 2, 3]


def test_diff_tells_which_objects_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, epoch in (("a", 1), ("b", 1), ("c", 2)):
        torch.save({"own": Own(torch.ones(3)), "epoch": epoch, "lr": [0.1]}, tmp_path / f"{name}.pt")
    a, b, c = (str(tmp_path / f"{name}.pt") for name in "abc")
    assert commands.main(["diff", a, b]) == 0
    assert commands.main(["diff", a, c]) == 1
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.endswith("differs")} == {
        "own",  # it is compared as stored: only its class could tell
        "epoch",
    }
