"""A catalog that lies, and containers that contradict each other, with right checksums."""

from __future__ import annotations

import contextlib
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

import datastates as ds
from datastates.commit import catalog, manifest
from datastates.commit.catalog import BLOCK
from datastates.container import archive, checksums
from datastates.errors import FormatError

GOLDEN = Path(__file__).parents[1] / "golden" / "several"
HEAD = struct.Struct("<24s4Q")
MAGIC = b"datastates/catalog 01\n\0\0"
TABLES = (
    np.dtype([("nbytes", "<u8"), ("index_crc", "<u4")]),
    np.dtype([("key", "<u8"), ("first", "<u8"), ("digest", "<u4"), ("digested", "|u1")]),
    np.dtype([("begin", "<u8"), ("reach", "<u8"), ("rank", "<u4")]),
)
Columns = dict[str, "np.ndarray[Any, Any]"]
Edit = Callable[[Columns], object]
ACTIONS = ("restore_parts", "open_arrays")


def columns_of(data: bytes) -> Columns:
    """The golden catalog, taken apart."""
    _, *counts, _ = HEAD.unpack(data[: HEAD.size])
    found, at = {}, HEAD.size + 4
    for table, n in zip(TABLES, counts, strict=True):
        records = np.frombuffer(data, table, n, at)
        found.update({name: records[name].copy() for name in table.names or ()})
        at += records.nbytes
    assert at == len(data)
    return found


def golden() -> Columns:
    return columns_of((GOLDEN / catalog.FILE).read_bytes())


def sealed(columns: Columns, counts: tuple[int, ...] | None = None, block: int = BLOCK) -> bytes:
    """A catalog of columns with right checksums, whatever lengths its head states."""
    body = b""
    for table in TABLES:
        names = table.names or ()
        records = np.zeros(len(columns[names[0]]), table)
        for name in names:
            records[name] = columns[name]
        body += records.tobytes()
    true = len(columns["nbytes"]), len(columns["key"]), len(columns["rank"])
    head = HEAD.pack(MAGIC, *(true if counts is None else counts), block)
    return head + checksums.crc32(body).to_bytes(4, "little") + body


def sign(path: Path, **fields: Any) -> Path:
    """Name the catalog and the container of rank 1 in the manifest, as they are or as ``fields`` say."""
    with (path / catalog.FILE).open("rb") as file:
        data = file.read(BLOCK)
    rank = (path / "rank-00001.pt").read_bytes()
    made = manifest.open(path)
    other = made.containers[1].model_copy(update={"nbytes": len(rank), "index_crc32": int(rank[-8:].decode(), 16)})
    nbytes, crc = (path / catalog.FILE).stat().st_size, checksums.crc32(data[: HEAD.size + 4])
    entry = manifest.CatalogEntry(file=catalog.FILE, nbytes=nbytes, head_crc32=crc).model_copy(update=fields)
    made = made.model_copy(update={"containers": (made.containers[0], other), "catalog": entry})
    (path / manifest.FILE).write_bytes(manifest.encode(made))
    return path


@pytest.fixture
def commit(tmp_path: Path) -> Callable[..., Path]:
    """The golden checkpoint with another catalog, named by its manifest."""

    def make(data: bytes, **fields: Any) -> Path:
        path = tmp_path / "c"
        shutil.copytree(GOLDEN, path)
        (path / catalog.FILE).write_bytes(data)
        return sign(path, **fields)

    return make


@pytest.mark.parametrize("action", ACTIONS)
def test_the_golden_checkpoint_is_accepted(attack: Any, commit: Any, action: str) -> None:
    data = (GOLDEN / catalog.FILE).read_bytes()
    assert sealed(columns_of(data)) == data
    outcome = attack(action, commit(data))
    assert outcome.error is None, outcome


COUNTS = [(0, 5, 8), (3, 5, 8), (2, 4, 8), (2, 6, 8), (2, 5, 7), (2, 5, 9), (0, 0, 0), (2, 0, 2**40), (2**63, 1, 1)]
COUNTS += [(2**64 - 1,) * 3, (2, 2**61, 8), (2, 5, 2**62), (140, 5, 8), (2**32, 2**32, 2**32)]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("action", ACTIONS)
def test_wrong_counts_are_refused(refused: Any, commit: Any, action: str, counts: tuple[int, ...]) -> None:
    assert catalog.FILE in refused(action, commit(sealed(golden(), counts))).message


@pytest.mark.parametrize("block", [0, 1, 65536, 2**40, 2**64 - 1])
def test_another_block_size_is_refused(refused: Any, commit: Any, block: int) -> None:
    refused("restore_parts", commit(sealed(golden(), block=block)))


@pytest.mark.parametrize("nbytes", [0, 55, 2**40, 2**63, 10**30])
def test_a_length_that_is_not_the_files_is_refused(refused: Any, commit: Any, nbytes: int) -> None:
    refused("restore_parts", commit((GOLDEN / catalog.FILE).read_bytes(), nbytes=nbytes))


def test_a_file_of_holes_is_refused_in_little_memory(refused: Any, commit: Any) -> None:
    """Its lengths agree with each other: nearly 10**12 bytes."""
    path = commit(b"")
    ranks = 2**36
    body = 12 * ranks
    with (path / catalog.FILE).open("wb") as file:
        file.write(HEAD.pack(MAGIC, ranks, 0, 0, BLOCK))
        file.truncate(HEAD.size + 4 * -(-body // BLOCK) + body)
    assert catalog.FILE in refused("restore_parts", sign(path)).message


LIES: dict[str, Edit] = {
    "a rank that there is not": lambda c: c["rank"].fill(2),
    "ranks beyond all": lambda c: c["rank"].fill(2**32 - 1),
    "rows beyond the end": lambda c: c["first"].fill(2**63),
    "another length of the containers": lambda c: np.add(c["nbytes"], 1, out=c["nbytes"]),
    "another index": lambda c: np.bitwise_xor(c["index_crc"], 1, out=c["index_crc"]),
    "the containers swapped": lambda c: np.copyto(c["index_crc"], c["index_crc"][::-1].copy()),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("action", ACTIONS)
def test_a_lie_is_refused(refused: Any, commit: Any, action: str, lie: str) -> None:
    columns = golden()
    LIES[lie](columns)
    refused(action, commit(sealed(columns)))


ODD: dict[str, Edit] = {
    "no rows": lambda c: c["first"].fill(0),
    "rows backwards": lambda c: np.copyto(c["first"], c["first"][::-1].copy()),
    "rows that begin at the end": lambda c: c["first"].fill(len(c["rank"])),
    "begins beyond all": lambda c: c["begin"].fill(2**64 - 1),
    "reaches of nothing": lambda c: c["reach"].fill(0),
    "all on one rank": lambda c: c["rank"].fill(1),
    "keys backwards": lambda c: np.copyto(c["key"], c["key"][::-1].copy()),
    "one key": lambda c: c["key"].fill(c["key"][2]),
    "no keys": lambda c: c["key"].fill(0),
}


@pytest.mark.parametrize("lie", ODD)
@pytest.mark.parametrize("action", ACTIONS)
def test_a_catalog_that_hides_what_there_is_gives_an_error(attack: Any, commit: Any, action: str, lie: str) -> None:
    """It is as if a container were missing."""
    columns = golden()
    ODD[lie](columns)
    assert attack(action, commit(sealed(columns))).error is not None


def every_array(path: Path) -> object:
    with ds.open(path) as checkpoint:
        return dict(checkpoint)


READS: dict[str, Callable[[Path], object]] = {
    "open": every_array,
    "load": ds.load,
    "export": lambda path: ds.export(path, path.with_name("out.safetensors")),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("number", range(5))
def test_a_catalog_that_lacks_what_a_container_holds_is_refused(commit: Any, read: str, number: int) -> None:
    columns = golden()
    columns["key"][number] ^= 1
    path = commit(sealed(columns))
    with contextlib.suppress(FormatError):  # an array that load does not look for in the catalog is read
        READS[read](path)


SHAPES = {"of fewer elements": [4, 4], "of more": [400, 600], "of other sides": [6, 6], "of 2**59": [2**29, 2**30]}
KINDS = {"of another type": 5, "of a larger type": 0}


@pytest.mark.parametrize("what", [*SHAPES, *KINDS])
@pytest.mark.parametrize("action", ACTIONS)
def test_containers_that_contradict_each_other_are_refused(refused: Any, commit: Any, action: str, what: str) -> None:
    """Rank 1 says that its part is of a tensor of another type or shape, which would not fit the memory."""
    path = commit(sealed(golden()))
    file = path / "rank-00001.pt"
    data = file.read_bytes()
    footer = data[-archive.FOOTER_NBYTES :].decode()
    offset, nbytes = int(footer[20:36], 16), int(footer[37:53], 16)
    fields = msgpack.unpackb(data[offset : offset + nbytes])
    shards = fields["shards"]
    if what in SHAPES:
        wholes = np.frombuffer(shards["global_dims"], "<u8").copy()
        assert wholes[:2].tolist() == [4, 6]
        wholes[:2] = SHAPES[what]
        shards["global_dims"] = wholes.tobytes()
        shards["dims"] = np.array([1, 4, *np.frombuffer(shards["dims"], "<u8")[2:]], "<u8").tobytes()
    else:
        shards["dtype"] = bytes([KINDS[what]]) + shards["dtype"][1:]
        shards["dims"] = np.array([1, 3, *np.frombuffer(shards["dims"], "<u8")[2:]], "<u8").tobytes()
    index = msgpack.packb(fields)
    ending = data[-archive.ENDING_NBYTES : -archive.FOOTER_NBYTES]
    signed = f"datastates/01 index={offset:016x}+{len(index):016x} crc={checksums.crc32(index):08x}"
    file.write_bytes(data[:offset] + index + ending + signed.encode())
    columns = golden()
    columns["nbytes"][1], columns["index_crc"][1] = file.stat().st_size, checksums.crc32(index)
    (path / catalog.FILE).write_bytes(sealed(columns))
    assert "another type or shape" in refused(action, sign(path)).message
