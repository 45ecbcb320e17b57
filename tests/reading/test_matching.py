"""Parts of tensors in many files are queued in columns where they are stretches, and only if all of each is there."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from given import Given

import datastates as ds
from datastates.container.file import Container, open_container
from datastates.errors import FormatError
from datastates.executor.make import make_executor
from datastates.reading.matching import Live, match
from datastates.reading.reads import Reads
from datastates.reading.tensors import Found, Held
from datastates.state import arrays
from datastates.state.parts import Part
from datastates.state.shards import Shard

SHAPE = (8, 6)
WHOLE = Part.whole(SHAPE)


def shard(part: Part, array: np.ndarray, key: str = "w") -> Shard:
    place = {"flat": part.flat} if part.flat is not None else {"offset": part.offset}
    return arrays.array_shard(key, array, global_shape=part.global_shape, **place)


def saved(path: Path, parts: Sequence[Part], order: str = "C", dtype: type = np.float32) -> list[Container]:
    """A file for each part of a tensor of consecutive numbers."""
    numbers = np.arange(np.prod(SHAPE), dtype=dtype).reshape(SHAPE)
    made = []
    for i, part in enumerate(parts):
        ds.snapshot(
            [Given([shard(part, np.array(elements(numbers, part), order=order))])], path / str(i)
        ).wait_committed()
        made.append(open_container(path / str(i) / "rank-00000.pt"))
    return made


def elements(array: np.ndarray, part: Part) -> np.ndarray:
    if part.flat is not None:
        return array.ravel()[slice(*part.flat)]
    assert part.offset is not None
    return array[tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape, strict=True))]


def found(files: Sequence[Container], wanted: int = 1) -> Found:
    like = files[0].shards.row(0)
    return Found([like] * wanted, [Held(file, np.arange(wanted), np.zeros(wanted, np.int64)) for file in files])


def matched(files: Sequence[Container], *shards: Shard) -> tuple[Sequence[bool], Reads]:
    reads = Reads()
    held = found(files, len(shards)).held
    return match(Live.of_shards(shards), held, lambda i: f"s/{shards[i].key}", reads)[0].tolist(), reads


def read(reads: Reads) -> None:
    with contextlib.closing(make_executor(ds.config.IoSettings(host_cache="8MiB", block="1MiB"))) as made:
        reads.run(made)


ROWS = [Part(SHAPE, (3, 6), (0, 0)), Part(SHAPE, (5, 6), (3, 0))]
COLUMNS = [Part(SHAPE, (8, 3), (0, 0)), Part(SHAPE, (8, 3), (0, 3))]
FLAT = [Part(SHAPE, (20,), None, (0, 20)), Part(SHAPE, (28,), None, (20, 48))]
STRETCHES = {"rows": ROWS, "flat": FLAT, "whole": [WHOLE], "twice": [WHOLE, ROWS[1]]}


@pytest.mark.parametrize("layout", STRETCHES)
@pytest.mark.parametrize(
    "part", [WHOLE, ROWS[1], FLAT[1], Part(SHAPE, (1, 4), (2, 1)), Part(SHAPE, (0,), None, (5, 5))]
)
def test_stretches_are_queued_from_all_files(layout: str, part: Part, tmp_path: Path) -> None:
    live = np.zeros(part.shape, np.float32)
    taken, reads = matched(saved(tmp_path, STRETCHES[layout]), shard(part, live))
    assert taken == [True]
    read(reads)
    assert np.array_equal(live, elements(np.arange(48, dtype=np.float32).reshape(SHAPE), part))


@pytest.mark.parametrize(
    ("parts", "order", "live"),
    [
        (COLUMNS, "C", shard(WHOLE, np.zeros(SHAPE, np.float32))),
        (ROWS, "C", shard(COLUMNS[0], np.zeros((8, 3), np.float32))),
        (ROWS, "F", shard(WHOLE, np.zeros(SHAPE, np.float32))),
        (ROWS, "C", shard(WHOLE, np.zeros(SHAPE, np.float32, order="F"))),
        (ROWS, "C", shard(WHOLE, np.zeros((8, 12), np.float32)[:, ::2])),
        (ROWS, "C", shard(WHOLE, np.zeros(SHAPE, np.float64))),
        (ROWS[1:], "C", shard(WHOLE, np.zeros(SHAPE, np.float32))),
    ],
    ids=["stored columns", "live columns", "stored strides", "live strides", "live gaps", "types", "lost"],
)
def test_all_else_is_left(parts: list[Part], order: str, live: Shard, tmp_path: Path) -> None:
    taken, reads = matched(saved(tmp_path, parts, order), live)
    assert taken == [False]
    assert reads.nbytes == 0


def test_a_tensor_is_matched_whole_or_left_whole(tmp_path: Path) -> None:
    parts = [shard(part, np.zeros(part.shape, np.float32)) for part in (ROWS[1], ROWS[0])]
    taken, reads = matched(saved(tmp_path, ROWS[1:]), *parts)
    assert taken == [False, False]
    assert reads.nbytes == 0


def test_tied_tensors_are_read_once(tmp_path: Path) -> None:
    live = np.zeros(SHAPE, np.float32)
    taken, reads = matched(saved(tmp_path, ROWS), shard(WHOLE, live), shard(WHOLE, live))
    assert taken == [True, True]
    assert reads.nbytes == live.nbytes


@pytest.mark.parametrize("part", [COLUMNS[1], FLAT[1], ROWS[1]])
def test_a_part_that_is_stored_as_it_is_needs_not_be_a_stretch(part: Part, tmp_path: Path) -> None:
    live = np.zeros(part.shape, np.float32)
    taken, reads = matched(saved(tmp_path, [part]), shard(part, live))
    assert taken == [True]
    assert reads.nbytes == live.nbytes
    read(reads)
    assert np.array_equal(live, elements(np.arange(48, dtype=np.float32).reshape(SHAPE), part))


def test_a_box_that_is_stored_twice_is_left(tmp_path: Path) -> None:
    live = np.zeros((8, 3), np.float32)
    taken, reads = matched(saved(tmp_path, [COLUMNS[0], COLUMNS[0]]), shard(COLUMNS[0], live))
    assert taken == [False]
    assert reads.nbytes == 0


@pytest.mark.parametrize(
    "other", [Part((8, 7), (8, 6), (0, 0)), Part((48,), (48,), (0,)), Part((1, 8, 6), (1, 8, 6), (0, 0, 0))]
)
def test_a_tensor_of_another_shape_is_left(other: Part, tmp_path: Path) -> None:
    taken, reads = matched(saved(tmp_path, [WHOLE]), shard(other, np.zeros(other.shape, np.float32)))
    assert taken == [False]
    assert reads.nbytes == 0


def test_files_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    files = [*saved(tmp_path / "a", ROWS), *saved(tmp_path / "b", ROWS, dtype=np.float64)]
    live = np.zeros(SHAPE, np.float32)
    assert matched(files, shard(WHOLE, live))[0] == [False]
    with pytest.raises(FormatError, match="'s/w' is of another type or shape"):
        found(files)[0]


def test_rows_are_made_when_they_are_asked_for(tmp_path: Path) -> None:
    files = saved(tmp_path, [*ROWS, Part(SHAPE, (0,), None, (0, 0))])
    one = found(files)
    assert len(one) == 1
    assert [(file.path, row.part) for file, row in one[0]] == [(f.path, p) for f, p in zip(files, ROWS, strict=False)]
