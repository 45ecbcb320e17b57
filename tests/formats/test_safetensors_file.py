"""safetensors: the attacks that the library tests, without torch, and folders whose index is wrong."""

from __future__ import annotations

import itertools
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_folders import MemoryFolders
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

import datastates as ds
from datastates.cli import commands
from datastates.errors import CheckpointNotFoundError, DatastatesError, FormatError
from datastates.formats import safetensors_file
from datastates.providers import from_state_dict
from datastates.storage import Location, stores


def entry(shape: list[int], *offsets: int, dtype: str = "U8") -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": offsets})


A = entry([4], 0, 4)
HOSTILE = {
    "overlap": (f'{{"a":{A},"b":{A}}}', 4),
    "hole": (f'{{"a":{A},"b":{entry([4], 8, 12)}}}', 12),
    "beyond the end": (f'{{"a":{A}}}', 3),
    "bytes of no tensor": (f'{{"a":{A}}}', 5),
    "a name twice": (f'{{"a":{A},"a":{A}}}', 4),
    "an overflowing shape": (f'{{"a":{entry([2**62, 8], 0, 4)}}}', 4),
    "another length than its shape": (f'{{"a":{entry([5], 0, 4)}}}', 4),
    "a negative offset": (f'{{"a":{entry([4], -4, 0)}}}', 4),
    "an unknown type": (f'{{"a":{entry([4], 0, 4, dtype="X8")}}}', 4),
    "a type that nothing here has": (f'{{"a":{entry([4], 0, 3, dtype="F6_E2M3")}}}', 3),
    "no JSON": ("{" * 10_000, 4),
    "no UTF-8": (b'{"\xff":' + A.encode() + b"}", 4),
    "metadata of numbers": (f'{{"__metadata__":{{"a":1}},"a":{A}}}', 4),
    "too many dimensions": (f'{{"a":{entry([1] * 65, 0, 1)}}}', 1),
    "offsets that fall": (f'{{"a":{entry([4], 4, 0)}}}', 4),
    "one offset": (f'{{"a":{entry([4], 0)}}}', 4),
    "three offsets": (f'{{"a":{entry([4], 0, 4, 4)}}}', 4),
    "an offset of 70 bits": (f'{{"a":{entry([4], 0, 2**70)}}}', 4),
    "zero below zero": (f'{{"a":{entry([0], 0, 0).replace("[0]", "[-0]")}}}', 0),
    "a length that is no integer": (f'{{"a":{entry([4], 0, 4).replace("[4]", "[4.0]")}}}', 4),
    "a length that is true": (f'{{"a":{entry([4], 0, 1).replace("[4]", "[true]")}}}', 1),
    "an overflow times zero": (f'{{"a":{entry([2**61, 8, 0], 0, 0)}}}', 0),
    "no type": ('{"a":{"shape":[4],"data_offsets":[0,4]}}', 4),
    "a type twice": (f'{{"a":{A.replace("{", """{"dtype":"U8",""")}}}', 4),
    "an unknown field": (f'{{"a":{A.replace("{", """{"x":1,""")}}}', 4),
    "metadata twice": (f'{{"__metadata__":{{}},"__metadata__":{{}},"a":{A}}}', 4),
    "half a character": (f'{{"\\ud800":{A}}}', 4),
    "a mark of byte order": (f'\ufeff{{"a":{A}}}', 4),
    "a list": ("[]", 0),
    "more behind the object": (f'{{"a":{A}}}x', 4),
    "no tensor, but bytes": ("{}", 4),
}


def write(path: Path, header: str | bytes, nbytes: int) -> None:
    text = header.encode() if isinstance(header, str) else header
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(nbytes))


@pytest.mark.parametrize("attack", HOSTILE)
@pytest.mark.parametrize("name", ["a.safetensors", "a.bin"])
def test_a_hostile_header_is_refused(tmp_path: Path, attack: str, name: str) -> None:
    write(tmp_path / name, *HOSTILE[attack])
    with pytest.raises(FormatError, match=name):
        ds.open(tmp_path / name)


def test_what_the_library_refuses_is_refused(tmp_path: Path) -> None:
    """Each byte of a header in turn is replaced by each of these."""
    path, refused = tmp_path / "a.safetensors", 0
    header = f'{{"__metadata__":{{"k":"v"}},"a":{A},"b":{entry([2], 4, 12, dtype="F32")},"c":{entry([0], 12, 12)}}}'
    for at, byte in itertools.product(range(len(header)), b'-019,[]{}".e \\\xff\0'):
        text = header.encode()
        write(path, text[:at] + bytes([byte]) + text[at + 1 :], 12)
        try:
            with safe_open(path, "np"):
                pass
        except SafetensorError:
            refused += 1
            with pytest.raises(FormatError, match=r"a\.safetensors"):
                safetensors_file.open_file(Location(path))
    assert refused > 1000


def test_it_is_read_through_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store, path = MemoryFolders(), Location("/a.safetensors")
    monkeypatch.setitem(stores.KINDS, "", (lambda stage: store,) * 2)
    store.create(path, save({"a": torch.arange(4)}))
    file = safetensors_file.open_file(path)
    assert bytes(file.read_row(file.shards.row(0))) == torch.arange(4).numpy().tobytes()


@pytest.mark.long
@pytest.mark.parametrize("length", [0, 2, 1 << 31, 1 << 40, 2**64 - 1])
def test_a_hostile_length_allocates_nothing(tmp_path: Path, length: int) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    code = (
        "import resource, sys, datastates as ds\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 31, 1 << 31))\n"
        "try: print(len(ds.open(sys.argv[1])))\n"
        "except ds.errors.FormatError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert (done.stdout.strip() == "0") if length == 2 else (str(path) in done.stdout), done.stdout


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").touch()
    with pytest.raises(FormatError, match=r"a\.safetensors"):
        ds.load(tmp_path / "a.safetensors")


def test_types_that_only_some_libraries_have(tmp_path: Path) -> None:
    made = {
        "scale": torch.ones(4).to(torch.float8_e8m0fnu),
        "low": torch.arange(4.0).to(torch.float8_e4m3fn),
        "complex": torch.ones(2, dtype=torch.complex64),
    }
    save_file(made, tmp_path / "a.safetensors")
    read = ds.load(tmp_path / "a.safetensors")
    assert {k: v.dtype for k, v in read.items()} == {k: v.dtype for k, v in made.items()}
    assert all(read[k].view(torch.uint8).tolist() == v.view(torch.uint8).tolist() for k, v in made.items())


def test_without_torch_tensors_are_arrays(tmp_path: Path) -> None:
    made = {"b": torch.arange(5, dtype=torch.bfloat16), "f": torch.arange(6.0).reshape(2, 3)}
    save_file(made, tmp_path / "model.safetensors")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import datastates as ds\n"
        "found = ds.load(sys.argv[1])\n"
        "with ds.open(sys.argv[1]) as opened: assert (opened['f'] == found['f']).all()\n"
        "print({k: (str(v.dtype), v.tolist()) for k, v in found.items()})\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert eval(done.stdout) == {"b": ("bfloat16", [0, 1, 2, 3, 4]), "f": ("float32", [[0, 1, 2], [3, 4, 5]])}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in (1, 2):
        save_file({f"w{number}": torch.full((3,), float(number))}, tmp_path / f"model-{number}.safetensors")
    return tmp_path


def index(folder: Path, weights: Any) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return path


def test_only_an_index_makes_several_files_one_checkpoint(folder: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        ds.load(folder)
    path = index(folder, {"w1": "model-1.safetensors", "w2": "model-2.safetensors"})
    assert sorted(ds.load(folder)) == ["w1", "w2"]
    path.unlink()
    (folder / "model-2.safetensors").rename(folder / "model.safetensors")
    assert sorted(ds.load(folder)) == ["w2"]
    (folder / "model.safetensors").unlink()
    assert sorted(ds.load(folder)) == ["w1"]


def test_beside_our_checkpoints_a_file_is_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ds.Checkpointer(folder) as checkpointer:
        checkpointer.snapshot([from_state_dict("m", {"own": torch.ones(3)})], step=4)
    (folder / "model-1.safetensors").rename(folder / "model.safetensors")
    assert list(ds.load(folder)) == ["m"]
    with ds.open(folder) as opened:
        assert opened.step == 4
    assert commands.main(["ls", str(folder)]) == 0
    listed = capsys.readouterr().out
    assert "step-00000004" in listed
    assert listed.count("a safetensors file") == 2


@pytest.mark.parametrize(
    ("weights", "what"),
    [
        ({"w1": "../model-1.safetensors"}, "beside it"),
        ({"w1": "/etc/passwd"}, "beside it"),
        ({"w1": 3}, "no index"),
        ([], "no index"),
        ({}, "at least one"),
        ({"w3": "model-3.safetensors"}, "model-3.safetensors"),
    ],
)
def test_a_wrong_index_is_refused(folder: Path, weights: Any, what: str) -> None:
    index(folder, weights)
    with pytest.raises(DatastatesError, match=what):
        ds.open(folder)


def test_an_index_that_names_what_a_file_lacks_blocks_no_tensor(folder: Path, capsys: Any) -> None:
    index(folder, {"w1": "model-1.safetensors", "gone": "model-2.safetensors"})
    with ds.open(folder) as opened:
        assert opened["w1"] is not None
        assert "gone" not in opened
    assert commands.main(["verify", str(folder)]) == 1
    assert "gone" in capsys.readouterr().out


def test_an_index_that_is_no_json_is_refused(folder: Path) -> None:
    index(folder, {}).write_text("[" * 100_000)
    with pytest.raises(FormatError, match=r"index\.json is no index"):
        ds.open(folder)


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    save_file({"w1": torch.ones(3)}, folder / "other.safetensors")
    index(folder, {"w1": "model-1.safetensors", "w2": "other.safetensors"})
    with pytest.raises(FormatError, match=r"'w1' is in model-1\.safetensors and in other\.saf"):
        ds.open(folder)


def test_no_step_is_the_step_of_a_format_without_steps(folder: Path) -> None:
    file = folder / "model-1.safetensors"
    with ds.open(file) as opened:
        assert opened.step is None
    with pytest.raises(CheckpointNotFoundError, match="no step"):
        ds.load(file, step=3)
