"""Builds the golden files out of fixed values, without torch; ``python tests/golden/generate.py`` rewrites them.

Only a change of the format may change their bytes.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from datastates._base.sizes import CHUNK
from datastates.commit import catalog, manifest
from datastates.commit.claims import claims_of, whole_claims
from datastates.container import archive, checksums, data_pkl, digests, nested_archives, pickle_writer, zip_frames
from datastates.container.data_pkl import ProviderState
from datastates.container.index import Index
from datastates.container.nested_archives import Nest
from datastates.container.records import Records
from datastates.container.table import ShardTable, table_of
from datastates.planning import write
from datastates.state import dtypes
from datastates.state.shards import ArrayLeaf, Shard, StoredArray
from datastates.state.strides import is_row_major

HERE = Path(__file__).parent
CONTAINER, MANIFEST, MANIFEST_2 = "container.pt", "manifest.json", "manifest-2.json"
HASHED = "hashed.pt"
IDENTITY: dict[str, int | str] = {"step": 120, "rank": 0, "world_size": 1, "attempt": "9f86d081"}

PATTERN = bytes(range(1, 97))
TORCH, JAX = 0, 3
DENSE = [d for d in dtypes.ALL if d.name != "bool"]

# The bytes of each storage record, in the caller's order.
RECORDS: dict[str, bytes] = {
    "grid": np.arange(12, dtype="<f4").tobytes(),
    "flags": b"\x01\x00\x01",
    "scalar": np.array(-7, "<i8").tobytes(),
    "empty": b"",
    "numpy": np.array([1.5, -2.5], "<f8").tobytes(),
    "cupy": np.array([1, 2, 3], "<u2").tobytes(),
    "box": np.arange(4, dtype="<f4").tobytes(),
    "flat": np.arange(5, dtype="<f2").tobytes(),
    "columns": np.arange(48, dtype="<f4").tobytes(),
    "strings": np.arange(10, 16, dtype="<i4").tobytes(),
    **{f"dtype {d.name}": PATTERN[: 2 * d.itemsize] for d in DENSE},
}

# provider, key, kind, dtype, record, offset, shape, stride, (global shape, place)
Row = tuple[
    int, str, int, str, str, int, tuple[int, ...], tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]] | None
]
ROWS: list[Row] = [
    (0, "weight", 0, "float32", "grid", 0, (3, 4), (4, 1), None),
    (0, "transposed", 0, "float32", "grid", 0, (4, 3), (1, 4), None),
    (0, "tail", 0, "float32", "grid", 32, (2, 2), (2, 1), None),
    (0, "repeated", 0, "float32", "grid", 4, (2, 3), (0, 1), None),
    (0, "flags", 0, "bool", "flags", 0, (3,), (1,), None),
    (0, "nested/0/scalar", 0, "int64", "scalar", 0, (), (), None),
    (0, "empty", 0, "float32", "empty", 0, (2, 0, 3), (3, 3, 1), None),
    (1, "", 1, "float64", "numpy", 0, (2,), (1,), None),
    (1, "~20", 2, "uint16", "cupy", 0, (3,), (1,), None),
    (1, "a~1b~0c", 1, "int32", "strings", 0, (2,), (1,), None),
    (1, "ключ", 1, "int32", "strings", 8, (2,), (1,), None),
    (1, "lone \ud800", 1, "int32", "strings", 16, (2,), (1,), None),
    (1, "box", 0, "float32", "box", 0, (2, 2), (2, 1), ((4, 6), (2, 4))),
    (1, "flat", 0, "float16", "flat", 0, (5,), (1,), ((3, 7), (9, 14))),
    (1, "columns", 0, "float32", "columns", 0, (3, 16), (16, 1), ((3, 20), (0, 4))),
    *[(2, d.name, TORCH if d.in_torch else JAX, d.name, f"dtype {d.name}", 0, (2,), (1,), None) for d in DENSE],
]
PROVIDERS = ("model", "other/provider", "dtypes")
EAGER = {"flags", "scalar", "numpy"}

OBJECT: dict[Any, Any] = {
    "none": None,
    "flags": [True, False],
    "integers": [0, 255, 256, 65535, 65536, -1, 2**31, -(2**40), 2**200],
    "float": 0.1,
    "text": "käse \U0001f9c0",
    "bytes": b"\x00\xff",
    "tuple": (1, (2,), ()),
    "set": {5},
    "complex": 1 - 2j,
    7: OrderedDict(a=1),
    "empty": [{}, []],
}


def build(*, hashed: bool = False) -> dict[str, bytes]:
    """The golden files by name; ``hashed``: the container has hashes in its index."""
    names = list(RECORDS)
    sizes = np.array([len(RECORDS[n]) for n in names], np.uint64)
    eager = np.array([n in EAGER for n in names], np.uint8)
    plan = write.plan_write(sizes, eager, zip_frames.header_nbytes(len(names)), 4 * CHUNK)
    order = [names[i] for i in plan.order.tolist()]
    crc = np.array([checksums.crc32(RECORDS[n]) for n in order], np.uint32)
    begin = zip_frames.pickle_place(plan.end)
    pickle, objects = data_pkl.encode_pickle(_states(order), begin)
    index = Index(
        identity=IDENTITY,
        records=Records.of(plan, crc),
        chunk_crc=crc[sizes[plan.order] > 0],  # each has one chunk, or none
        shards=_digested(_table(order), [RECORDS[n] for n in order]),
        objects=objects,
        pickle_offset=begin,
        pickle_nbytes=len(pickle),
        pickle_crc=checksums.crc32(pickle),
    )
    if hashed:
        index = replace(index, hashes=_hashes(index.shards, [RECORDS[n] for n in order]))
    data, index_crc = _file(index, pickle, [RECORDS[n] for n in order])
    entry = manifest.ContainerEntry(file=CONTAINER, rank=0, nbytes=len(data), index_crc32=index_crc)
    made = manifest.Manifest(
        format=1, step=120, attempt="9f86d081", created="2026-01-31T12:00:00+00:00", world_size=1, containers=(entry,)
    )
    newer = made.model_copy(update={"format": 2, "sequence": 7})
    return {CONTAINER: data, MANIFEST: manifest.encode(made), MANIFEST_2: manifest.encode(newer)}


def _hashes(table: ShardTable, records: list[bytes]) -> tuple[str, bytes, bytes]:
    """The hash of each chunk, of which each record has one or none, and of each array in row-major order."""

    def of(data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=16).digest()

    arrays = []
    for row in table.rows(range(len(table))):
        data = records[row.record][row.offset :][: row.dtype.itemsize * math.prod(row.shape)]
        arrays.append(of(data) if is_row_major(row.shape, row.stride) else bytes(16))
    return "blake2b-128", b"".join(of(record) for record in records if record), b"".join(arrays)


def _digested(table: ShardTable, records: list[bytes]) -> ShardTable:
    sizes = np.array([len(r) for r in records], np.uint64)
    plan = digests.plan_digests(table, sizes, np.arange(len(records)), np.zeros(len(records), np.int64))
    folded = []
    for i in plan.folded.tolist():
        row = table.row(i)
        data = records[row.record][row.offset :][: row.dtype.itemsize * math.prod(row.shape)]
        folded.append(digests.contribution_of(digests.places_of(table), i, [data]))
    crc = np.array([checksums.crc32(r) for r in records], np.uint32)
    return plan.filled(crc, np.array(folded, np.uint32), table)


def _file(index: Index, pickle: bytes, records: list[bytes]) -> tuple[bytes, int]:
    """A container, and the CRC-32 of its index."""
    framing = archive.encode_framing(index.records, archive.nest_of(index))
    tail, index_crc = archive.encode_tail(index, pickle)
    parts, at, end = [], 0, 0
    for record, offset in zip(records, index.records.data_offset.tolist(), strict=True):
        parts += [framing[at : at + offset - end], record]
        at, end = at + offset - end, offset + len(record)
    return b"".join([*parts, framing[at:], tail]), index_crc


# --- a container by itself, whose records are archives

NESTED = "nested.pt"
ARCHIVES: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], bytes]] = {
    "grid": ("float32", (3, 4), (4, 1), np.arange(12, dtype="<f4").tobytes()),
    "transposed": ("float32", (4, 3), (1, 4), np.arange(12, 24, dtype="<f4").tobytes()),
    "flags": ("bool", (3,), (1,), b"\x01\x00\x01"),
    "scalar": ("int64", (), (), np.array(-7, "<i8").tobytes()),
    "empty": ("float32", (2, 0, 3), (3, 3, 1), b""),
    **{d.name: (d.name, (2,), (1,), PATTERN[: 2 * d.itemsize]) for d in DENSE if d.in_torch},
}
"""By key: element type, shape, strides, and the record's bytes."""


def build_nested() -> bytes:
    """A nested container."""
    rows = list(ARCHIVES.items())
    every = [record for _, (_, _, _, record) in rows]
    sizes = np.array([len(record) for record in every], np.uint64)
    order = write.file_order(sizes, np.zeros(len(rows), np.uint8)).tolist()
    stored = [
        (key, StoredArray(str(order.index(i)), dtype, 0, shape, stride, len(record) // dtypes.BY_NAME[dtype].itemsize))
        for i, (key, (dtype, shape, stride, record)) in enumerate(rows)
    ]
    nest = Nest([stored[i][1] for i in order])
    eager = np.zeros(len(rows), np.uint8)
    plan = write.plan_write(sizes, eager, nest.header_nbytes, 4 * CHUNK, nested_archives.CRC_PLACES)
    begin = archive.pickle_place(plan.end, nest)
    pickle, objects = data_pkl.encode_pickle([ProviderState("m", None, tuple(stored))], begin)
    records = [every[i] for i in order]
    crc = np.array([checksums.crc32(record) for record in records], np.uint32)
    shards = [
        Shard(key, dtype=dtype, kind="torch", shape=shape, stride=stride, global_shape=shape, offset=(0,) * len(shape))
        for key, (dtype, shape, stride, _) in rows
    ]
    table = table_of(["m"], [(0, shard) for shard in shards], [order.index(i) for i in range(len(rows))])
    index = Index(
        identity=IDENTITY,
        records=Records.of(plan, crc),
        chunk_crc=crc[sizes[order] > 0],
        shards=_digested(table, records),
        objects=objects,
        pickle_offset=begin,
        pickle_nbytes=len(pickle),
        pickle_crc=checksums.crc32(pickle),
        nested=True,
    )
    return _file(index, pickle, records)[0]


# --- a checkpoint of two ranks

SEVERAL = "several"
WHOLE: dict[str, np.ndarray[Any, Any]] = {
    "w": np.arange(24, dtype="<f4").reshape(4, 6),
    "cut": np.arange(10, dtype="<f2"),
    "alike": np.array([7, -7, 2**40], dtype="<i8"),
    "none": np.zeros((0, 4), "<f4"),
}
"""The logical tensors."""
PARTS: tuple[dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]], ...] = (
    {
        "w": ("box", (0, 0), (3, 6)),
        "cut": ("flat", (0, 4), (4,)),
        "alike": ("flat", (0, 0), (0,)),  # this rank leaves its replica to the other
        "none": ("box", (0, 0), (0, 4)),
    },
    {
        "w": ("box", (3, 0), (1, 6)),
        "cut": ("flat", (4, 10), (6,)),
        "alike": ("box", (0,), (3,)),
        "none": ("flat", (0, 0), (0,)),
    },
)
"""For each rank, its part of each tensor: box or flat range, where it lies, and its shape."""
KEPT = "kept"
HALVES: tuple[dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]], ...] = (
    {"w": ("box", (0, 0), (4, 6)), "cut": ("flat", (0, 0), (0,)), "none": ("box", (0, 0), (0, 4))},
    {"cut": ("box", (0,), (10,))},
)
"""The same of one rank, and of its kept container."""


def build_several() -> dict[str, bytes]:
    """The files of a checkpoint of two ranks, by name."""
    made = (_of_rank({**IDENTITY, "rank": rank, "world_size": 2}, held) for rank, held in enumerate(PARTS))
    return _several(made, ranks=2, number=1)


def build_kept() -> dict[str, bytes]:
    """The files of a checkpoint of one rank with a kept container of an earlier step, by name."""
    earlier = {**IDENTITY, "step": 60, "attempt": "0a1b2c3d"}
    made = (_of_rank(IDENTITY, HALVES[0]), _of_rank(earlier, HALVES[1], objects=False))
    kept = {name: earlier[name] for name in ("step", "attempt")}
    return _several(made, ranks=1, number=3, sequence=7, kept=kept)


def _several(
    made: Iterable[tuple[bytes, Index, int]],
    *,
    ranks: int,
    number: int,
    sequence: int | None = None,
    kept: dict[str, Any] | None = None,
) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    claims, nbytes, crcs = [], [], []
    for i, (data, index, index_crc) in enumerate(made):
        files[manifest.file_name(i, ranks)] = data
        claims.append(whole_claims(claims_of(index.shards), index))
        nbytes.append(len(data))
        crcs.append(index_crc)
    encoded, head_crc = catalog.encode_catalog(claims, np.array(nbytes, np.uint64), np.array(crcs, np.uint32))
    files[catalog.FILE] = encoded
    written = manifest.Manifest(
        format=number,
        step=120,
        sequence=sequence,
        attempt="9f86d081",
        created="2026-01-31T12:00:00+00:00",
        world_size=ranks,
        containers=tuple(
            manifest.ContainerEntry(
                file=manifest.file_name(i, ranks),
                rank=i % ranks,
                nbytes=n,
                index_crc32=c,
                **((kept or {}) if i >= ranks else {}),
            )
            for i, (n, c) in enumerate(zip(nbytes, crcs, strict=True))
        ),
        catalog=manifest.CatalogEntry(file=catalog.FILE, nbytes=len(encoded), head_crc32=head_crc),
    )
    return {**files, MANIFEST: manifest.encode(written)}


def _of_rank(
    identity: dict[str, int | str],
    held: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]],
    *,
    objects: bool = True,
) -> tuple[bytes, Index, int]:
    records, shards, stored = [], [], []
    for i, (key, (kind, where, shape)) in enumerate(held.items()):
        whole = WHOLE[key]
        box = tuple(slice(b, b + n) for b, n in zip(where, shape, strict=False))
        part = whole.reshape(-1)[where[0] : where[1]] if kind == "flat" else whole[box]
        stride = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
        dtype = whole.dtype.name
        records.append(part.tobytes())
        place: dict[str, Any] = {"offset": None, "flat": where} if kind == "flat" else {"offset": where, "flat": None}
        shards.append(
            Shard(key, dtype=dtype, kind="torch", shape=shape, stride=stride, global_shape=whole.shape, **place)
        )
        stored.append((key, StoredArray(str(i), dtype, 0, shape, stride, part.size)))
    sizes = np.array([len(r) for r in records], np.uint64)
    begins, ends, end = [], [], 0
    for i, size in enumerate(sizes.tolist()):
        ends.append(end)
        begins.append(-(-(end + 30 + len(f"archive/data/{i}") + 24) // 64) * 64)
        end = begins[-1] + size + 24
    crc = np.array([checksums.crc32(r) for r in records], np.uint32)
    begin = zip_frames.pickle_place(end)
    states = [ProviderState("m", None, tuple(stored))]
    if objects:
        states.append(ProviderState("loop", pickle_writer.dumps({"rank": identity["rank"]})))
    pickle, placed = data_pkl.encode_pickle(states, begin)
    index = Index(
        identity=identity,
        records=Records(np.array(ends, np.uint64), np.array(begins, np.uint64), sizes, crc),
        chunk_crc=crc[sizes > 0],
        shards=_digested(
            table_of([s.name for s in states], [(0, s) for s in shards], list(range(len(shards)))), records
        ),
        objects=placed,
        pickle_offset=begin,
        pickle_nbytes=len(pickle),
        pickle_crc=checksums.crc32(pickle),
    )
    data, index_crc = _file(index, pickle, records)
    return data, index, index_crc


def _table(order: list[str]) -> ShardTable:
    def flat(tuples: list[tuple[int, ...]]) -> np.ndarray[Any, Any]:
        return np.array([n for t in tuples for n in t], np.uint64)

    parts = [r[8] for r in ROWS]
    return ShardTable(
        providers=PROVIDERS,
        provider=np.array([r[0] for r in ROWS], np.uint32),
        keys=tuple(r[1] for r in ROWS),
        kind=np.array([r[2] for r in ROWS], np.uint8),
        dtype=np.array([dtypes.BY_NAME[r[3]].code for r in ROWS], np.uint8),
        record=np.array([order.index(r[4]) for r in ROWS], np.uint32),
        offset=np.array([r[5] for r in ROWS], np.uint64),
        part=np.array(
            [0 if p is None else 2 if r[1] == "flat" else 1 for r, p in zip(ROWS, parts, strict=True)], np.uint8
        ),
        ndim=np.array([len(r[6]) for r in ROWS], np.uint8),
        dims=flat([r[6] for r in ROWS]),
        strides=flat([r[7] for r in ROWS]),
        global_ndim=np.array([0 if p is None else len(p[0]) for p in parts], np.uint8),
        global_dims=flat([p[0] for p in parts if p is not None]),
        place=flat([p[1] for p in parts if p is not None]),
        digest=np.zeros(len(ROWS), np.uint32),
        digested=np.zeros(len(ROWS), np.uint8),
    )


def _states(order: list[str]) -> list[ProviderState]:
    """The first provider is one object that refers to arrays; the others map keys to arrays, and one to an object."""

    def stored(row: Row) -> StoredArray:
        elements = len(RECORDS[row[4]]) // dtypes.BY_NAME[row[3]].itemsize
        return StoredArray(
            str(order.index(row[4])), row[3], row[5] // dtypes.BY_NAME[row[3]].itemsize, row[6], row[7], elements
        )

    def locate(leaf: ArrayLeaf) -> StoredArray:
        found = next(stored(r) for r in ROWS if r[:2] == (0, leaf.key))
        return replace(found, requires_grad=leaf.requires_grad)

    leaves = {
        r[1]: ArrayLeaf(r[1], parameter=r[1] == "weight", requires_grad=r[1] == "weight") for r in ROWS if r[0] == 0
    }
    nested = [{"scalar": leaves.pop("nested/0/scalar")}]
    whole = pickle_writer.dumps({**leaves, "nested": nested, "tied": leaves["weight"], "object": OBJECT}, locate)
    others = [[(r[1], stored(r)) for r in ROWS if r[0] == p] for p in (1, 2)]
    return [
        ProviderState(PROVIDERS[0], whole),
        ProviderState(PROVIDERS[1], None, (*others[0], ("object", pickle_writer.dumps(("text", 3))))),
        ProviderState(PROVIDERS[2], None, tuple(others[1])),
    ]


if __name__ == "__main__":
    for file, content in build().items():
        (HERE / file).write_bytes(content)
    (HERE / HASHED).write_bytes(build(hashed=True)[CONTAINER])
    (HERE / NESTED).write_bytes(build_nested())
    (HERE / SEVERAL).mkdir(exist_ok=True)
    (HERE / KEPT).mkdir(exist_ok=True)
    for folder, files in ((SEVERAL, build_several()), (KEPT, build_kept())):
        for file, content in files.items():
            (HERE / folder / file).write_bytes(content)
