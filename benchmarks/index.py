"""Measure a file of a million shards: planning it, encoding and opening its index, and reading one tensor."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

import datastates as ds
from datastates.container import archive, checksums
from datastates.container.file import open_container
from datastates.container.index import Index
from datastates.container.key_table import PackedKeys
from datastates.container.records import Records
from datastates.container.table import ShardTable
from datastates.container.zip_frames import encode_frames, header_nbytes, pickle_place
from datastates.planning import write
from datastates.planning.plans import WritePlan
from datastates.storage import Location
from measure import Plan, Result, Sample, interleave

NBYTES = 256
"""Bytes of each tensor: few, as only the number of tensors matters here."""
BLOCK = 8 << 20


def run(directory: Path, plan: Plan, *, tiny: bool) -> Result:
    """Measure planning, encoding, opening, and reading one tensor."""
    count = 10_000 if tiny else 1_000_000
    index = index_of(make_plan(count))
    tail, _ = archive.encode_tail(index, b"")
    path = directory / "index.pt"
    with path.open("wb") as file:  # the records are a hole in the file: zeros, which the checksums match
        file.seek(index.records.end)
        file.write(tail)
    key = f"model/{index.shards.keys[count // 2]}"
    actions: dict[str, Callable[[], Sample]] = {
        "plan": lambda: _timed(partial(make_plan, count)),
        "encode": lambda: _timed(partial(archive.encode_tail, index, b"")),
        "open": lambda: _timed(partial(open_container, Location(path))),
        # from a file just opened, so that the time includes what the first look-up builds
        "read one": lambda: _timed(partial(ds.open(path).__getitem__, key)),
    }
    result = Result(
        parameters={"shards": count},
        settings={
            "plan": "the layout, and the frames between the records",
            "encode": "encode_tail: index, central directory and footer",
            "open": "open_container: read, checked number by number",
            "read one": "datastates.open(file)[key], the first of a file just opened: found by its key, read, verified",
        },
    )
    interleave(result, actions, plan)
    path.unlink()
    return result


def make_plan(count: int) -> WritePlan:
    """Plan the layout of a file of ``count`` tensors, and encode the frames between the records."""
    sizes = np.full(count, NBYTES, np.uint64)
    plan = write.plan_write(sizes, np.zeros(count, np.uint8), header_nbytes(count), BLOCK)
    encode_frames(Records.of(plan))
    return plan


def index_of(plan: WritePlan) -> Index:
    """The index of a file whose records are all zeros."""
    count = len(plan.order)
    zero = np.full(count, checksums.crc32(bytes(NBYTES)), np.uint32)
    none = np.zeros(0, np.uint64)
    byte = np.zeros(count, np.uint8)
    table = ShardTable(
        providers=("model",),
        provider=np.zeros(count, np.uint32),
        keys=PackedKeys.of([f"layers.{i // 10}.attention.heads.{i % 10}.weight" for i in range(count)]),
        kind=byte,
        dtype=byte,
        record=np.arange(count, dtype=np.uint32),
        offset=np.zeros(count, np.uint64),
        part=byte,
        ndim=byte + np.uint8(1),
        dims=np.full(count, 1, np.uint64),
        strides=np.full(count, 1, np.uint64),
        global_ndim=byte,
        global_dims=none,
        place=none,
        digest=np.zeros(count, np.uint32),
        digested=byte,
    )
    return Index(
        identity={"step": 0, "rank": 0, "world_size": 1, "attempt": "benchmark"},
        records=Records.of(plan, zero),
        chunk_crc=zero,
        shards=table,
        objects=(),
        pickle_offset=pickle_place(plan.end),
        pickle_nbytes=0,
        pickle_crc=0,
    )


def _timed(action: Callable[[], object]) -> Sample:
    begin = time.perf_counter()
    action()
    return {"seconds": time.perf_counter() - begin}
