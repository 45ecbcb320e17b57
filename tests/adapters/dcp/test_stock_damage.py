"""Damaged and malicious files of torch's own writer are named, and no code in them runs."""

from __future__ import annotations

import os
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stock import archived, data_of, load, places, records, rewrite
from torch.distributed.checkpoint.api import CheckpointException

from datastates.errors import CorruptError, FormatError
from states import Parts, blank, failure, loaded, same, save_with


@pytest.mark.parametrize("rows", [400_000, 30])
def test_a_flipped_byte_in_the_data_names_the_tensor(tmp_path: Path, rows: int) -> None:
    state = {"alpha": torch.arange(float(rows)), "beta": torch.arange(7.0)}
    save_with("stock", state, tmp_path)
    for name, tensor in state.items():
        info = places(tmp_path)[name]
        file = tmp_path / info.relative_path
        good = file.read_bytes()
        begin = info.offset + data_of(good[info.offset : info.offset + info.length])
        for at in (begin, begin + tensor.nbytes // 2, begin + tensor.nbytes - 1):
            file.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
            found = failure(tmp_path, state)
            assert isinstance(found, CorruptError)
            assert f"{name!r} in {file}" in str(found)
            assert (found.key, found.path) == (name, str(file))
        file.write_bytes(good)
    same(loaded(tmp_path, state), state)


FLIPPED = 5
"""Of this many bytes around the data one is flipped. To flip all would take half a minute."""


@pytest.mark.long
def test_a_flipped_byte_anywhere_else_is_named_or_does_not_matter(tmp_path: Path) -> None:
    state = {"w": torch.arange(70_000.0)}
    save_with("stock", state, tmp_path)
    file = tmp_path / "__0_0.distcp"
    good = file.read_bytes()
    begin = data_of(good)
    named = 0
    for at in (*range(0, begin, FLIPPED), *range(begin + 280_000, len(good), FLIPPED)):
        file.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        into = blank(state)
        try:
            load(tmp_path, into)
        except CheckpointException as error:
            ((found, _),) = error.failures.values()
            assert isinstance(found, FormatError), (at, found)
            assert f"'w' in {file}" in str(found), (at, found)
            named += 1
        else:
            same(into, state)
    assert named > 300 // FLIPPED


@pytest.mark.by_hand
def test_a_part_is_not_read_from_another_place_when_its_frame_is_damaged(tmp_path: Path) -> None:
    whole = torch.arange(70_000.0).reshape(100, 700)
    save_with("stock", {"w": whole}, tmp_path)
    file = tmp_path / "__0_0.distcp"
    good = file.read_bytes()
    begin = data_of(good)
    for at in (*range(0, begin, FLIPPED), *range(begin + 280_000, len(good), FLIPPED)):
        file.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        part = Parts.of((100, 700), {(50, 0): torch.zeros(50, 700)})
        try:
            load(tmp_path, {"w": part})
        except CheckpointException as error:
            ((found, _),) = error.failures.values()
            assert isinstance(found, FormatError), (at, found)
        else:
            assert torch.equal(part.boxes[50, 0], whole[50:]), at


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    save_with("stock", {"w": torch.arange(70_000.0)}, tmp_path)
    file = tmp_path / "__0_0.distcp"
    length = file.stat().st_size
    for cut in (length - 1, length - 500, length // 2, 100, 0):
        os.truncate(file, cut)
        found = failure(tmp_path, {"w": torch.zeros(70_000)})
        assert isinstance(found, FormatError)
        assert "'w'" in str(found)
        assert str(file) in str(found)
        assert "cut short" in str(found)


def test_a_stretch_that_was_never_written_is_named(tmp_path: Path) -> None:
    state = {"alpha": torch.arange(70_000.0), "beta": torch.arange(70_000.0)}
    save_with("stock", state, tmp_path)
    file = tmp_path / "__0_0.distcp"
    good, info = file.read_bytes(), places(tmp_path)["beta"]
    for begin, end in ((0, 4096), (info.length - 4096, info.length), (0, info.length)):
        begin, end = info.offset + begin, info.offset + end
        file.write_bytes(good[:begin] + bytes(end - begin) + good[end:])
        found = failure(tmp_path, state)
        assert isinstance(found, FormatError)
        assert f"'beta' in {file}" in str(found)


def test_damage_of_what_is_not_needed_does_not_matter(tmp_path: Path) -> None:
    state = {"alpha": torch.arange(70_000.0), "beta": torch.arange(50.0)}
    save_with("stock", state, tmp_path)
    file, info = tmp_path / "__0_0.distcp", places(tmp_path)["alpha"]
    data = file.read_bytes()
    file.write_bytes(data[: info.offset] + bytes(info.length) + data[info.offset + info.length :])
    same(loaded(tmp_path, {"beta": state["beta"]}), {"beta": state["beta"]})


def central(archive: bytes, name: bytes) -> int:
    """Where the entry of a record begins in the central directory."""
    return archive.rindex(name) - 46


def lying(archive: bytes, at: int, form: str, *values: int) -> bytes:
    data = bytearray(archive)
    struct.pack_into(form, data, at, *values)
    return bytes(data)


HUGE = 1 << 31
LIES: dict[str, Callable[[bytes], bytes]] = {
    "a record longer than the file": lambda a: lying(a, central(a, b"archive/data/0") + 20, "<II", HUGE, HUGE),
    "a record that reaches into the directory": lambda a: lying(
        a, central(a, b"archive/data/0") + 20, "<II", 4000, 4000
    ),
    "a record shorter than its tensor": lambda a: lying(a, central(a, b"archive/data/0") + 20, "<II", 4, 4),
    "two lengths of one record": lambda a: lying(a, central(a, b"archive/data/0") + 20, "<II", 400, 404),
    "a record beyond the file": lambda a: lying(a, central(a, b"archive/data/0") + 42, "<I", HUGE),
    "a record that is another": lambda a: lying(a, central(a, b"archive/data/0") + 42, "<I", 0),
    "a header that never ends": lambda a: lying(a, records(a)["archive/data/0"].header_offset + 28, "<H", 0xFFFF),
    "a pickle longer than the file": lambda a: lying(a, central(a, b"archive/data.pkl") + 20, "<II", HUGE, HUGE),
    "a directory beyond the file": lambda a: lying(a, len(a) - 98 + 48, "<Q", 1 << 63),
    "a directory longer than the file": lambda a: lying(a, len(a) - 98 + 40, "<Q", 1 << 63),
    "more records than there are": lambda a: lying(a, len(a) - 98 + 32, "<Q", 1 << 63),
    "fewer records than there are": lambda a: lying(a, len(a) - 98 + 32, "<Q", 3),
    "an end beyond the file": lambda a: lying(a, len(a) - 22 - 12, "<Q", 1 << 63),
    "names that never end": lambda a: lying(a, central(a, b"archive/data/0") + 28, "<HHH", 0xFFFF, 0xFFFF, 0xFFFF),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_found(tmp_path: Path, lie: str) -> None:
    save_with("stock", {"w": torch.arange(100.0)}, tmp_path)
    rewrite(tmp_path, LIES[lie])
    found = failure(tmp_path, {"w": torch.zeros(100)})
    assert isinstance(found, FormatError)
    assert "'w' in " in str(found)


def repickled(archive: bytes, old: bytes, new: bytes) -> bytes:
    """The same archive with another pickle of the same length, and the right checksum."""
    info, at = records(archive)["archive/data.pkl"], data_of(archive, "archive/data.pkl")
    changed = archive[at : at + info.file_size].replace(old, new)
    assert len(changed) == info.file_size
    assert changed != archive[at : at + info.file_size]
    made = bytearray(archive)
    made[at : at + info.file_size] = changed
    struct.pack_into("<I", made, at + info.file_size + 4, zlib.crc32(changed))
    struct.pack_into("<I", made, central(archive, b"archive/data.pkl") + 16, zlib.crc32(changed))
    return bytes(made)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"K\x64\x85", b"K\xff\x85"),  # a longer shape than the storage holds
        (b"K\x01\x85", b"K\x09\x85"),  # strides that reach beyond it
        (b"K\x00K\x64", b"K\x50K\x64"),  # a first element near its end
        (b"K\x64tq", b"K\xfftq"),  # a longer storage than the record
    ],
)
def test_a_tensor_that_reaches_beyond_its_storage_is_refused(tmp_path: Path, old: bytes, new: bytes) -> None:
    save_with("stock", {"w": torch.arange(100.0)}, tmp_path)
    rewrite(tmp_path, lambda archive: repickled(archive, old, new))
    found = failure(tmp_path, {"w": torch.zeros(100)})
    assert isinstance(found, FormatError)
    assert "'w' in " in str(found)


class Harm:
    def __reduce__(self) -> Any:
        return (exec, ("import sys; sys.modules['harm'] = sys",))


def test_nothing_of_a_file_is_run(tmp_path: Path) -> None:
    save_with("stock", {"w": torch.arange(100.0)}, tmp_path)
    rewrite(tmp_path, lambda _: archived(Harm()))
    found = failure(tmp_path, {"w": torch.zeros(100)})
    assert isinstance(found, FormatError)
    assert "'w' in " in str(found)
    assert "harm" not in sys.modules
