"""Files of torch.save from before torch 1.6: what torch.load returns, and a refusal of what is damaged."""

from __future__ import annotations

import pickle
import struct
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from values import KINDS, Own, equal, flat, state

import datastates as ds
from datastates.cli import commands
from datastates.errors import DatastatesError, FormatError, TrustError
from datastates.providers import from_stateful

MAGIC, VERSION = 0x1950A86A20F9469CFC6C, 1001
LITTLE = {"protocol_version": VERSION, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}


def save(value: Any, path: Path, **options: Any) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=False, **options)
    return path


class Ref:
    """Stands for a storage: what torch calls it in a pickle."""

    def __init__(self, *pid: Any) -> None:
        self.pid = ("storage", *pid)


class Call:
    """Stands for the result of a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class Pickler(pickle._Pickler):
    """Writes texts and ordered dicts as Python 2 did, and references to storages."""

    def persistent_id(self, value: Any) -> Any:
        return value.pid if isinstance(value, Ref) else None

    def save_text(self, text: str) -> None:
        data = text.encode()
        self.write(pickle.SHORT_BINSTRING + bytes([len(data)]) + data)

    def save_mapping(self, value: Any) -> None:
        self.save_reduce(OrderedDict, ([list(pair) for pair in value.items()],), obj=value)

    dispatch = {**pickle._Pickler.dispatch, str: save_text, OrderedDict: save_mapping}  # noqa: RUF012


def old_file(path: Path, value: Any, storages: Mapping[str, torch.Tensor], **other: Any) -> Path:
    """Write a file as an old torch on Python 2 did.

    Args:
        path: The new file.
        value: Its value, with a Ref for each storage.
        storages: The elements of each storage.
        other: Other values for the parts of the file.
    """
    parts = {"magic": MAGIC, "version": VERSION, "machine": LITTLE, "value": value, "keys": list(storages), **other}
    with path.open("wb") as file:
        for one in list(parts.values())[:5]:
            Pickler(file, 2).dump(one)
        for tensor in storages.values():
            file.write(struct.pack("<q", other.get("count", tensor.numel())) + tensor.numpy().tobytes())
    return path


def of_floats(offset: Any = 0, size: Any = (3,), stride: Any = (1,), numel: Any = 10, *part: Any) -> Call:
    """A tensor over the storage ``"7"``, as torch wrote it before 0.4."""
    ref = Ref(torch.FloatStorage, "7", "cpu", numel, *(part or (None,)))
    return Call(torch._utils._rebuild_tensor, ref, offset, size, stride)


TEN = {"7": torch.arange(10.0)}


def stock(path: Path, *, weights_only: bool = True) -> Any:
    return torch.load(path, map_location="cpu", weights_only=weights_only)


def refused(path: Path, match: str = "") -> None:
    for how in (ds.open, ds.load):
        with pytest.raises(FormatError, match=rf"{path.name}.*{match}"):
            how(path)


def test_load_gives_what_torch_load_gives(tmp_path: Path) -> None:
    value = state()
    del value["new"]  # torch reads no file of these that it writes
    path = save(value, tmp_path / "state.pt")
    found, expected = ds.load(path), stock(path, weights_only=False)
    assert list(flat(found)) == list(flat(expected))
    for key, tensor in flat(expected).items():
        assert equal(flat(found)[key], tensor), key
    assert found["model"]._metadata == expected["model"]._metadata
    found["tied"][0][5] = 100  # views share their memory, as they did
    assert found["tied"][1][0] == 100
    tensors = {k: v for k, v in flat(value).items() if isinstance(v, torch.Tensor) and not v.is_sparse}
    with ds.open(path) as opened:
        assert list(opened) == list(tensors)
        assert all(torch.equal(opened[key], tensor) for key, tensor in tensors.items())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:TypedStorage")
@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("kind", KINDS)
def test_every_value_by_every_protocol(kind: str, protocol: int, tmp_path: Path) -> None:
    value = KINDS[kind]()
    if kind == "storages":
        del value["untyped"]  # torch reads no file of these that it writes
    path = save({"it": value, "w": torch.ones(3)}, tmp_path / "kind.pt", pickle_protocol=protocol)
    assert equal(ds.load(path), stock(path, weights_only=False))


DTYPES = [d for d in torch.storage._dtype_to_storage_type_map() if not str(d).startswith("torch.q")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_type(dtype: torch.dtype, tmp_path: Path) -> None:
    value = {"a": torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype).t(), "none": torch.zeros(0, 2, dtype=dtype)}
    path = save(value, tmp_path / "typed.pt")
    assert equal(ds.load(path), stock(path))


@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_what_torch_writes_but_does_not_read_is_read(tmp_path: Path) -> None:
    value = {"new": torch.arange(3).to(torch.uint16), "untyped": torch.ones(3).untyped_storage()}
    path = save(value, tmp_path / "new.pt")
    found = ds.load(path)
    assert found["new"].dtype is torch.uint16
    assert found["new"].tolist() == [0, 1, 2]
    assert bytes(found["untyped"].tolist()) == torch.ones(3).numpy().tobytes()


def test_old_files_of_python_2_are_read(tmp_path: Path) -> None:
    value = {"a": of_floats(2), "b": of_floats(0, (2, 3), (1, 2)), "n\xe9": [1, 2.5, "text"]}
    path = old_file(tmp_path / "old.pt", OrderedDict(value), TEN)
    found = ds.load(path)
    assert equal(found, stock(path))
    found["a"][0] = 100
    assert found["b"][0, 1] == 100


@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_a_storage_may_be_a_part_of_another(tmp_path: Path) -> None:
    part = ("8", 4, 5)
    value = {
        "whole": of_floats(),
        "part": of_floats(1, (2, 2), (2, 1), 10, part),
        "storage": Ref(torch.FloatStorage, "7", "cpu", 10, part),
    }
    path = old_file(tmp_path / "part.pt", value, TEN)
    found = ds.load(path)
    assert equal(found, stock(path))
    with ds.open(path) as opened:
        assert opened["part"].tolist() == [[5, 6], [7, 8]]
    found["storage"][2] = 100
    assert found["part"][0, 1] == 100
    refused(old_file(tmp_path / "beyond.pt", {"part": of_floats(1, (5,), (1,), 10, part)}, TEN), "its part of storage")
    refused(old_file(tmp_path / "outside.pt", {"part": of_floats(0, (1,), (1,), 10, ("8", 7, 5))}, TEN))


def test_the_byte_order_of_the_machine_is_not_that_of_the_file(tmp_path: Path) -> None:
    path = old_file(tmp_path / "big.pt", {"a": of_floats()}, TEN, machine={**LITTLE, "little_endian": False})
    assert equal(ds.load(path), stock(path))


@pytest.mark.parametrize("zipped", [False, True])
def test_storages_of_a_gpu_are_read_into_host_memory(zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "gpu.pt"
    torch.save({"a": torch.arange(3.0)}, path, _use_new_zipfile_serialization=zipped)
    data = path.read_bytes()
    if zipped:
        import zipfile

        with zipfile.ZipFile(path) as old:
            files = {name: old.read(name) for name in old.namelist()}
        with zipfile.ZipFile(path, "w") as new:
            for name, content in files.items():
                new.writestr(name, content.replace(b"ctorch\nFloat", b"ctorch.cuda\nFloat"))
    else:
        path.write_bytes(data.replace(b"ctorch\nFloat", b"ctorch.cuda\nFloat"))
    assert equal(ds.load(path), stock(path))


def test_of_several_values_the_first_is_read(tmp_path: Path) -> None:
    files = [save({"a": torch.full((3,), float(i))}, tmp_path / f"{i}.pt").read_bytes() for i in range(2)]
    (tmp_path / "both.pt").write_bytes(b"".join(files) + b"more")
    assert equal(ds.load(tmp_path / "both.pt"), stock(tmp_path / "both.pt"))


def test_a_module_is_restored(tmp_path: Path) -> None:
    saved, live = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    ds.restore([from_stateful("model", live)], save({"model": saved.state_dict()}, tmp_path / "m.pt"))
    assert torch.equal(live.weight, saved.weight)
    folder = tmp_path / "hugging"
    folder.mkdir()
    save(saved.state_dict(), folder / "pytorch_model.bin")
    assert equal(dict(ds.load(folder)), dict(saved.state_dict()))


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = {"w": torch.arange(5.0), "epoch": 3, "tied": torch.ones(2)}
    old, new = save(value, tmp_path / "old.pt"), tmp_path / "new.pt"
    torch.save(value, new)
    assert commands.main(["diff", str(old), str(new)]) == 0
    assert commands.main(["verify", str(old)]) == 0
    assert "there are no checksums of the data" in capsys.readouterr().out
    assert commands.main(["export", str(old), str(tmp_path / "out.pt")]) == 0
    assert equal(torch.load(tmp_path / "out.pt"), {"w": value["w"], "tied": value["tied"]})


def test_no_code_of_a_file_runs(tmp_path: Path) -> None:
    path = save({"own": Own(torch.ones(3)), "w": torch.ones(2)}, tmp_path / "own.pt")
    with pytest.raises(TrustError, match=r"values\.Own"):
        ds.load(path)
    with ds.open(path) as opened:
        assert opened["w"].tolist() == [1, 1]
    assert ds.load(path, trust=[f"{Own.__module__}.Own"])["own"].w.tolist() == [1, 1, 1]


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source")
def test_a_module_that_was_saved_whole_needs_trust(tmp_path: Path) -> None:
    path = save({"model": torch.nn.Linear(2, 2)}, tmp_path / "whole.pt")
    with pytest.raises(TrustError, match="Linear"):
        ds.load(path)
    with pytest.raises(FormatError, match="is saved whole"):
        ds.export(path, tmp_path / "out.safetensors")
    assert equal(
        ds.load(path, trust="all")["model"].state_dict(), stock(path, weights_only=False)["model"].state_dict()
    )


@pytest.mark.parametrize(
    "numbers",
    [
        {"size": (2**40,)},
        {"size": (2**40,), "numel": 2**40},
        {"size": (2, 2), "stride": (2**61, 1)},
        {"offset": 2**61},
        {"size": (2**62,), "stride": (0,)},
        {"size": (-3,)},
        {"size": (1,) * 70, "stride": (1,) * 70},
        {"stride": (1, 1)},
        {"numel": -1},
        {"numel": 9},
    ],
)
def test_hostile_numbers_allocate_nothing(tmp_path: Path, numbers: dict[str, Any]) -> None:
    refused(old_file(tmp_path / "bad.pt", {"w": of_floats(**numbers)}, TEN))


@pytest.mark.parametrize(
    "parts",
    [
        {"version": 1002},
        {"version": "1001"},
        {"keys": []},
        {"keys": ["7", "7"]},
        {"keys": ["7", "8"]},
        {"keys": {"7": 1}},
        {"keys": "7"},
        {"keys": [["7"]]},
        {"count": 9},
        {"count": 11},
        {"count": -1},
        {"count": 2**62},
    ],
    ids=str,
)
def test_parts_that_contradict_each_other_are_refused(parts: dict[str, Any], tmp_path: Path) -> None:
    refused(old_file(tmp_path / "bad.pt", {"w": of_floats()}, TEN, **parts))


@pytest.mark.parametrize("opcode", [b"X\xff\xff\xff\x7f", b"\x8e" + b"\xff" * 7 + b"\x7f", b"c" + b"a" * 9000])
def test_a_length_beyond_the_file_allocates_nothing(opcode: bytes, tmp_path: Path) -> None:
    path = old_file(tmp_path / "bad.pt", {"w": of_floats()}, TEN)
    data = path.read_bytes()
    at = data.rindex(b"\x80\x02}")  # where the pickle of the value begins
    path.write_bytes(data[: at + 2] + opcode + b"b" * 9000)
    refused(path)


def test_a_file_that_was_cut_short_is_refused_wherever(tmp_path: Path) -> None:
    whole = old_file(tmp_path / "whole.pt", {"w": of_floats(), "n": 1}, TEN).read_bytes()
    cut = tmp_path / "cut.pt"
    for size in range(14, len(whole)):
        cut.write_bytes(whole[:size])
        refused(cut)


@pytest.mark.long
@pytest.mark.parametrize("bit", [0, 4, 6])
def test_a_changed_byte_is_refused_or_read_as_torch_reads_it(bit: int, tmp_path: Path) -> None:
    whole = bytearray(save({"w": torch.arange(4.0), "n": [1, "a"]}, tmp_path / "whole.pt").read_bytes())
    path, read = tmp_path / "changed.pt", 0
    for at in range(14, len(whole)):
        whole[at] ^= 1 << bit
        path.write_bytes(whole)
        whole[at] ^= 1 << bit
        try:
            found = ds.load(path)
        except DatastatesError:
            continue
        read += 1
        try:
            expected = stock(path)
        except Exception:  # torch refuses some names and opcodes that are harmless
            continue
        assert repr(found) == repr(expected), at
    assert read > 16  # those of the elements, for example


def test_without_torch_tensors_are_arrays(tmp_path: Path) -> None:
    path = save({"w": torch.arange(3.0)}, tmp_path / "w.pt")
    code = "import sys; sys.modules['torch'] = None\nimport datastates as ds\nprint(ds.load(sys.argv[1]))\n"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
    assert done.stdout == "{'w': array([0., 1., 2.], dtype=float32)}\n", done.stderr
