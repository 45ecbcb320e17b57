"""Digests: the contributions of the parts combine to the CRC-32 of the whole tensor, however it is cut."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import datastates as ds
from datastates.container import digests, logical
from datastates.container.digest_runs import places_of
from datastates.container.file import open_container
from datastates.container.table import Row, table_of
from datastates.errors import DatastatesError, FormatError
from datastates.providers import from_state_dict
from datastates.state import arrays
from datastates.state.provider import Saved, StateProvider
from datastates.state.shards import Buffer, Shard

SMALL: dict[str, Any] = {"host_cache": "4MiB", "block": "1MiB"}
DTYPES = {1: "uint8", 2: "float16", 8: "int64", 16: "complex128"}


def zeros(nbytes: int) -> int:
    return zlib.crc32(bytes(nbytes))


def defined(whole: np.ndarray[Any, Any], part: Any) -> int:
    """A part's contribution by definition; ``part`` is a slice of the flattened tensor, or an index of the tensor."""
    alone = np.zeros_like(whole)
    if isinstance(part, slice):
        alone.reshape(-1)[part] = whole.reshape(-1)[part]
    else:
        alone[part] = whole[part]
    return zlib.crc32(alone.tobytes()) ^ zeros(whole.nbytes)


def described(array: np.ndarray[Any, Any], whole: tuple[int, ...], part: Any, key: str = "k") -> Shard:
    """The shard of a part that lies in ``array``."""
    shard = replace(arrays.array_shard(key, array), global_shape=whole)
    if isinstance(part, slice):
        return replace(shard, offset=None, flat=(part.start, part.stop))
    return replace(shard, offset=tuple(s.start for s in part))


def cuts(draw: Any, length: int) -> list[slice]:
    places = sorted(draw(st.lists(st.integers(0, length), max_size=3)))
    return [slice(a, b) for a, b in itertools.pairwise([0, *places, length])]


@st.composite
def tilings(draw: Any) -> tuple[np.ndarray[Any, Any], list[Any]]:
    """A tensor, and parts that hold each element once."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    itemsize = draw(st.sampled_from(sorted(DTYPES)))
    data = np.random.default_rng(draw(st.integers(0, 99))).bytes(math.prod(shape) * itemsize)
    whole = np.frombuffer(data, DTYPES[itemsize]).reshape(shape).copy()
    if draw(st.booleans()):
        return whole, cuts(draw, whole.size)
    return whole, list(itertools.product(*(cuts(draw, n) for n in shape)))


@given(tilings(), st.data())
def test_parts_make_up_the_whole(tiling: tuple[np.ndarray[Any, Any], list[Any]], data: Any) -> None:
    whole, parts = tiling
    total = zeros(whole.nbytes)
    for part in parts:
        array = whole.reshape(-1)[part] if isinstance(part, slice) else whole[part]
        shard = described(np.ascontiguousarray(array).reshape(array.shape), whole.shape, part)
        encoded = array.tobytes()
        ends = [0, *(s.stop for s in cuts(data.draw, len(encoded)))]
        pieces = (encoded[begin:end] for begin, end in itertools.pairwise(ends))
        counted = digests.contribution_of(places_of(table_of([""], [(0, shard)], [0])), 0, pieces)
        assert counted == defined(whole, part)
        assert digests.contribution(shard) == counted
        if array.ndim:
            assert digests.contribution(described(array, whole.shape, part)) == counted
        total ^= counted
    assert total == zlib.crc32(whole.tobytes())


def test_constants_and_shifts_of_any_length() -> None:
    lengths = np.array([0, 1, 5, 4096, 3_000_001], np.uint64)
    assert digests.constants(lengths).tolist() == [zeros(int(n)) for n in lengths]
    raw = np.array([0x12345678] * 3, np.uint32)
    halves = digests.shift(
        digests.shift(raw, np.array([0, 2**61, 12345], np.uint64)), np.array([0, 2**61, 0], np.uint64)
    )
    assert halves.tolist() == digests.shift(raw, np.array([0, 2**62, 12345], np.uint64)).tolist()
    assert halves[0] == 0x12345678


@pytest.mark.parametrize("make", [torch.from_numpy, np.asarray])
def test_live_parts_that_must_be_copied(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_PIECE", 100)
    whole = np.arange(40 * 9 * 3, dtype=np.int32).reshape(40, 9, 3)
    part = (slice(5, 31), slice(2, 7), slice(0, 3))
    views = [whole[part], np.asfortranarray(whole[part])]
    views += [views[0].transpose(1, 0, 2).copy().transpose(1, 0, 2), np.ascontiguousarray(views[0])]
    for view in views:
        shard = described(make(view), whole.shape, part)
        assert digests.contribution(shard) == defined(whole, part)
        assert digests.contribution(replace(shard, buffer=None)) == defined(whole, part)
        # as on a device, where the contribution comes from the array alone
        assert shard.buffer is not None
        far = Buffer(0, shard.buffer.nbytes, device=0)
        assert digests.contribution(replace(shard, buffer=far)) == defined(whole, part)


def test_memory_that_no_array_describes_is_read_where_it_is() -> None:
    data = np.arange(100, dtype=np.float32)
    buffer = Buffer(data.ctypes.data, data.nbytes, owner=data)
    shard = Shard("k", "float32", "torch", (5, 7), (9, 1), (5, 10), offset=(0, 3), buffer=buffer, buffer_offset=8)
    whole = np.zeros((5, 10), np.float32)
    whole[:, 3:] = np.lib.stride_tricks.as_strided(data[2:], (5, 7), (36, 4))
    assert digests.contribution(shard) == defined(whole, (slice(0, 5), slice(3, 10)))
    with pytest.raises(DatastatesError, match=r"'k'.*device"):
        digests.contribution(replace(shard, source=data, buffer=replace(buffer, device=1)))
    with pytest.raises(DatastatesError, match="object"):
        digests.contribution(Shard("k", None, "object"))


# --- which rows are digested, and from what


def planned(shards: Sequence[Shard], record: Sequence[int], records: Sequence[bytes]) -> tuple[Any, Any]:
    """The plan, and the table with the digests of those records."""
    table = table_of([""], [(0, s) for s in shards], record)
    sizes = np.array([len(r) for r in records], np.uint64)
    table.check(sizes)
    begin = np.cumsum(sizes.astype(np.int64)) - sizes.astype(np.int64)
    plan = digests.plan_digests(table, sizes, np.zeros_like(begin), begin)
    folded = digests.digester(plan.runs)
    folded.update(b"".join(records))
    crcs = np.array([zlib.crc32(r) for r in records], np.uint32)
    return plan, plan.filled(crcs, folded.finish(), table)


def shard(key: str, shape: tuple[int, ...], stride: tuple[int, ...], at: int = 0, **part: Any) -> Shard:
    fields = {"global_shape": shape, "offset": (0,) * len(shape), **part}
    return Shard(key, "uint8", "numpy", shape, stride, buffer_offset=at, **fields)


RECORD = np.random.default_rng(1).bytes(1000)
# key: the shard, whether it gets a digest, whether that needs no pass of its own over the data
ROWS = {
    "whole": (shard("whole", (10, 100), (100, 1)), True, True),
    "sized 1": (shard("sized 1", (1, 10, 1, 100), (7, 100, 9, 1)), True, True),
    "rows of a larger one": (
        shard("rows of a larger one", (10, 100), (100, 1), global_shape=(50, 100), offset=(20, 0)), True, True
    ),
    "range": (shard("range", (1000,), (1,), global_shape=(90, 90), offset=None, flat=(77, 1077)), True, True),
    "view": (shard("view", (2, 100), (100, 1), 300), True, False),
    "short view": (shard("short view", (3,), (1,), 997), True, False),
    "columns": (shard("columns", (10, 100), (100, 1), global_shape=(10, 150), offset=(0, 20)), True, False),
    "corner": (
        shard("corner", (2, 5, 1, 100), (500, 100, 0, 1), global_shape=(4, 6, 2, 100), offset=(1, 1, 1, 0)), True, False
    ),
    "64 bytes": (shard("64 bytes", (15, 64), (64, 1), global_shape=(15, 65), offset=(0, 1)), True, False),
    "63 bytes": (shard("63 bytes", (15, 63), (63, 1), global_shape=(15, 65), offset=(0, 1)), False, False),
    "transposed": (shard("transposed", (100, 10), (1, 100)), False, False),
    "gaps": (shard("gaps", (10, 50), (100, 1)), False, False),
    "repeated": (shard("repeated", (10, 100), (0, 1)), False, False),
    "empty": (shard("empty", (10, 0), (3, 5), 4), True, True),
    "empty box": (shard("empty box", (0, 10), (10, 1), global_shape=(5, 10)), True, True),
}  # fmt: skip


def test_what_is_digested() -> None:
    plan, table = planned([s for s, _, _ in ROWS.values()], [0] * len(ROWS), [RECORD])
    keys = list(ROWS)
    assert {k for k, d in zip(keys, table.digested.tolist(), strict=True) if d} == {k for k in keys if ROWS[k][1]}
    assert {keys[i] for i in plan.folded.tolist()} == {k for k in keys if ROWS[k][1] and not ROWS[k][2]}
    assert {s.digest for s in table.rows([keys.index("empty"), keys.index("empty box")])} == {0}
    # the shards overlap, but each digest is that of the shard alone
    for i, (one, known, _) in enumerate(ROWS.values()):
        if known:
            data = np.frombuffer(RECORD, np.uint8)
            alone = digests.contribution(replace(one, buffer=Buffer(data.ctypes.data, 1000, owner=data)))
            assert table.row(i).digest == alone, one.key
    table.check(np.array([1000], np.uint64))


def test_rows_of_many_records() -> None:
    records = [RECORD[:300], b"", RECORD[300:301], RECORD[301:]]
    shards = [shard(str(i), (len(r),), (1,)) for i, r in enumerate(records)]
    shards.append(shard("view", (600,), (1,), 50))
    _, table = planned(shards[::-1], [3, 3, 2, 1, 0], records)
    found = [digest_of(row) for row in table.rows(range(5))]
    assert found == [zlib.crc32(RECORD[351:951]), *(zlib.crc32(r) for r in reversed(records))]


# --- digests that a snapshot stores


class Parts(StateProvider):
    """Parts of tensors, each in memory of its own."""

    def __init__(self, parts: dict[str, tuple[Any, tuple[int, ...], Any]], *, lazy: bool = True) -> None:
        super().__init__("p")
        self._shards = [replace(described(*part, key), lazy=lazy) for key, part in parts.items()]

    def shards(self) -> list[Shard]:
        return self._shards

    def destinations(self, saved: Saved) -> list[Shard]:
        return []


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("cut", ["rows", "columns", "both", "range"])
def test_snapshots_of_parts_store_what_makes_up_the_whole(tmp_path: Path, cut: str, lazy: bool) -> None:
    whole = np.random.default_rng(2).random((1500, 999), np.float32)  # several extents each
    rows, columns = [slice(0, 900), slice(900, 1500)], [slice(0, 333), slice(333, 998), slice(998, 999)]
    every = (slice(0, 1500),), (slice(0, 999),)
    boxes = {"rows": (rows, every[1]), "columns": (every[0], columns[:2]), "both": (rows, columns[:2])}
    parts: list[Any] = [slice(0, 700_001), slice(700_001, 700_001), slice(700_001, whole.size)]
    if cut in boxes:
        parts = list(itertools.product(*boxes[cut]))
        if cut != "rows":
            whole = np.ascontiguousarray(whole[:, :998])
    tables = []
    for rank, part in enumerate(parts):
        array = whole.reshape(-1)[part] if isinstance(part, slice) else np.ascontiguousarray(whole[part])
        provider = Parts({"w": (array, whole.shape, part)}, lazy=lazy)
        ds.snapshot([provider], tmp_path / str(rank), **SMALL).wait_committed()
        tables.append(open_container(tmp_path / str(rank) / "rank-00000.pt").index.shards)
        assert tables[-1].row(0).digest == defined(whole, part)
    found = logical.combine(tables)["p/w"]
    assert (found.dtype, found.shape, found.is_complete) == ("float32", whole.shape, True)
    assert found.stored_digest == zlib.crc32(whole.tobytes())
    if len(parts) > 1:
        lacking = logical.combine(tables[1:])["p/w"]
        assert (lacking.is_complete, lacking.stored_digest) == (False, None)
        with pytest.raises(FormatError, match="'p/w'"):
            logical.combine([*tables, replace(tables[0], dtype=tables[0].dtype + np.uint8(1))])


def digest_of(row: Row) -> int | None:
    """The digest of a logical tensor whose only part is this row."""
    return logical.Logical(row.dtype.name, row.global_shape, [(0, 0, row)]).stored_digest


def test_snapshots_of_ordinary_state_store_the_digest_of_each_tensor(tmp_path: Path) -> None:
    grid = torch.arange(400_000.0).reshape(400, 1000)
    state = {"grid": grid, "row": grid[7], "some": grid[100:300], "step": torch.tensor(3), "empty": torch.zeros(0, 5)}
    state |= {"half": torch.randn(33, 5).to(torch.bfloat16), "mixed": grid.t(), "flags": torch.tensor([True, False])}
    providers = [from_state_dict("m", state)]
    for name in ("a", "b"):
        ds.snapshot(providers, tmp_path / name, **SMALL).wait_committed()
        grid.add_(1)
    table = open_container(tmp_path / "b" / "rank-00000.pt").index.shards
    grid.sub_(1)
    for row in table.rows(range(len(table))):
        value = state[row.key.removeprefix("m/")]
        expected = zlib.crc32(bytes(value.reshape(-1).view(torch.uint8).numpy())) if value.numel() else 0
        assert digest_of(row) == (None if row.key == "m/mixed" else expected), row.key


def test_digests_cost_no_pass_over_states_of_whole_tensors() -> None:
    shards = [shard(str(i), (100, 10), (10, 1)) for i in range(5)]
    plan, _ = planned(shards, range(5), [RECORD] * 5)
    assert (plan.runs.digests, len(plan.runs.offset)) == (0, 0)


def test_runs_that_go_far_take_little_space() -> None:
    # a matrix cut by columns: one stretch, however many rows it has
    far = shard("w", (2**20, 64), (64, 1), global_shape=(2**20, 2**20), offset=(0, 5))
    plan = digests.plan_digests(
        table_of([""], [(0, far)], [0]), np.array([2**26], np.uint64), np.zeros(1, np.int64), np.zeros(1, np.int64)
    )
    assert len(plan.runs.offset) == 1
    assert plan.runs.length.tolist() == [2**26]
