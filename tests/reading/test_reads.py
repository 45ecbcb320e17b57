"""Reading parts of tensors from several containers into other parts is bit-identical and reads little extra."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
from given import Given
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TorchShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import datastates as ds
from datastates._base.sizes import CHUNK
from datastates.config import IoSettings
from datastates.container import file
from datastates.container.file import Container
from datastates.container.rows import reference
from datastates.errors import CorruptError, StorageError
from datastates.executor.executor import Executor
from datastates.executor.make import make_executor
from datastates.planning.plans import ReadPlan
from datastates.reading.reads import Reads
from datastates.state import arrays, parts
from datastates.state.parts import Part, uncovered
from datastates.state.shards import Shard

LIMIT = 1.05


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    made = make_executor(IoSettings(host_cache="32MiB", block="4MiB"))
    yield made
    made.close()


# --- making containers of parts
# -----------------------------------------------------------------------------------------


def live(key: str, part: Part, array: Any, *, buffer: Any = None) -> Shard:
    """The shard of a part of a tensor; ``array`` holds the part and has its shape."""
    described = arrays.array_shard(key, array) if buffer is None else buffer
    return Shard(
        key=key,
        dtype=described.dtype,
        kind=described.kind,
        shape=part.shape,
        stride=described.stride,
        global_shape=part.global_shape,
        offset=part.offset,
        flat=part.flat,
        buffer=described.buffer,
        buffer_offset=described.buffer_offset,
        source=array,
    )


def save(path: Path, shards: Sequence[Shard]) -> Container:
    ds.snapshot([Given(shards)], path).wait_committed()
    return file.open_container(path / "rank-00000.pt")


def elements(tensor: Any, part: Part) -> Any:
    """A copy of a part of a tensor."""
    if part.flat is not None:
        return tensor.reshape(-1)[slice(*part.flat)].clone()
    assert part.offset is not None
    return tensor[tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape, strict=True))].clone()


def fill(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << 20, shape, generator=generator).to(dtype)


# --- layouts
# -----------------------------------------------------------------------------------------


def bounds(n: int, count: int, *, uneven: bool = False) -> list[tuple[int, int]]:
    """``n`` elements split over ``count`` ranks as torch's chunk does, or at random; some may get none."""
    if uneven:
        cuts = sorted(random.Random(n * count).randint(0, n) for _ in range(count - 1))
    else:
        step = -(-n // count)
        cuts = [min(n, step * i) for i in range(1, count)]
    return list(zip([0, *cuts], [*cuts, n], strict=True))


def along(shape: tuple[int, ...], count: int, dim: int, *, uneven: bool = False) -> list[Part]:
    return [
        Part(
            shape,
            (*shape[:dim], b - a, *shape[dim + 1 :]),
            tuple(a if d == dim else 0 for d in range(len(shape))),
        )
        for a, b in bounds(shape[dim], count, uneven=uneven)
    ]


def flat(shape: tuple[int, ...], count: int) -> list[Part]:
    return [Part(shape, (b - a,), None, (a, b)) for a, b in bounds(math.prod(shape), count, uneven=True)]


def mesh(shape: tuple[int, ...], count: int) -> list[Part]:
    rows = next(r for r in (3, 2, 1) if count % r == 0)
    made = []
    for a, b in bounds(shape[0], rows):
        made += [
            Part(shape, (b - a, d - c, *shape[2:]), (a, c, *[0] * len(shape[2:])))
            for c, d in bounds(shape[1], count // rows)
        ]
    return made


LAYOUTS: dict[str, Callable[[tuple[int, ...], int], list[Part]]] = {
    "rows": lambda shape, n: along(shape, n, 0),
    "uneven rows": lambda shape, n: along(shape, n, 0, uneven=True),
    "columns": lambda shape, n: along(shape, n, 1),
    "flat": flat,
    "mesh": mesh,
}


@dataclass(frozen=True)
class Stored:
    """One state in several containers: rank ``r`` holds part ``r`` of every tensor."""

    tensors: dict[str, torch.Tensor]
    parts: dict[str, list[Part]]
    containers: list[Container]

    def read(self, shards: Sequence[Shard], executor: Executor) -> Any:
        reads = Reads()
        for shard in shards:
            for container in self.containers:
                table = container.index.shards
                reads.add(container, table.row(table.by_key["s/" + shard.key]), shard)
        assert reads.conflict() is None
        return reads.run(executor)


def store(path: Path, tensors: dict[str, torch.Tensor], layout: str, ranks: int) -> Stored:
    split = {key: LAYOUTS[layout](tuple(t.shape), ranks) for key, t in tensors.items()}
    containers = [
        save(
            path / f"{layout}-{ranks}-{r}", [live(k, split[k][r], elements(t, split[k][r])) for k, t in tensors.items()]
        )
        for r in range(ranks)
    ]
    return Stored(tensors, split, containers)


SMALL = {"w": (24, 36), "cube": (6, 10, 5), "short": (3, 4), "none": (0, 7)}


@pytest.mark.long
@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_any_layout_into_any_other(source: str, ranks: int, tmp_path: Path, executor: Executor) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.int8, torch.float64]
    tensors = {k: fill(s, d, i) for i, ((k, s), d) in enumerate(zip(SMALL.items(), dtypes, strict=True))}
    stored = store(tmp_path, tensors, source, ranks)
    for layout in LAYOUTS:
        for wanted in range(1, 9):
            rank = (ranks + wanted) % wanted
            split = {k: LAYOUTS[layout](tuple(t.shape), wanted)[rank] for k, t in tensors.items()}
            shards = [live(k, split[k], torch.zeros(split[k].shape, dtype=t.dtype)) for k, t in tensors.items()]
            tally = stored.read(shards, executor)
            for shard in shards:
                assert torch.equal(shard.source, elements(tensors[shard.key], split[shard.key])), (layout, wanted)
            # arrays this small are verified as a whole
            assert (tally.unverified_nbytes, tally.unverified_keys) == (0, ())
            assert tally.needed_nbytes == sum(s.nbytes or 0 for s in shards)


LARGE = (1536, 2048)


@pytest.mark.long
@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_hardly_more_is_read_than_needed(source: str, ranks: int, tmp_path: Path, executor: Executor) -> None:
    tensors = {"w": fill(LARGE)}
    stored = store(tmp_path, tensors, source, ranks)
    for layout in LAYOUTS:
        for wanted in (1, 3):
            part = LAYOUTS[layout](LARGE, wanted)[wanted // 2]
            shard = live("w", part, torch.zeros(part.shape))
            tally = stored.read([shard], executor)
            assert torch.equal(shard.source, elements(tensors["w"], part)), (layout, wanted)
            assert tally.needed_nbytes == shard.nbytes
            if tally.needed_nbytes >= 4 << 20:
                assert tally.read_nbytes - tally.shared_nbytes <= LIMIT * tally.needed_nbytes, (layout, wanted, tally)
            assert tally.unverified_nbytes <= tally.needed_nbytes
            assert tally.unverified_keys == (("s/w",) if tally.unverified_nbytes else ())


@pytest.mark.parametrize(
    ("source", "dest"), [("flat", "rows"), ("rows", "flat"), ("rows", "uneven rows"), ("mesh", "mesh")]
)
def test_what_is_contiguous_is_verified_but_for_the_edges(
    source: str, dest: str, tmp_path: Path, executor: Executor
) -> None:
    tensors = {"w": fill((8, 1 << 20))}
    stored = store(tmp_path, tensors, source, 4)
    part = max(LAYOUTS[dest]((8, 1 << 20), 3), key=lambda p: p.numel)
    shard = live("w", part, torch.zeros(part.shape))
    tally = stored.read([shard], executor)
    assert torch.equal(shard.source, elements(tensors["w"], part))
    assert tally.needed_nbytes > 4 << 20
    assert tally.read_nbytes <= LIMIT * tally.needed_nbytes
    stretches = sum(int(parts.intersect(stored_part, part).count.sum()) for stored_part in stored.parts["w"])
    assert tally.unverified_nbytes < 2 * CHUNK * stretches


@pytest.mark.parametrize(("mib", "fewest", "longest"), [(3, 3, 1), (24, 16, 2), (300, 16, 8)])
def test_a_small_read_is_cut_so_that_all_workers_have_some(
    mib: int, fewest: int, longest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[ReadPlan] = []
    submit = Executor.submit_read
    monkeypatch.setattr(
        Executor, "submit_read", lambda e, at, plan, *rest: (plans.append(plan), submit(e, at, plan, *rest))[1]
    )
    array = np.zeros(mib << 20, np.uint8)
    ds.snapshot([Given([arrays.array_shard("a", array)])], tmp_path / "c").wait_committed()
    with ds.open(tmp_path / "c") as checkpoint:
        assert len(checkpoint["s/a"]) == len(array)
    (plan,) = plans
    assert len(plan.extent_offset) >= fewest
    assert int(plan.extent_length.max()) <= longest << 20


def test_many_tensors_that_share_a_buffer(tmp_path: Path, executor: Executor) -> None:
    """As ZeRO lays them out: one flat buffer a rank, cut without regard to where a tensor begins."""
    shapes = [(300, 1000), (77,), (999, 501), (1,), (64, 4096), (123_457,)]
    tensors = {f"p{i}": fill(shape, seed=i) for i, shape in enumerate(shapes)}
    everything = torch.cat([t.reshape(-1) for t in tensors.values()])
    starts = np.cumsum([0, *(t.numel() for t in tensors.values())]).tolist()

    def rank_shards(begin: int, end: int, buffer: torch.Tensor) -> list[Shard]:
        memory = arrays.array_shard("", buffer)
        made = []
        for (key, tensor), start in zip(tensors.items(), starts, strict=False):
            a, b = max(begin, start), min(end, start + tensor.numel())
            if a < b:
                part = Part(tuple(tensor.shape), (b - a,), None, (a - start, b - start))
                one = live(key, part, buffer[a - begin : b - begin], buffer=memory)
                made.append(replace(one, buffer_offset=4 * (a - begin)))
        return made

    containers = [
        save(tmp_path / str(r), rank_shards(a, b, everything[a:b].clone()))
        for r, (a, b) in enumerate(bounds(len(everything), 3))
    ]
    for wanted in (1, 2, 5):
        for begin, end in bounds(len(everything), wanted, uneven=True):
            target = torch.zeros(end - begin)
            reads = Reads()
            for shard in rank_shards(begin, end, target):
                for container in containers:
                    table = container.index.shards
                    if (key := "s/" + shard.key) in table.by_key:
                        reads.add(container, table.row(table.by_key[key]), shard)
            assert reads.conflict() is None
            tally = reads.run(executor)
            assert torch.equal(target, everything[begin:end])
            assert tally.needed_nbytes == target.nbytes
            assert tally.read_nbytes <= max(LIMIT * target.nbytes, 2 << 20)


# --- strides
# -----------------------------------------------------------------------------------------

STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row-major": lambda t: t,
    "column-major": lambda t: t.t().contiguous().t(),
    "gaps in rows": lambda t: torch.zeros(t.shape[0], t.shape[1] + 5)[:, 2:-3].copy_(t),
    "every second": lambda t: torch.zeros(t.shape[0], 2 * t.shape[1])[:, ::2].copy_(t),
    "transposed with gaps": lambda t: torch.zeros(t.shape[1], t.shape[0] + 3).t()[:-3].copy_(t),
}


@pytest.mark.parametrize("source", STRIDES)
@pytest.mark.parametrize("dest", STRIDES)
def test_all_strides(source: str, dest: str, tmp_path: Path, executor: Executor) -> None:
    tensor = fill((40, 30))
    halves = along((40, 30), 2, 1)
    containers = [
        save(tmp_path / str(r), [live("w", part, STRIDES[source](elements(tensor, part)))])
        for r, part in enumerate(halves)
    ]
    for part in (Part((40, 30), (17, 21), (5, 4)), Part((40, 30), (611,), None, (77, 688))):
        zeros = torch.full(part.shape, -1.0)
        lying = STRIDES[dest](zeros) if zeros.ndim == 2 else torch.full((2 * len(zeros),), -1.0)[::2]
        around = lying.untyped_storage()
        before = torch.tensor([], dtype=torch.float32).set_(around).clone()
        reads = Reads()
        for container in containers:
            reads.add(container, container.index.shards.row(0), arrays_part("w", part, lying))
        assert reads.conflict() is None
        tally = reads.run(executor)
        assert torch.equal(lying, elements(tensor, part))
        lying.fill_(-1.0)
        assert torch.equal(torch.tensor([], dtype=torch.float32).set_(around), before), (
            "memory beside it was written to"
        )
        assert tally.unverified_nbytes == 0


def arrays_part(key: str, part: Part, array: Any) -> Shard:
    """The shard of a part to restore into. It describes the array itself, not a copy, whatever its strides."""
    described = arrays.destination(key, array)
    return live(key, part, array, buffer=described)


def test_numpy_arrays_and_scalars(tmp_path: Path, executor: Executor) -> None:
    matrix, scalar = np.arange(48.0).reshape(6, 8), np.array(7, np.int16)
    container = save(
        tmp_path / "c",
        [live("m", Part.whole((6, 8)), matrix), live("x", Part((), (1,), None, (0, 1)), scalar.reshape(1))],
    )
    rows = {row.key: row for row in map(container.index.shards.row, range(2))}
    into, number = np.zeros((8, 3)).T, np.zeros((), np.int16)
    reads = Reads()
    reads.add(container, rows["s/m"], arrays_part("m", Part((6, 8), (3, 8), (2, 0)), into))
    reads.add(container, rows["s/x"], arrays_part("x", Part.whole(()), number))
    reads.run(executor)
    assert (into == matrix[2:5]).all()
    assert number == 7


def test_a_range_of_numpy_arrays_out_of_columns(tmp_path: Path, executor: Executor) -> None:
    """Also for ``float8_e5m2``, which NumPy itself does not know."""
    for number, dtype in enumerate((np.dtype(np.int16), np.dtype(ml_dtypes.float8_e5m2))):
        matrix = np.arange(48).astype(np.int8).astype(dtype).reshape(6, 8)
        columns = np.ascontiguousarray(matrix.T).T
        container = save(tmp_path / str(number), [live("m", Part.whole((6, 8)), columns)])
        into, reads = np.zeros(2 * 21, dtype)[::2], Reads()
        reads.add(container, container.index.shards.row(0), arrays_part("m", Part((6, 8), (21,), None, (10, 31)), into))
        reads.run(executor)
        assert into.tobytes() == matrix.reshape(-1)[10:31].tobytes()


def test_a_parameter_takes_a_part_in_place(tmp_path: Path, executor: Executor) -> None:
    tensor = fill((8, 6))
    container = save(tmp_path / "c", [live("w", Part.whole((8, 6)), tensor)])
    parameter = torch.nn.Parameter(torch.zeros(6, 4).t())
    version = parameter._version
    reads = Reads()
    reads.add(container, container.index.shards.row(0), arrays_part("w", Part((8, 6), (4, 6), (4, 0)), parameter))
    reads.run(executor)
    assert torch.equal(parameter, tensor[4:])
    assert parameter.requires_grad
    assert parameter._version > version


def test_small_stretches_go_to_a_device_by_way_of_one_copy(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = store(tmp_path, {"w": fill((64, 65536))}, "rows", 2)

    def queued(part: Part) -> set[int]:
        target, reads = torch.zeros(part.shape), Reads()
        with monkeypatch.context() as patch:
            where = arrays.memory(target)
            patch.setattr(arrays, "place", lambda shard, stride: replace(where, device=0))
            for container in stored.containers:
                reads.add(container, container.index.shards.row(0), live("w", part, target))
        used = {device for queue in reads._queues.values() for device in queue.memory[1].tolist()}
        if used == {-1}:
            reads.run(executor)
            assert torch.equal(target, elements(stored.tensors["w"], part))
        return used

    assert queued(Part((64, 65536), (64, 1000), (0, 5))) == {-1}
    assert queued(Part((64, 65536), (64, 60_000), (0, 5))) == {0}  # stretches of 240,000 bytes
    assert queued(Part((64, 65536), (10, 65536), (27, 0))) == {0}  # one stretch in each container


# --- what does not fit, and what fails
# -----------------------------------------------------------------------------------------


def test_parts_of_another_tensor_are_refused(tmp_path: Path) -> None:
    container = save(tmp_path / "c", [live("w", Part.whole((4, 4)), fill((4, 4)))])
    with pytest.raises(ValueError, match="different shapes"):
        Reads().add(
            container, container.index.shards.row(0), live("w", Part((4, 5), (2, 5), (0, 0)), torch.zeros(2, 5))
        )


def test_a_dtensor_is_filled_where_its_local_tensor_lies(tmp_path: Path, executor: Executor) -> None:
    stored = store(tmp_path, {"w": fill((10, 8))}, "columns", 4)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        # strided, so it is read by way of a landing
        rows = DTensor.from_local(torch.zeros(8, 5).T, mesh, [TorchShard(0)])
        stored.read([arrays.destination("w", rows)], executor)
        assert torch.equal(rows.to_local(), stored.tensors["w"][5:])
    finally:
        dist.destroy_process_group()


def test_elements_that_nobody_has_are_counted(tmp_path: Path, executor: Executor) -> None:
    stored = store(tmp_path, {"w": fill((10, 8))}, "rows", 4)
    rows = [c.index.shards.row(0) for c in stored.containers]
    shard = live("w", Part((10, 8), (10, 4), (0, 4)), torch.zeros(10, 4))
    held = [row.part for row in rows]
    assert uncovered(shard.part, held) == 0
    assert uncovered(shard.part, held[:2]) == 4 * 4
    assert uncovered(shard.part, [held[0], held[3]]) == 6 * 4
    assert uncovered(shard.part, []) == 40
    assert held[1] == stored.parts["w"][1]


def test_sharing_that_was_not_saved_is_a_conflict(tmp_path: Path) -> None:
    stored = store(tmp_path, {"a": fill((64, 8)), "b": fill((64, 8), seed=1)}, "rows", 2)
    memory = torch.zeros(8, 8)
    one, other = Part((64, 8), (8, 4), (28, 0)), Part((64, 8), (4, 8), (40, 0))

    def conflict(*shards: Shard) -> str | None:
        reads = Reads()
        for shard in shards:
            for container in stored.containers:
                table = container.index.shards
                reads.add(container, table.row(table.by_key["s/" + shard.key]), shard)
        return reads.conflict()

    first = live("a", one, memory.view(-1)[:32].view(8, 4))
    assert conflict(first, live("b", other, memory.view(-1)[32:].view(4, 8))) is None
    assert conflict(first, live("b", other, memory.view(-1)[28:60].view(4, 8))) in ("s/a", "s/b")
    assert conflict(first, first) is None  # tied: the same bytes to the same memory
    assert conflict() is None


@pytest.mark.parametrize("same", [True, False])
def test_two_containers_share_memory_where_their_bytes_are_the_same(same: bool, tmp_path: Path) -> None:
    tensors = [fill((64, 8)), fill((64, 8)) if same else torch.ones(64, 8)]
    both = [save(tmp_path / str(r), [live("w", Part.whole((64, 8)), tensor)]) for r, tensor in enumerate(tensors)]
    reads = Reads()
    for container in both:
        reads.add(
            container, container.index.shards.row(0), live("w", Part((64, 8), (64, 4), (0, 0)), torch.zeros(64, 4))
        )
    assert reads.conflict() is None
    into = live("w", Part((64, 8), (64, 4), (0, 0)), torch.zeros(64, 4))
    for container in both:
        reads.add(container, container.index.shards.row(0), into)
    assert reads.conflict() == (None if same else "s/w")


def flip(container: Container, offset: int) -> None:
    with container.path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_a_flipped_byte_in_any_container_is_found(tmp_path: Path, executor: Executor) -> None:
    tensors = {"w": fill((3 << 20,))}
    stored = store(tmp_path, tensors, "rows", 3)
    for container in stored.containers:
        at = int(container.index.records.data_offset[0]) + CHUNK + 17
        flip(container, at)
        shard = live("w", Part((3 << 20,), (3 << 20,), None, (0, 3 << 20)), torch.zeros(3 << 20))
        with pytest.raises(CorruptError, match="'s/w'"):
            stored.read([shard], executor)
        flip(container, at)
    assert stored.read([shard], executor).unverified_nbytes == 0


def test_a_flipped_byte_in_a_part_too_small_to_count_is_found(tmp_path: Path, executor: Executor) -> None:
    stored = store(tmp_path, {"w": fill((64, 64))}, "rows", 2)
    flip(stored.containers[1], int(stored.containers[1].index.records.data_offset[0]) + 5)
    shard = live("w", Part((64, 64), (64, 8), (0, 8)), torch.zeros(64, 8))  # without the byte that is wrong
    with pytest.raises(CorruptError, match="'s/w'"):
        stored.read([shard], executor)


def test_whole_arrays_are_verified_whatever_that_takes(tmp_path: Path, executor: Executor) -> None:
    table = fill((64, 65536))
    container = save(tmp_path / "c", arrays.shards_of(["all", "row"], [table, table[33]], [True, True]))
    rows = {row.key: row for row in map(container.index.shards.row, range(2))}
    row = rows["s/row"]
    reads, into = Reads(), torch.zeros(65536)
    reads.add(container, row, arrays.destination("row", into))
    reads.add(container, row, live("row", Part((65536,), (65536,), None, (0, 65536)), torch.zeros(65536)))
    assert reads.run(executor).unverified_nbytes == 0
    assert torch.equal(into, table[33])
    assert reference(row).key == "s/row"


def test_a_lost_container_fails_after_all_others_have_ended(tmp_path: Path, executor: Executor) -> None:
    stored = store(tmp_path, {"w": fill((1 << 20,))}, "rows", 3)
    stored.containers[1].path.unlink()
    target = torch.zeros(1 << 20)
    with pytest.raises(StorageError, match=r"rank-00000\.pt"):
        stored.read([live("w", Part.whole((1 << 20,)), target)], executor)
    assert torch.equal(target[: -(-(1 << 20) // 3)], elements(stored.tensors["w"], stored.parts["w"][0]))
