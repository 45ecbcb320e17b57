"""Arrays that follow those accessed in order are read before they are asked for."""

from __future__ import annotations

import builtins
import logging
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from given import Given
from views import views

import datastates as ds
from datastates.container import file as container_file
from datastates.errors import ClosedError, CorruptError, DatastatesError
from datastates.providers import from_state_dict
from datastates.reading import new_tensors, tensors_ahead
from datastates.reading.new_tensors import FoundTensor

SMALL: dict[str, Any] = {"host_cache": "4MiB", "block": "1MiB"}
COUNT = 40
NBYTES = 4000
"""Bytes of each array of :func:`path`."""
KEYS = [f"s/w{i:02}" for i in range(COUNT)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    state = {f"w{i:02}": torch.full((NBYTES // 4,), float(i)) for i in range(COUNT)}
    ds.snapshot([from_state_dict("s", state)], tmp_path / "c").wait_committed()
    return tmp_path / "c"


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """All batches that are read ahead; the window begins with four arrays and is no larger than sixteen."""
    made: list[Batch] = []

    class Noted(Batch):
        def __init__(self, found: Mapping[str, FoundTensor], *arguments: Any) -> None:
            super().__init__(found, *arguments)
            made.append(self)

    monkeypatch.setattr(tensors_ahead, "Batch", Noted)
    monkeypatch.setattr(tensors_ahead, "FIRST_NBYTES", 4 * NBYTES)
    monkeypatch.setattr(tensors_ahead, "MOST_NBYTES", 16 * NBYTES)
    return made


class Batch(new_tensors.Batch):
    """A batch that tells its keys, and whether it was closed."""

    def __init__(self, found: Mapping[str, FoundTensor], *arguments: Any) -> None:
        super().__init__(found, *arguments)
        self.keys = list(found)
        self.closed = False

    def close(self) -> None:
        super().close()
        self.closed = True


def read(batches: list[Batch]) -> list[str]:
    return [key for batch in batches for key in batch.keys]


def check(array: Any, key: str) -> None:
    assert (array == float(key[-2:])).all(), key


@pytest.mark.parametrize("first", [1, 1 << 20, 1 << 30])
def test_what_is_read_ahead_is_what_is_read_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, ahead: list[Batch]
) -> None:
    monkeypatch.setattr(tensors_ahead, "FIRST_NBYTES", first)
    monkeypatch.setattr(tensors_ahead, "MOST_NBYTES", 1 << 30)
    state = {
        "big": torch.arange(800_000, dtype=torch.float64),
        "numpy": np.arange(70_000, dtype=np.int16),
        "half": torch.randn(33, 5).to(torch.bfloat16),
        **views(),
        "last": torch.ones(3),
    }
    ds.snapshot([from_state_dict("s", state)], tmp_path / "c").wait_committed()
    with ds.open(tmp_path / "c", **SMALL) as checkpoint:
        alone = {key: checkpoint[key] for key in reversed(list(checkpoint))}
        assert ahead == []
        items = dict(checkpoint.items())
        assert list(items) == list(checkpoint) == [f"s/{key}" for key in state]
        assert read(ahead) == list(checkpoint)[1:]
        assert tensors_ahead.nbytes_of(checkpoint._stored.whole(["s/columns"])[0]) > 2_000_000  # with what lies between
        for key, value in checkpoint.items():
            for found in (items[key], value):
                assert type(found) is type(alone[key]), key
                assert (found.shape, found.dtype) == (alone[key].shape, alone[key].dtype), key
                assert (found == alone[key]).all(), key
        assert items["s/transposed"].stride() == alone["s/transposed"].stride()
        assert len(checkpoint.items()) == len(checkpoint.values()) == len(state)


def test_it_begins_with_the_second_access_in_order(path: Path, ahead: list[Batch]) -> None:
    with ds.open(path, **SMALL) as checkpoint:
        for number in (7, 5, 0, 3, 3, 1):
            check(checkpoint[KEYS[number]], KEYS[number])
        assert ahead == []
        check(checkpoint[KEYS[2]], KEYS[2])
        assert read(ahead) == KEYS[3:7]


def test_it_begins_with_the_first_array_when_the_keys_were_listed(path: Path, ahead: list[Batch]) -> None:
    with ds.open(path, **SMALL) as checkpoint:
        for i, key in enumerate(checkpoint):
            check(checkpoint[key], key)
            if i == 0:
                assert read(ahead) == KEYS[1:5]


def test_no_more_is_read_ahead_than_was_wanted(path: Path, ahead: list[Batch]) -> None:
    with ds.open(path, **SMALL) as checkpoint:
        for i, key in enumerate(checkpoint):
            check(checkpoint[key], key)
            untaken = len(read(ahead)) - i
            assert min(4, COUNT - i - 1) <= untaken <= min(4 + i, 16)
    assert read(ahead) == KEYS[1:]


def test_a_larger_array_than_the_window_is_read_alone(tmp_path: Path, ahead: list[Batch]) -> None:
    names = ("a", "b", "large", "c", "d")
    state = {key: torch.ones((17 if key == "large" else 1) * NBYTES // 4) for key in names}
    ds.snapshot([from_state_dict("s", state)], tmp_path / "c").wait_committed()
    with ds.open(tmp_path / "c", **SMALL) as checkpoint:
        order = list(checkpoint)
        for key, array in checkpoint.items():
            assert array.sum() == state[key.removeprefix("s/")].numel()
    after = order.index("s/large") + 1
    assert read(ahead) == [*order[1 : after - 1], *order[after:]]


def test_arrays_of_the_window_are_taken_in_any_order_and_read_once(
    path: Path, ahead: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ds.open(path, **SMALL) as checkpoint:
        check(checkpoint[KEYS[0]], KEYS[0])
        check(checkpoint[KEYS[1]], KEYS[1])
        monkeypatch.setattr(type(checkpoint), "_read_alone", lambda *_: pytest.fail("read alone"))
        for number in (5, 3, 4, 2):
            check(checkpoint[KEYS[number]], KEYS[number])


def test_many_threads_go_through_the_keys(path: Path, ahead: list[Batch]) -> None:
    with ds.open(path, **SMALL) as checkpoint, ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            for key, found in zip(KEYS, pool.map(checkpoint.__getitem__, KEYS), strict=True):
                check(found, key)
    assert ahead


def test_an_array_that_is_accessed_again_is_read_again(path: Path, ahead: list[Batch]) -> None:
    with ds.open(path, **SMALL) as checkpoint:
        for key in KEYS[:5]:
            checkpoint[key].zero_()
        for key in KEYS[:5]:
            check(checkpoint[key], key)


def test_access_in_order_elsewhere_gives_up_the_window(path: Path, ahead: list[Batch]) -> None:
    with ds.open(path, **SMALL) as checkpoint:
        for number in (0, 1, 20):
            check(checkpoint[KEYS[number]], KEYS[number])
        first = list(ahead)
        assert not any(batch.closed for batch in first)
        check(checkpoint[KEYS[21]], KEYS[21])
        assert all(batch.closed for batch in first)
        assert read(ahead[len(first) :]) == KEYS[22:26]
        check(checkpoint[KEYS[3]], KEYS[3])


def test_what_was_given_out_is_not_kept(path: Path, ahead: list[Batch]) -> None:
    with ds.open(path, framework="np", **SMALL) as checkpoint:
        for array in checkpoint.values():
            while array.base is not None:
                array = array.base
            memory = weakref.ref(array)
            del array
            assert memory() is None


def test_no_array_is_given_out_on_another_stream_than_it_was_allocated_on(
    path: Path, ahead: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch reuses memory for its own stream without waiting for another one that still uses it."""
    stream = 1
    monkeypatch.setattr(tensors_ahead.NextTensors, "_current_stream", lambda _: stream)
    with ds.open(path, **SMALL) as checkpoint:
        for key in KEYS[:3]:
            check(checkpoint[key], key)
        first = [batch for batch in ahead if not {*KEYS[:3]}.issuperset(batch.keys)]
        stream = 2
        check(checkpoint[KEYS[3]], KEYS[3])
        assert all(batch.closed for batch in first)
        check(checkpoint[KEYS[4]], KEYS[4])
        made = len(ahead)
        stream = 1  # as in another thread, which asked for an array before the window began
        checkpoint._ahead.fill(checkpoint._running)
        assert len(ahead) == made


def test_a_key_that_cannot_be_one_harms_no_other_access(path: Path, ahead: list[Batch]) -> None:
    with ds.open(path, **SMALL) as checkpoint:
        wrong: list[Any] = [["s"], 5, "", "s/none"]
        for key in wrong:
            with pytest.raises(KeyError):
                checkpoint[key]
            check(checkpoint[KEYS[0]], KEYS[0])
        assert ahead == []


def test_closing_stops_it(path: Path, ahead: list[Batch]) -> None:
    with ds.open(path, **SMALL) as checkpoint:
        items = iter(checkpoint.items())
        for key in KEYS[:3]:
            check(next(items)[1], key)
    assert [batch.closed for batch in ahead if not {*KEYS[:3]}.issuperset(batch.keys)] == [True] * (len(ahead) - 2)
    with pytest.raises(ClosedError, match=KEYS[3]):
        next(items)


def test_closing_is_told_to_those_who_wait(path: Path, ahead: list[Batch], monkeypatch: pytest.MonkeyPatch) -> None:
    taking, closed = threading.Event(), threading.Event()
    take = Batch.take

    def late(batch: Batch, key: str) -> Any:
        taking.set()
        assert closed.wait(60)
        return take(batch, key)

    monkeypatch.setattr(tensors_ahead, "FIRST_NBYTES", 8 * NBYTES)  # two arrays in a batch
    checkpoint = ds.open(path, **SMALL)
    checkpoint[KEYS[0]]
    checkpoint[KEYS[1]]
    monkeypatch.setattr(Batch, "take", late)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(checkpoint.__getitem__, KEYS[2])
        assert taking.wait(60)
        checkpoint.close()
        closed.set()
        with pytest.raises(ClosedError, match=KEYS[2]):
            waiting.result(60)


def test_damage_is_an_error_of_its_array_alone(path: Path, ahead: list[Batch]) -> None:
    (file,) = path.glob("*.pt")
    index = container_file.open_container(file).index
    with builtins.open(file, "r+b") as raw:
        raw.seek(int(index.records.data_offset[index.shards.record[index.shards.by_key[KEYS[7]]]]) + 5)
        raw.write(b"\xff")
    with ds.open(path, **SMALL) as checkpoint:
        for key in checkpoint:
            if key == KEYS[7]:
                with pytest.raises(CorruptError, match=key) as caught:
                    checkpoint[key]
                assert (caught.value.key, caught.value.path) == (key, str(file))
            else:
                check(checkpoint[key], key)
    assert KEYS[7] in read(ahead)


def test_what_cannot_be_looked_up_is_an_error_of_its_array_alone(
    tmp_path: Path, ahead: list[Batch], caplog: pytest.LogCaptureFixture
) -> None:
    array = np.full(NBYTES // 4, 3.0, np.float32)
    shards = [
        ds.array_shard(f"w{i:02}", array.copy(), global_shape=(array.size * (1 + (i == 4)),), offset=(0,))
        for i in range(10)
    ]
    ds.snapshot([Given(shards)], tmp_path / "c").wait_committed()
    with caplog.at_level(logging.INFO), ds.open(tmp_path / "c", **SMALL) as checkpoint:
        for key in checkpoint:
            if key == KEYS[4]:
                with pytest.raises(DatastatesError, match=f"{key}.*only a part"):
                    checkpoint[key]
            else:
                assert (checkpoint[key] == 3).all()
    assert sum("reading ahead ends" in record.message for record in caplog.records) == 1


def test_memory_that_is_not_there_for_it_fails_nothing(
    path: Path, ahead: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(tensors_ahead, "Batch", refuse)
    with ds.open(path, **SMALL) as checkpoint:
        for key, array in checkpoint.items():
            check(array, key)


def test_of_several_ranks_no_container_is_opened_for_it(tmp_path: Path, ahead: list[Batch]) -> None:
    size = NBYTES // 8

    def save(rank: int) -> None:
        halves = {f"w{i:02}": torch.full((size,), float(i)) for i in range(COUNT)}
        part = {"global_shape": (2 * size,), "offset": (rank * size,)}
        shards = [ds.array_shard(key, half, **part) for key, half in halves.items()]
        ds.snapshot([Given(shards)], tmp_path / "c", rank=rank, world_size=2).wait_committed()

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(save, range(2)))
    with ds.open(tmp_path / "c", **SMALL) as checkpoint:
        for key in KEYS[:5]:
            check(checkpoint[key], key)
        assert ahead == []
        for key, array in checkpoint.items():
            assert array.shape == (2 * size,)
            check(array, key)
        assert read(ahead) == KEYS[1:]
