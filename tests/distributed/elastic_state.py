"""Threads that act as ranks: they save and restore a split state, an object of all ranks, and one of each rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from split_state import Split

import datastates as ds
from datastates._base.sizes import CHUNK
from datastates.commit import catalog, manifest
from datastates.commit.claims import claims_of, whole_claims
from datastates.container import archive, checksums
from datastates.container.file import open_container
from datastates.providers import PickledObjectProvider
from datastates.restoring.restored import Restored

LAYOUTS = ("rows", "columns", "ranges", "grid", "whole", "mixed")
SHAPES = {"w": (96, 40), "b": (33,), "odd": (7, 3, 5), "scalar": (), "none": (0, 4), "one": (1, 1)}
SMALL: dict[str, Any] = {"host_cache": "2MiB", "block": "1MiB", "io_backend": "pwrite", "io_threads": 1}


class Own(PickledObjectProvider):
    """Something that each rank has for itself."""

    per_rank = True


class Rank:
    """The state of one rank: parts of tensors, an object under a key of all ranks, and one under a key of its own."""

    def __init__(self, layout: str, rank: int, ranks: int, shapes: dict[str, tuple[int, ...]] | None = None) -> None:
        self.model = getattr(Split, layout)("model", SHAPES if shapes is None else shapes, rank, ranks)
        self.loop = {"rank": rank}
        self.own = {"rank": rank}

    @property
    def providers(self) -> list[ds.StateProvider]:
        return [
            self.model,
            PickledObjectProvider("loop", lambda: dict(self.loop), self.loop.update),
            Own("own", lambda: dict(self.own), self.own.update),
        ]


def save(threads: Any, path: Path, layout: str, n: int, step: int = 3, shapes: Any = None) -> None:
    """Save a step on ``n`` ranks."""

    def one(rank: int) -> None:
        state = Rank(layout, rank, n, shapes)
        state.model.fill(step)
        ds.snapshot(state.providers, path, step=step, **SMALL).wait_committed()

    assert threads(n, one) == [None] * n


def restore(threads: Any, path: Path, layout: str, m: int, shapes: Any = None, **options: Any) -> list[Any]:
    """Restore on ``m`` ranks; returns for each rank the result and the state, or the error."""

    def one(rank: int) -> tuple[Restored, Rank]:
        state = Rank(layout, rank, m, shapes)
        state.loop["rank"] = state.own["rank"] = -1
        return ds.restore(state.providers, path, **{**SMALL, **options}), state

    return threads(m, one)  # type: ignore[no-any-return]


def live_nbytes(state: Rank) -> int:
    return sum(a.nbytes for a in state.model.arrays.values())


def check(outcomes: list[Any], n: int, step: int = 3) -> None:
    """Check that all ranks have the step's contents and the right objects."""
    for rank, outcome in enumerate(outcomes):
        assert not isinstance(outcome, Exception), outcome
        restored, state = outcome
        assert (restored.step, state.model.wrong(step)) == (step, [])
        assert restored.unexpected_keys == []
        assert restored.mismatched_keys == {}
        assert state.loop == {"rank": rank if rank < n else 0}
        assert state.own == {"rank": rank if rank < n else -1}
        assert restored.missing_keys == ([] if rank < n else ["own"])


# --- files that lie


def reseal(path: Path, rank: int, key: str, at: int = 0) -> None:
    """Flip a byte of a rank's part of an array, and make all checksums right again: only the digest is wrong."""
    file = path / manifest.container_name(rank)
    index, data = open_container(file).index, bytearray(file.read_bytes())
    row = index.shards.row(index.shards.by_key[key])
    begin, first = int(index.records.data_offset[row.record]), int(index.first_chunk[row.record])
    data[begin + row.offset + at] ^= 1
    content = bytes(data[begin : begin + int(index.records.nbytes[row.record])])
    record_crc, chunk_crc = index.records.crc.copy(), index.chunk_crc.copy()
    record_crc[row.record] = checksums.crc32(content)
    chunks = [checksums.crc32(content[a : a + CHUNK]) for a in range(0, len(content), CHUNK)]
    chunk_crc[first : first + len(chunks)] = chunks
    index = replace(index, records=replace(index.records, crc=record_crc), chunk_crc=chunk_crc)
    for offset, frame in archive.frame_ranges(index):
        data[offset : offset + len(frame)] = frame
    pickle = bytes(data[index.pickle_offset : index.pickle_offset + index.pickle_nbytes])
    file.write_bytes(bytes(data[: index.records.end]) + archive.encode_tail(index, pickle)[0])
    sign(path)


def sign(path: Path) -> None:
    """Write the manifest and the catalog anew from the containers."""
    signed = manifest.open(path)
    sources = [open_container(path / c.file) for c in signed.containers]
    claims = [whole_claims(claims_of(one.index.shards), one.index) for one in sources]
    nbytes = np.array([one.nbytes for one in sources], np.uint64)
    crcs = np.array([one.index_crc for one in sources], np.uint32)
    data, head = catalog.encode_catalog(claims, nbytes, crcs)
    entries = tuple(
        entry.model_copy(update={"nbytes": one.nbytes, "index_crc32": one.index_crc})
        for entry, one in zip(signed.containers, sources, strict=True)
    )
    found = manifest.CatalogEntry(file=catalog.FILE, nbytes=len(data), head_crc32=head)
    (path / catalog.FILE).write_bytes(data)
    made = signed.model_copy(update={"containers": entries, "catalog": found})
    (path / manifest.FILE).write_bytes(manifest.encode(made))
