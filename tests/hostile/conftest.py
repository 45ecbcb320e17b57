"""Hostile files, and a sandbox in which they are opened."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from datastates._base.sizes import CHUNK
from datastates.commit import manifest
from datastates.container import archive, checksums, data_pkl, zip_frames
from datastates.container.data_pkl import ProviderState
from datastates.container.index import Index
from datastates.container.records import Records
from datastates.container.table import table_of
from datastates.planning import write
from datastates.state.shards import Shard

HERE = Path(__file__).parent
MEMORY = 96 << 20


@dataclass
class Outcome:
    """The outcome of an attack."""

    error: str | None = None
    chain: list[str] = field(default_factory=list)
    message: str = ""
    is_ours: bool = False
    is_format: bool = False
    grown: int = 0
    code: list[str] = field(default_factory=list)
    died: str | None = None


Attack = Callable[..., Outcome]


@pytest.fixture(scope="session")
def attack() -> Iterator[Attack]:
    """Open something in a fork with limits on memory and time, and check that it stays within bounds."""
    pytest.importorskip("torch", reason="torch is not installed: the sandbox, which has it, was NOT used")
    with subprocess.Popen(
        [sys.executable, HERE / "sandbox.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def run(action: str, path: Path | str = "", *, data: bytes = b"", trust: Any = ()) -> Outcome:
            request = {"action": action, "path": str(path), "data": data.hex(), "trust": trust}
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            outcome = Outcome(**json.loads(process.stdout.readline()))
            assert outcome.died is None, f"the process died of {outcome.died}"
            assert outcome.code == []
            assert "MemoryError" not in outcome.chain, outcome
            assert outcome.grown < MEMORY, outcome
            assert outcome.error is None or outcome.is_ours, outcome
            return outcome

        yield run
        process.stdin.close()
        process.wait()


@pytest.fixture
def refused(attack: Attack) -> Attack:
    """Open something that must be refused with a FormatError, within bounds."""

    def run(action: str, path: Path | str = "", *, data: bytes = b"", trust: Any = ()) -> Outcome:
        outcome = attack(action, path, data=data, trust=trust)
        assert outcome.error is not None, "it was accepted"
        assert outcome.is_format, outcome
        assert outcome.message
        return outcome

    return run


def seal(data: bytes, offset: int, index: bytes) -> bytes:
    """A container with another index, and a footer that matches it."""
    ending = data[-archive.ENDING_NBYTES : -archive.FOOTER_NBYTES]
    footer = f"datastates/01 index={offset:016x}+{len(index):016x} crc={checksums.crc32(index):08x}"
    return data[:offset] + index + ending + footer.encode()


def commit(directory: Path, data: bytes, **fields: Any) -> Path:
    """A checkpoint directory with one container, and a manifest that matches it."""
    directory.mkdir()
    (directory / "rank-00000.pt").write_bytes(data)
    entry = manifest.ContainerEntry(
        file="rank-00000.pt", rank=0, nbytes=len(data), index_crc32=int(data[-8:].decode(), 16)
    )
    identity = {"format": 1, "step": 120, "attempt": "9f86d081", "world_size": 1, **fields}
    made = manifest.Manifest(created="2026-01-31T12:00:00+00:00", containers=(entry,), **identity)
    (directory / manifest.FILE).write_bytes(manifest.encode(made))
    return directory


@pytest.fixture(scope="session")
def genuine() -> bytes:
    """A valid container with every kind of row."""
    return (HERE.parent / "golden" / "container.pt").read_bytes()


Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def resigned(genuine: bytes, tmp_path: Path) -> Callable[[Edit | bytes], Path]:
    """A checkpoint whose index was edited or replaced. All checksums match again, so only its contents are wrong."""

    def make(edit: Edit | bytes) -> Path:
        footer = genuine[-archive.FOOTER_NBYTES :].decode()
        offset, nbytes = int(footer[20:36], 16), int(footer[37:53], 16)
        if isinstance(edit, bytes):
            index = edit
        else:
            fields = msgpack.unpackb(genuine[offset : offset + nbytes])
            edit(fields)
            index = msgpack.packb(fields)
        return commit(tmp_path / "checkpoint", seal(genuine, offset, index))

    return make


Forge = Callable[..., Path]


@pytest.fixture
def forge(tmp_path: Path) -> Forge:
    """A valid checkpoint of provider "m" around a hostile pickle and any rows, each with the number of its record."""

    def make(
        pickle: bytes, records: Sequence[bytes] = (), shards: Sequence[Shard] = (), record: Sequence[int] = ()
    ) -> Path:
        sizes = np.array([len(r) for r in records], np.uint64)
        headers = zip_frames.header_nbytes(len(records))
        plan = write.plan_write(sizes, np.zeros(len(records), np.uint8), headers, 4 * CHUNK)
        place = np.argsort(plan.order).tolist()
        ordered = [records[i] for i in plan.order.tolist()]
        crc = np.array([checksums.crc32(r) for r in ordered], np.uint32)
        begin = zip_frames.pickle_place(plan.end)
        encoded, objects = data_pkl.encode_pickle([ProviderState("m", pickle)], begin)
        index = Index(
            identity={"step": 120, "rank": 0, "world_size": 1, "attempt": "9f86d081"},
            records=Records.of(plan, crc),
            chunk_crc=np.array(
                [checksums.crc32(r[a : a + CHUNK]) for r in ordered for a in range(0, len(r), CHUNK)], np.uint32
            ),
            shards=table_of(["m"], [(0, s) for s in shards], [place[r] for r in record]),
            objects=objects,
            pickle_offset=begin,
            pickle_nbytes=len(encoded),
            pickle_crc=checksums.crc32(encoded),
        )
        framing = zip_frames.encode_frames(index.records)
        parts, at, end = [], 0, 0
        for data, offset in zip(ordered, index.records.data_offset.tolist(), strict=True):
            parts += [framing[at : at + offset - end], data]
            at, end = at + offset - end, offset + len(data)
        tail, _ = archive.encode_tail(index, encoded)
        return commit(tmp_path / "checkpoint", b"".join([*parts, framing[at:], tail]))

    return make
