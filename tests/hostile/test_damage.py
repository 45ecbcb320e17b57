"""Accidental damage of a small checkpoint: truncation at every length, and a flipped bit in every byte."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import datastates as ds
from datastates.checkpointer import Checkpointer
from datastates.errors import DatastatesError
from datastates.formats.own import verify_container
from datastates.providers import HostTensorProvider, PickledObjectProvider, from_state_dict
from datastates.reading.every_container import open_checkpoint
from datastates.state.provider import StateProvider

SMALL = {"host_cache": "2MiB", "block": "1MiB", "io_backend": "pwrite", "io_threads": 1}


class State:
    """A state with values of several kinds; ``take()`` gives all of them."""

    def __init__(self, scale: int) -> None:
        grid = np.arange(6, dtype=np.float32).reshape(2, 3) * scale
        self.tree = {"grid": grid, "view": grid.T, "host": np.arange(3) * scale, "list": [scale, "text"]}
        self.named = {"a": np.arange(4) * scale, "b": np.full((2,), scale, ml_dtypes.bfloat16)}
        self.loop: dict[str, Any] = {"epoch": scale}

    def providers(self) -> list[StateProvider]:
        return [
            from_state_dict("tree", self.tree),
            HostTensorProvider("named", self.named),
            PickledObjectProvider("loop", get=lambda: self.loop, set=self.loop.update),
        ]

    def take(self) -> Any:
        return plain([self.tree, self.named, self.loop])


def plain(value: Any) -> Any:
    """Arrays as lists, so that two states compare."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    return (str(value.dtype), value.tolist()) if hasattr(value, "tolist") else value


GOOD = State(1).take()


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    with ds.Checkpointer(tmp_path / "run", **SMALL) as made:
        made.snapshot(State(1).providers(), step=3).wait_committed()
        yield made


@pytest.fixture
def container(checkpointer: Checkpointer) -> Path:
    return checkpointer.directory / "step-00000003" / "rank-00000.pt"


def verify(checkpoint: Path) -> bool:
    """Whether nothing is wrong with a checkpoint."""
    try:
        return not [p for c in open_checkpoint(checkpoint)[1] for p in verify_container(c, lambda _: None)]
    except DatastatesError:
        return False


def restore(checkpointer: Checkpointer) -> Any:
    """The restored values, or None when restoring is refused."""
    state = State(0)
    try:
        checkpointer.restore(state.providers())
    except DatastatesError:
        return None
    return state.take()


def load(path: Path) -> Any:
    """The loaded values, or None when loading is refused."""
    try:
        value = ds.load(path, **SMALL)
    except DatastatesError:
        return None
    return plain(list(value.values())) if list(value) == ["tree", "named", "loop"] else value


def flip(path: Path, position: int, mask: int) -> None:
    with path.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, position)[0]
        os.pwrite(file.fileno(), bytes([byte ^ mask]), position)


def undetected(path: Path, check: Callable[[], bool]) -> list[int]:
    """The positions of bytes at which ``check`` fails while one bit is flipped. The bit depends on the position."""
    found = []
    for position in range(path.stat().st_size):
        flip(path, position, 1 << position % 8)
        if not check():
            found.append(position)
        flip(path, position, 1 << position % 8)
    return found


def test_undamaged_checkpoint_is_whole(checkpointer: Checkpointer, container: Path) -> None:
    assert verify(container.parent)
    assert restore(checkpointer) == GOOD
    assert load(container.parent) == GOOD
    assert load(container) == GOOD
    assert container.stat().st_size < 10_000


@pytest.mark.by_hand
def test_verify_finds_every_flipped_bit(container: Path) -> None:
    assert undetected(container, lambda: not verify(container.parent)) == []


@pytest.mark.by_hand
def test_restore_finds_every_flipped_bit_that_matters_to_it(checkpointer: Checkpointer, container: Path) -> None:
    assert undetected(container, lambda: restore(checkpointer) in (None, GOOD)) == []


@pytest.mark.by_hand
@pytest.mark.long
def test_load_finds_every_flipped_bit_that_matters_to_it(container: Path) -> None:
    assert undetected(container, lambda: load(container.parent) in (None, GOOD)) == []


@pytest.mark.parametrize("seed", range(3))
def test_verify_finds_many_flipped_bits_at_once(container: Path, seed: int) -> None:
    choose, good = random.Random(seed), container.read_bytes()
    for _ in range(100):
        damaged = bytearray(good)
        for position in choose.sample(range(len(good)), 8):
            damaged[position] ^= 1 << choose.randrange(8)
        container.write_bytes(damaged)
        assert not verify(container.parent)


@pytest.mark.by_hand
def test_truncation_at_every_length_is_found(checkpointer: Checkpointer, container: Path) -> None:
    for length in reversed(range(container.stat().st_size)):
        os.truncate(container, length)
        assert not verify(container.parent)
        assert restore(checkpointer) is None
        assert load(container) is None


def test_bytes_behind_the_end_are_found(checkpointer: Checkpointer, container: Path) -> None:
    good = container.read_bytes()
    for extra in (b"\0", b"\n", bytes(4096), good, good[-66:]):
        container.write_bytes(good + extra)
        assert not verify(container.parent)
        assert restore(checkpointer) is None


def test_container_of_another_attempt_is_found(checkpointer: Checkpointer, container: Path) -> None:
    checkpointer.snapshot(State(1).providers(), step=4).wait_committed()
    other = checkpointer.directory / "step-00000004" / "rank-00000.pt"
    container.write_bytes(other.read_bytes())
    assert not verify(container.parent)
    assert load(container.parent) is None


def test_damaged_tensor_is_named_by_verify_and_by_restore(checkpointer: Checkpointer, container: Path) -> None:
    source = open_checkpoint(container.parent)[1][0]
    record = int(source.index.shards.record[source.index.shards.by_key["named/a"]])
    flip(container, int(source.index.records.data_offset[record]), 1)
    assert [p.key for p in verify_container(source, lambda _: None)] == ["named/a"]
    with pytest.raises(DatastatesError, match="named/a"):
        checkpointer.restore(State(0).providers())


def test_damaged_object_is_named_by_verify_and_by_restore(checkpointer: Checkpointer, container: Path) -> None:
    source = open_checkpoint(container.parent)[1][0]
    flip(container, source.index.objects[-1].offset + 3, 1)
    assert [p.key for p in verify_container(source, lambda _: None)] == ["loop"]
    state = State(0)
    with pytest.raises(DatastatesError, match="loop"):
        checkpointer.restore(state.providers())
    assert state.take() == State(0).take()


@pytest.mark.parametrize("name", ["rank-00000.pt", "manifest.json"])
def test_a_pipe_in_the_place_of_a_file_is_refused(checkpointer: Checkpointer, container: Path, name: str) -> None:
    container.with_name(name).unlink()
    os.mkfifo(container.with_name(name))
    assert not verify(container.parent)
    assert restore(checkpointer) is None
    assert load(container.parent) is None
    checkpointer.snapshot(State(2).providers(), step=4).wait_committed()
    assert restore(checkpointer) == State(2).take()
