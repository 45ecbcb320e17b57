"""torch.distributed.checkpoint: parts of several ranks, metadata that is read without running code, damage by name."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import datastates as ds
from datastates.adapters.dcp import DataStatesStorageWriter
from datastates.cli import commands
from datastates.errors import CorruptError, DatastatesError, FormatError, StorageError, TrustError
from datastates.formats.dcp import ArchivedObject
from datastates.state.new_memory import AS_SAVED

SHARDED = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
whole = torch.arange(101 * 33.0).reshape(101, 33)
state = {f"cut{d}": distribute_tensor(whole, mesh, [Shard(d)]) for d in (0, 1)} | {"alike": whole, "epoch": 3}
dcp.save(state, checkpoint_id=sys.argv[1])
dist.destroy_process_group()
"""
WHOLE = torch.arange(101 * 33.0).reshape(101, 33)


@pytest.fixture(scope="module")
def sharded(module_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dcp") / "sharded"
    module_ranks(2, SHARDED, path)
    return path


def test_parts_of_several_ranks_are_put_together(sharded: Path, tmp_path: Path) -> None:
    names = {"cut0", "cut1", "alike"}
    with ds.open(sharded) as opened:
        assert set(opened) == names
        assert all(torch.equal(opened[name], WHOLE) for name in names)
        assert opened.digest("cut0") is not None  # each part is one run of the tensor
        assert opened.digest("cut1") is None
    found = ds.load(sharded)
    assert found.pop("epoch") == 3
    assert all(torch.equal(found[name], WHOLE) for name in names)
    done = ds.export(sharded, tmp_path / "out.safetensors")
    assert done.unproven == ("cut1",)
    assert done.objects == ("epoch",)
    assert all(torch.equal(tensor, WHOLE) for tensor in load_file(tmp_path / "out.safetensors").values())
    assert len(list(sharded.glob("*.distcp"))) == 2


@pytest.mark.parametrize(("name", "stored"), [("cut0", WHOLE[:51]), ("cut1", WHOLE[:, :17])])
def test_damage_of_a_part_is_found(
    sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, stored: torch.Tensor
) -> None:
    shutil.copytree(sharded, tmp_path / "copy")
    file = sorted((tmp_path / "copy").glob("*.distcp"))[0]
    data = bytearray(file.read_bytes())
    data[data.index(stored.contiguous().numpy().tobytes()) + 200] ^= 1
    file.write_bytes(data)
    assert commands.main(["verify", str(tmp_path / "copy")]) == 1
    assert capsys.readouterr().out.startswith(f"{name} in {file} does not match its checksum")
    with pytest.raises(CorruptError, match=name):
        ds.load(tmp_path / "copy")
    with ds.open(tmp_path / "copy") as opened, pytest.raises(CorruptError, match=name):
        opened[name]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {"w": torch.arange(6.0).reshape(2, 3), "step": 3, "list": [torch.ones(2), torch.zeros(1)]}
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    return tmp_path / "saved"


def change(folder: Path, how: Callable[[Any], object]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    how(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def place(metadata: Any, name: str) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return exec, (f"open({str(self.path)!r}, 'w')",)


def test_no_code_of_the_metadata_runs(saved: Path) -> None:
    change(saved, lambda m: setattr(m, "planner_data", Bomb(saved / "boom")))
    assert ds.load(saved)["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    (saved / ".metadata").write_bytes(pickle.dumps(Bomb(saved / "boom")))
    with pytest.raises(FormatError, match=r"\.metadata"):
        ds.open(saved)
    assert not (saved / "boom").exists()


def test_no_code_of_an_object_runs(tmp_path: Path) -> None:
    dcp.save({"bomb": Bomb(tmp_path / "boom"), "w": torch.ones(2)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    with ds.open(tmp_path / "saved") as opened:
        assert opened["w"].tolist() == [1, 1]
    with pytest.raises(TrustError, match=r"builtins\.exec"):
        ds.load(tmp_path / "saved")
    assert commands.main(["verify", str(tmp_path / "saved")]) == 0
    assert not (tmp_path / "boom").exists()


WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "elsewhere": (lambda m: setattr(place(m, "w"), "relative_path", "../saved/__0_0.distcp"), "no file beside it"),
    "beyond": (lambda m: setattr(place(m, "w"), "length", 2**40), "cut short"),
    "negative": (lambda m: setattr(place(m, "w"), "offset", -5), "__0_0.distcp"),
    "another place": (lambda m: setattr(place(m, "w"), "offset", 17), "'w'"),
    "a huge shape": (lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([2**40, 3])), "only a part"),
    "another shape": (lambda m: setattr(m.state_dict_metadata["w"].chunks[0], "sizes", torch.Size([3, 2])), "shape"),
    "another type": (lambda m: setattr(m.state_dict_metadata["w"].properties, "dtype", torch.float64), "type"),
    "unknown type": (lambda m: setattr(m.state_dict_metadata["w"].properties, "dtype", "x"), "element type"),
    "no chunks": (lambda m: m.state_dict_metadata["w"].chunks.clear(), "'w'"),
    "no place": (lambda m: m.storage_data.clear(), "no place"),
    "not described": (lambda m: m.state_dict_metadata.pop("w"), "'w'"),
    "a name that no file has": (lambda m: setattr(place(m, "w"), "relative_path", "__0\0.distcp"), "cannot be"),
    "a text for a size": (lambda m: setattr(m.state_dict_metadata["w"].chunks[0], "sizes", ("a", 3)), "shape"),
    "more dimensions": (lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([2, 3, 1])), "shape"),
    "a missing file": (lambda m: setattr(place(m, "w"), "relative_path", "__7_0.distcp"), "__7_0.distcp"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_metadata_is_refused(saved: Path, wrong: str) -> None:
    how, what = WRONG[wrong]
    change(saved, how)
    with pytest.raises((FormatError, StorageError, DatastatesError), match=what):
        dict(ds.open(saved))


def test_an_extension_blocks_no_other_tensor(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(saved, lambda m: setattr(place(m, "w"), "transform_descriptors", ["zstd"]))
    with ds.open(saved) as opened:
        assert "w" not in opened
        assert opened["list.0"].tolist() == [1, 1]
    with pytest.raises(FormatError, match=r"'w' in .*extension"):
        ds.load(saved)
    assert commands.main(["inspect", str(saved)]) == 0
    assert ["w", "object"] in [line.split()[:2] for line in capsys.readouterr().out.splitlines()]


class Marked(torch.Tensor):
    """A subclass without attributes."""


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_what_is_no_plain_tensor_blocks_no_other(tmp_path: Path) -> None:
    odd = {
        "quantized": torch.quantize_per_tensor(torch.arange(3.0), 0.1, 0, torch.qint8),
        "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
        "subclass": torch.ones(3).as_subclass(Marked),
    }
    dcp.save(odd | {"w": torch.ones(2)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    with ds.open(tmp_path / "saved") as opened:
        assert list(opened) == ["w"]
        assert opened["w"].tolist() == [1, 1]
    assert sorted(ds.export(tmp_path / "saved", tmp_path / "w.safetensors", keys="*").objects) == sorted(odd)
    assert commands.main(["verify", str(tmp_path / "saved")]) == 0
    with pytest.raises(TrustError, match="Marked"):
        ds.load(tmp_path / "saved")
    found = ds.load(tmp_path / "saved", trust="all")
    assert all(torch.equal(found[key], value) and type(found[key]) is type(value) for key, value in odd.items())


@pytest.mark.by_hand
def test_every_flip_in_the_metadata_is_refused_or_reads_the_same(saved: Path) -> None:
    whole = (saved / ".metadata").read_bytes()
    expected = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    for at in range(0, len(whole), 3):
        (saved / ".metadata").write_bytes(whole[:at] + bytes([whole[at] ^ 8]) + whole[at + 1 :])
        try:
            found = ds.load(saved)
        except DatastatesError:
            continue
        assert "w" not in found or found["w"].tolist() == expected


def test_without_torch_tensors_are_arrays(saved: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import datastates as ds\n"
        "found = ds.load(sys.argv[1])\n"
        "print(found['w'].tolist(), found['step'], found['list.0'].tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, saved], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] 3 [1.0, 1.0]\n"


def test_diff_compares_objects(tmp_path: Path) -> None:
    for name, bomb, step in (("a", "boom", 1), ("b", "boom", 1), ("c", "boom", 2), ("d", "bang", 1)):
        state = {"w": torch.ones(2), "bomb": Bomb(tmp_path / bomb), "step": step}
        dcp.save(state, checkpoint_id=tmp_path / name, no_dist=True)
    a, b, c, d = (str(tmp_path / name) for name in "abcd")
    assert commands.main(["diff", a, b]) == 0
    assert commands.main(["diff", a, c]) == 1
    assert commands.main(["diff", a, d]) == 1
    assert not (tmp_path / "boom").exists()


def test_tied_tensors_are_read_as_from_torchs_own_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weight, matrix = torch.arange(300.0), torch.arange(35).reshape(7, 5).t()
    tied = {"a": weight, "b": weight, "c": torch.nn.Parameter(weight), "d": matrix, "e": matrix, "z": torch.ones(2)}
    dcp.save({"m": tied}, storage_writer=DataStatesStorageWriter(tmp_path / "ours"), no_dist=True)
    dcp.save({"m": tied}, checkpoint_id=tmp_path / "stock", no_dist=True)
    paths = [str(tmp_path / name) for name in ("ours", "stock")]
    ours, stock = map(ds.load, paths)
    assert list(ours) == list(stock)
    for found in (ours, stock):
        assert all(torch.equal(found[f"m.{key}"], tensor) for key, tensor in tied.items())
        assert len({array.untyped_storage().data_ptr() for array in found.values()}) == len(tied)
    assert all(ours[key].stride() == stock[key].stride() and type(ours[key]) is type(stock[key]) for key in stock)
    arrays = ds.load(paths[0], framework="np")
    assert all(np.array_equal(arrays[key], stock[key]) for key in stock)
    assert not np.shares_memory(arrays["m.a"], arrays["m.b"])
    one, two = map(ds.open, paths)
    with one, two:
        assert all(torch.equal(one[key], two[key]) and one.digest(key) == two.digest(key) for key in stock)
    assert commands.main(["diff", *paths]) == 0
    assert ds.export(paths[0], tmp_path / "out.safetensors").tied == {"m.b": "m.a", "m.c": "m.a", "m.e": "m.d"}
    for path in paths:
        capsys.readouterr()
        assert commands.main(["verify", path]) == 0
        assert "every tensor matches its checksum" in capsys.readouterr().out


def test_a_part_and_a_whole_tensor_of_one_memory(tmp_path: Path) -> None:
    half = torch.arange(6.0)
    dcp.save({"w": half, "whole": half}, storage_writer=DataStatesStorageWriter(tmp_path / "saved"), no_dist=True)

    def lengthen(metadata: Any) -> None:
        """Make "w" a tensor of 12 elements whose two parts are the same bytes."""
        first = metadata.state_dict_metadata["w"].chunks[0]
        second = replace(first, offsets=torch.Size([6]))
        metadata.state_dict_metadata["w"].size = torch.Size([12])
        metadata.state_dict_metadata["w"].chunks.append(second)
        (index,) = (index for index in metadata.storage_data if index.fqn == "w")
        metadata.storage_data[replace(index, offset=torch.Size([6]), index=1)] = metadata.storage_data[index]

    change(tmp_path / "saved", lengthen)
    found = ds.load(tmp_path / "saved")
    assert torch.equal(found["w"], torch.cat([half, half]))
    assert torch.equal(found["whole"], half)
    with ds.open(tmp_path / "saved") as opened:
        assert torch.equal(opened["w"], found["w"])
    assert commands.main(["verify", str(tmp_path / "saved")]) == 0


def at_the_place_of(there: str, key: str, metadata: Any) -> None:
    metadata.storage_data[next(index for index in metadata.storage_data if index.fqn == key)] = place(metadata, there)


@pytest.mark.parametrize(
    ("key", "what"), [("other", "'other' in .*__0_0.distcp: .*shape"), ("step", "__0_0.distcp: the object 'step'")]
)
def test_what_cannot_be_at_the_place_of_a_tensor_is_refused(tmp_path: Path, key: str, what: str) -> None:
    state = {"w": torch.ones(2, 3), "other": torch.ones(6), "step": {3}}
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    change(tmp_path / "saved", partial(at_the_place_of, "w", key))
    with pytest.raises(FormatError, match=what):
        ds.open(tmp_path / "saved")


def test_tensors_of_an_object_share_their_storage(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    torch.save([whole, whole[2:]], tmp_path / "object.pt")
    first, second = ArchivedObject(tmp_path / "object.pt", 0, (tmp_path / "object.pt").stat().st_size).load(
        (), AS_SAVED
    )
    second[0] = 9
    assert first[2] == 9
