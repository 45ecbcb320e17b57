"""Checkpoints are saved to a store as to a directory: no byte is copied on the way, and a failure leaves nothing."""

from __future__ import annotations

import copy
import errno
import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from memory_store import MemoryStore
from typing_extensions import Buffer

import datastates as ds
from datastates import _native
from datastates.errors import SettingsError, StorageError
from datastates.providers import from_state_dict
from datastates.saving.running import Running
from datastates.storage import Location, Traits, register, stores
from datastates.testing import equal

ROOT = "mem://bucket/run"
BLOCK, PIECE = 1 << 20, 1 << 20
OPTIONS: dict[str, Any] = {"host_cache": 8 * BLOCK, "block": BLOCK}


class Uploads(MemoryStore):
    """Notes the pieces of uploads, and calls a function with the name and the number of each."""

    traits = Traits(best_piece=PIECE)

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[type] = []
        self.before: Callable[[Location, int], object] = lambda path, number: None

    def upload(self, path: Location, pieces: Iterator[Buffer], nbytes: int) -> None:
        def watched() -> Iterator[Buffer]:
            for number, piece in enumerate(pieces):
                self.kinds.append(type(piece))
                self.before(path, number)
                yield piece

        super().upload(path, watched(), nbytes)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Uploads:
    monkeypatch.setattr(stores, "KINDS", dict(stores.KINDS))
    register("mem", made := Uploads())
    return made


def state(step: int = 0, size: int = 700_000) -> dict[str, Any]:
    generator = np.random.default_rng(step)
    return {"w": generator.standard_normal((8, size)), "b": generator.standard_normal(7), "step": step, "text": "é"}


def names(store: MemoryStore) -> list[str]:
    return sorted(store.entries(Location("mem://bucket"), deep=True))


def test_a_run_saves_and_restores(store: Uploads) -> None:
    with ds.Checkpointer(ROOT, **OPTIONS) as checkpointer:
        assert checkpointer.directory == ROOT
        assert checkpointer.restore([from_state_dict("model", state())]) is None
        for step in (1, 2):
            taken = checkpointer.snapshot([from_state_dict("model", state(step))], step=step)
            taken.wait_committed()
            assert str(taken.path).startswith(f"{ROOT}/step-0000000{step}.")
            assert taken.report.path == taken.path
            assert taken.report.backend == "handed"
        assert checkpointer.steps() == [1, 2]
        assert checkpointer.latest() == 2
    live = state()
    with ds.Checkpointer(ROOT, **OPTIONS) as checkpointer:
        provider = from_state_dict("model", live)
        restored = checkpointer.restore([provider])
        assert restored is not None
        assert (restored.step, restored.path) == (2, taken.path)
        assert equal(live, state(2))
        assert checkpointer.restore([from_state_dict("model", live)], step=1) is not None
        assert equal(live, state(1))
    assert equal(ds.load(ROOT)["model"], state(2))


def test_it_is_the_file_that_a_directory_would_have(store: Uploads, tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(700, 900), torch.nn.BatchNorm1d(900))
    for place in (tmp_path / "run", ROOT):
        ds.snapshot([from_state_dict("model", module.state_dict())], f"{place}", **OPTIONS).wait_committed()
    (name,) = (name for name in names(store) if name.endswith(".pt"))
    data = store.read_all(Location("mem://bucket") / name)
    (file,) = (tmp_path / "run").glob("*.pt")
    assert len(data) == file.stat().st_size
    stock = io.BytesIO()
    torch.save({"model": module.state_dict()}, stock)
    stock.seek(0)
    expected = torch.load(stock)
    for found in (torch.load(io.BytesIO(data)), torch.load(file)):
        assert equal(found, expected)


def test_extents_go_up_as_they_lie_in_the_host_cache(store: Uploads) -> None:
    ds.snapshot([from_state_dict("model", state())], ROOT, **OPTIONS).wait_committed()
    data = 8 * 700_000 * 8 // BLOCK
    assert store.kinds.count(_native.HandedBytes) >= data
    assert store.kinds.count(bytes) <= 2


class Hoarding(Uploads):
    """Holds pieces until it has a part of its length, as an upload does."""

    def upload(self, path: Location, pieces: Iterator[Buffer], nbytes: int) -> None:
        held: list[Buffer] = []
        data = b""

        def joined() -> Iterator[bytes]:
            for piece in pieces:
                held.append(piece)
                if sum(len(memoryview(one)) for one in held) >= PIECE:
                    yield b"".join(held)
                    held.clear()
            yield b"".join(held)

        data = b"".join(joined())
        self.create(path, data)


@pytest.mark.parametrize("blocks", [2, 3, 4, 5])
@pytest.mark.parametrize("size", [1000, 200_000])
def test_no_store_can_hold_all_blocks(monkeypatch: pytest.MonkeyPatch, blocks: int, size: int) -> None:
    monkeypatch.setattr(stores, "KINDS", dict(stores.KINDS))
    register("mem", Hoarding())
    tensors = {f"{i}": np.full(size + i, i, np.int64) for i in range(40)}
    options = {"host_cache": blocks * BLOCK, "block": BLOCK}
    ds.snapshot([from_state_dict("model", tensors)], ROOT, **options).wait_committed()
    assert equal(ds.load(ROOT)["model"], tensors)


def test_training_goes_on_while_a_store_is_silent(store: Uploads) -> None:
    go_on = threading.Event()
    store.before = lambda path, number: go_on.wait(60)
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = copy.deepcopy(model.state_dict())
    with ds.Checkpointer(ROOT, **OPTIONS) as checkpointer:
        taken = checkpointer.snapshot([from_state_dict("model", model.state_dict())], step=1)
        try:
            model(torch.ones(100)).sum().backward()
            optimizer.step()
            taken.wait_captured(60)
            assert not taken.persisted
        finally:
            go_on.set()
    assert equal(ds.load(ROOT)["model"], before)


@pytest.mark.parametrize("number", [0, 3, 5])
@pytest.mark.parametrize("failing", [StorageError(errno.EACCES, "write", "mem://x"), RuntimeError("lost")])
def test_a_failed_upload_fails_the_snapshot_alone(store: Uploads, number: int, failing: Exception) -> None:
    def fail(path: Location, at: int) -> None:
        if at == number:
            raise failing

    with ds.Checkpointer(ROOT, **OPTIONS, on_error="warn") as checkpointer:
        first = checkpointer.snapshot([from_state_dict("model", state(1))], step=1)
        first.wait_committed()
        before = names(store)
        store.before = fail
        taken = checkpointer.snapshot([from_state_dict("model", state(2))], step=2)
        with pytest.raises(StorageError) as caught:
            taken.wait_committed()
        checkpointer.wait()
        assert caught.value.operation == "write"
        assert str(failing.args[-1] if isinstance(failing, RuntimeError) else "mem://x") in str(caught.value)
        assert names(store) == before
        store.before = lambda path, number: None
        checkpointer.snapshot([from_state_dict("model", state(3))], step=3).wait_committed()
        assert checkpointer.steps() == [1, 3]
    assert equal(ds.load(ROOT)["model"], state(3))


def test_what_is_there_is_not_written_over(store: Uploads) -> None:
    ds.snapshot([from_state_dict("model", state(1))], ROOT, **OPTIONS).wait_committed()
    with pytest.raises(FileExistsError, match="mem://bucket/run exists"):
        ds.snapshot([from_state_dict("model", state(2))], ROOT, **OPTIONS)
    with pytest.raises(ValueError, match="is itself a checkpoint"):
        ds.Checkpointer(ROOT)
    assert equal(ds.load(ROOT)["model"], state(1))


def test_old_ones_are_deleted(store: Uploads) -> None:
    with ds.Checkpointer(ROOT, **OPTIONS, keep_last=2) as checkpointer:
        for step in range(5):
            checkpointer.snapshot([from_state_dict("model", state(step, 100))], step=step).wait_committed()
        checkpointer.wait()
        assert checkpointer.steps() == [3, 4]
    there = {name.split("/")[1].split(".")[0] for name in names(store) if name.endswith((".pt", ".json"))}
    assert there == {"step-00000003", "step-00000004"}


def test_the_best_stay(store: Uploads) -> None:
    for begin in (0, 3):
        with ds.Checkpointer(ROOT, **OPTIONS, keep_best=2) as checkpointer:
            for step, metric in list(enumerate([0.5, 0.25, float("nan"), 0.75, 0.5, 1.0]))[begin : begin + 3]:
                checkpointer.snapshot([from_state_dict("model", state(step, 100))], step=step, metric=metric)
            checkpointer.wait()
    assert {name.split("/")[1].split(".")[0] for name in names(store) if name.endswith((".pt", ".json"))} == {
        *("step-00000001", "step-00000004", "step-00000005")
    }


def test_a_step_that_is_saved_again_supersedes_the_first(store: Uploads) -> None:
    with ds.Checkpointer(ROOT, **OPTIONS) as checkpointer:
        for value in (1, 2):
            checkpointer.snapshot([from_state_dict("model", state(value, 100))], step=7).wait_committed()
        checkpointer.wait()
        assert checkpointer.steps() == [7]
    assert equal(ds.load(ROOT)["model"], state(2, 100))


def test_a_newer_run_keeps_an_older_one_from_saving(store: Uploads, monkeypatch: pytest.MonkeyPatch) -> None:
    older = ds.Checkpointer(ROOT, **OPTIONS, on_error="warn")
    older.snapshot([from_state_dict("model", state(1, 100))], step=1).wait_committed()
    own = [name for name in names(store) if "/.saving-" in name]
    assert len(own) == 1
    newer = Location("mem://bucket") / own[0].replace("saving-", "saving-9")
    store.create(newer, b'{"owner": "other", "host": "there", "pid": 1, "opened": "then"}')
    with pytest.raises(ds.errors.FencedError, match="a newer run saves in mem://bucket/run"):
        older.snapshot([from_state_dict("model", state(2, 100))], step=2).wait_committed()
    older.close()
    assert equal(ds.load(ROOT)["model"], state(1, 100))


def test_ranks_do_not_meet_in_a_store(store: Uploads) -> None:
    for call in (
        lambda: ds.Checkpointer(ROOT, rank=0, world_size=2),
        lambda: ds.snapshot([from_state_dict("model", state())], f"{ROOT}/a", rank=0, world_size=2),
        lambda: ds.restore([from_state_dict("model", state())], ROOT, rank=0, world_size=2),
    ):
        with pytest.raises(SettingsError, match="initialize torch"):
            call()
    assert names(store) == []


class Leaving(MemoryStore):
    """Takes some pieces by a generator of its own, and fails between two of them."""

    def upload(self, path: Location, pieces: Iterator[Buffer], nbytes: int) -> None:
        passed = (piece for piece in pieces)
        held = [next(passed), next(passed)]
        raise StorageError(errno.EIO, "write", str(path), f"write {path}: left after {len(held)}")


def test_a_store_that_fails_lets_go_of_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "KINDS", dict(stores.KINDS))
    register("mem", Leaving())
    with pytest.raises(StorageError, match=r"\.pt: left after 2"):
        ds.snapshot([from_state_dict("model", state())], ROOT, **OPTIONS).wait_committed()


class Short(MemoryStore):
    """Makes an object of some pieces, and returns as if it had them all."""

    def __init__(self, some: Callable[[Iterator[Any]], list[Any] | None]) -> None:
        super().__init__()
        self._some = some

    def upload(self, path: Location, pieces: Iterator[Buffer], nbytes: int) -> None:
        if (some := self._some(pieces)) is not None:
            self.create(path, b"".join(map(bytes, some)))


@pytest.mark.parametrize(
    "some",
    [
        lambda pieces: [],
        lambda pieces: [next(pieces)],
        lambda pieces: [*map(bytes, pieces)][:-1],
        lambda pieces: [*map(bytes, pieces)][1:],
        lambda pieces: [bytes(next(pieces)) for _ in range(8 * 700_000 * 8 // BLOCK + 1)],
        lambda pieces: None if [*map(len, pieces)] else [],
    ],
    ids=["none", "one", "without the last", "without the first", "not taking the last", "no object"],
)
def test_an_object_that_lacks_bytes_is_not_committed(
    monkeypatch: pytest.MonkeyPatch, some: Callable[[Iterator[Any]], list[Any] | None]
) -> None:
    monkeypatch.setattr(stores, "KINDS", dict(stores.KINDS))
    register("mem", Short(some))
    with pytest.raises(StorageError, match=r"the store was given \d+ bytes, and it|not all of it was taken"):
        ds.snapshot([from_state_dict("model", state())], ROOT, **OPTIONS).wait_committed(60)
    with pytest.raises(ds.errors.CheckpointNotFoundError):
        ds.load(ROOT)


class Odd(MemoryStore):
    """Raises an error that is no StorageError at one call of a method, before or after it has done its work."""

    def __init__(self, method: str, number: int, *, after: bool) -> None:
        super().__init__()
        self.left = -1

        def call(path: Any, *given: Any) -> Any:
            if isinstance(path, Location) and path.name.startswith(".saving-"):
                return done(path, *given)
            self.left -= 1
            if self.left or after:
                result = done(path, *given)
                if self.left:
                    return result
            raise KeyError("odd")

        done = getattr(self, method)
        setattr(self, method, call)
        self.begin = lambda: setattr(self, "left", number)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", range(1, 6))
@pytest.mark.parametrize("method", ["look", "entries", "read", "create", "discard", "upload"])
def test_errors_against_the_contract_do_not_tell_less_than_the_store_has(
    monkeypatch: pytest.MonkeyPatch, method: str, number: int, after: bool
) -> None:
    monkeypatch.setattr(stores, "KINDS", dict(stores.KINDS))
    register("mem", store := Odd(method, number, after=after))
    with ds.Checkpointer(ROOT, **OPTIONS, keep_last=1) as checkpointer:
        checkpointer.snapshot([from_state_dict("model", state(1, 100))], step=1).wait_committed()
        checkpointer.wait()
        store.begin()
        try:
            taken = checkpointer.snapshot([from_state_dict("model", state(2, 100))], step=2)
            taken.wait_committed()
            step = 2
        except (KeyError, StorageError):
            step = 1
        store.left = -1
    assert equal(ds.load(ROOT)["model"], state(step, 100))


class Unwritable(MemoryStore):
    """Lets nobody make an object, once it is told so."""

    error: Exception | None = None

    def create(self, path: Location, data: bytes) -> None:
        if self.error is not None:
            raise self.error
        super().create(path, data)


@pytest.mark.parametrize(
    "error", [PermissionError(errno.EACCES, "no"), OSError(errno.EROFS, "no"), NotImplementedError("create")]
)
def test_who_may_not_write_reads_at_once(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(stores, "KINDS", dict(stores.KINDS))
    register("mem", store := Unwritable())
    with ds.Checkpointer(ROOT, **OPTIONS) as checkpointer:
        checkpointer.snapshot([from_state_dict("model", state(1, 100))], step=1).wait_committed()
    store.error = error
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it is asked again"))
    assert equal(ds.load(ROOT)["model"], state(1, 100))


def test_an_upload_ends_with_its_failed_snapshot(store: Uploads, monkeypatch: pytest.MonkeyPatch) -> None:
    came, ended = threading.Event(), threading.Event()

    def upload(path: Location, pieces: Iterator[Buffer], nbytes: int) -> None:
        try:
            for _ in pieces:
                came.set()
        finally:
            ended.set()

    def fail(running: Running) -> None:
        assert came.wait(60)  # all bytes but the end have gone up
        raise StorageError(errno.EIO, "write", "x")

    monkeypatch.setattr(store, "upload", upload)
    monkeypatch.setattr(Running, "_write", fail)
    with pytest.raises(StorageError, match="x"):
        ds.snapshot([from_state_dict("model", {"w": np.zeros(10)})], ROOT, **OPTIONS).wait_committed()
    assert ended.wait(60)
