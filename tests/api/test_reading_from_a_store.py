"""The bytes of objects in a store come as they are needed: straight to their place, each in its own time."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from memory_store import MemoryStore

import datastates as ds
from datastates._base.tasks import Task
from datastates._base.workers import Workers
from datastates.errors import CorruptError, StorageError
from datastates.executor import jobs
from datastates.providers import HostTensorProvider
from datastates.storage import Location, Traits, register, stores

ROOT = "mem://bucket/run"
CACHE = 4 << 20
OPTIONS = {"host_cache": CACHE, "block": "1MiB"}
PIECE = 256 << 10
SHAPE = (1000, 4000)
SMALL, MANY = 1000, 1000
AT_ONCE = 32
"""The calls of a store that the native core makes at a time."""

Before = Callable[[int, memoryview], object]


class Watched(MemoryStore):
    """Notes the memory that it is given, and calls a function before it answers."""

    traits = Traits(best_piece=PIECE)

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[int, int]] = []  # addresses: begin and end
        self.before: Before = lambda offset, into: None

    def read_into(self, path: Location, spans: Sequence[tuple[int, memoryview]]) -> None:
        for offset, into in spans:
            begin = np.frombuffer(into, np.uint8).ctypes.data
            self.given.append((begin, begin + len(into)))
            self.before(offset, into)
        super().read_into(path, spans)


def matrix() -> np.ndarray:
    return np.arange(SHAPE[0] * SHAPE[1], dtype=np.float32).reshape(SHAPE)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Watched]:
    state = {"w": matrix()} | {f"small {i}": np.full(SMALL, i, float) for i in range(MANY)}
    ds.snapshot([HostTensorProvider("model", state)], tmp_path / "run", **OPTIONS).wait_committed()
    made = Watched()
    for file in (tmp_path / "run").iterdir():
        made.create(Location(ROOT) / file.name, file.read_bytes())
    register("mem", made)
    yield made
    del stores.KINDS["mem"]


def outside(store: Watched, *arrays: np.ndarray) -> int:
    """The bytes of memory that the store was given outside of some arrays, each once."""
    marks = sorted({at for pair in store.given for at in pair})
    found = 0
    for begin, end in itertools.pairwise(marks):
        inside = any(a.ctypes.data <= begin and end <= a.ctypes.data + a.nbytes for a in arrays)
        if not inside and any(first <= begin and end <= last for first, last in store.given):
            found += end - begin
    return found


def test_bytes_come_straight_into_new_arrays(store: Watched) -> None:
    loaded = ds.load(ROOT, **OPTIONS)["model"]["w"]
    assert (loaded == matrix()).all()
    assert sum(end - begin for begin, end in store.given) >= loaded.nbytes
    assert outside(store, loaded) <= CACHE


def test_bytes_come_straight_into_arrays_at_any_address(store: Watched, tmp_path: Path) -> None:
    state = {f"layer {i}": np.full(300_001, i, np.float32) for i in range(5)}
    ds.snapshot([HostTensorProvider("model", state)], tmp_path / "layers", **OPTIONS).wait_committed()
    for file in (tmp_path / "layers").iterdir():
        store.create(Location(ROOT).parent / "layers" / file.name, file.read_bytes())
    live = {name: np.zeros(300_002, np.float32)[1:] for name in state}
    ds.restore([HostTensorProvider("model", live)], "mem://bucket/layers", **OPTIONS)
    assert all((live[name] == state[name]).all() for name in state)
    assert store.given
    assert outside(store, *live.values()) == 0


def test_bytes_of_small_arrays_pass_through_the_host_cache(store: Watched) -> None:
    live = {"w": np.zeros(SHAPE, np.float32)} | {f"small {i}": np.zeros(SMALL) for i in range(MANY)}
    ds.restore([HostTensorProvider("model", live)], ROOT, **OPTIONS)
    assert (live["w"] == matrix()).all()
    assert all((live[f"small {i}"] == i).all() for i in range(MANY))
    assert 0 < outside(store, live["w"]) <= CACHE < MANY * SMALL * 8


def test_a_slow_answer_holds_up_no_other(store: Watched) -> None:
    answered, all_others = set[int](), threading.Event()
    first = 2 << 20  # in the middle of the array

    def before(offset: int, into: memoryview) -> None:
        if offset <= first < offset + len(into):
            assert all_others.wait(60)
        answered.add(offset)
        if sum(1 for at in answered.copy() if at > 2 * first) * PIECE > 4 * first:
            all_others.set()

    store.before = before
    assert (ds.load(ROOT, **OPTIONS)["model"]["w"] == matrix()).all()
    assert all_others.is_set()


def test_a_slow_store_holds_up_no_file(store: Watched, tmp_path: Path) -> None:
    go_on, asked = threading.Event(), threading.Event()
    store.before = lambda offset, into: (asked.set(), go_on.wait(60))
    helper = Workers("slow", 1)
    helper.put(slow := Task(lambda: ds.load(ROOT, **OPTIONS)))
    try:
        assert asked.wait(60)
        assert (ds.load(tmp_path / "run")["model"]["w"] == matrix()).all()
    finally:
        go_on.set()
        assert (slow.result()["model"]["w"] == matrix()).all()
        helper.stop()
        helper.join()


def test_damage_in_one_chunk_names_the_object(store: Watched) -> None:
    path = Location(ROOT) / "rank-00000.pt"
    data = bytearray(store.read_all(path))
    data[len(data) // 2] ^= 1
    store.replace(path, bytes(data))
    with pytest.raises(CorruptError, match=f"'model/w' in {path} does not match its checksum") as caught:
        ds.load(ROOT)
    assert (caught.value.key, caught.value.path) == ("model/w", str(path))


class TooFar(StorageError):
    pass


@pytest.mark.parametrize(
    ("raised", "number", "text"),
    [
        (StorageError(13, "get", f"{ROOT}/x"), 13, f"get {ROOT}/x: Permission denied"),
        (TooFar(0, "get", f"{ROOT}/x", "too far"), 0, "^too far$"),
        (TimeoutError(110, "late"), 110, f"read {ROOT}/rank-00000.pt: Connection timed out"),
        (OSError("no number"), 0, f"read {ROOT}/rank-00000.pt"),
        (ZeroDivisionError("oh"), 0, f"^read {ROOT}/rank-00000.pt: ZeroDivisionError: oh$"),
        (KeyboardInterrupt(), 0, f"^read {ROOT}/rank-00000.pt: KeyboardInterrupt: $"),
        (ValueError("\ud800"), 0, f"^read {ROOT}/rank-00000.pt: ValueError$"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_a_store_raises_is_told(store: Watched, raised: BaseException, number: int, text: str) -> None:
    def before(offset: int, into: memoryview) -> None:
        raise raised

    store.before = before
    with pytest.raises(StorageError, match=text) as caught:
        ds.load(ROOT)
    assert caught.value.errno == number
    cause = caught.value.__cause__
    assert cause is raised or (cause is not None and cause.__cause__ is raised)


def test_an_answer_of_another_length_is_told(store: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    read = MemoryStore.read
    monkeypatch.setattr(MemoryStore, "read", lambda self, path, at, n: read(self, path, at, n)[: n if n < PIECE else 1])
    with pytest.raises(StorageError, match=f"read {ROOT}/rank-00000.pt: ValueError: .*different structures"):
        ds.load(ROOT)


def test_memory_is_a_stores_until_it_returns(store: Watched) -> None:
    kept: list[memoryview] = []
    store.before = lambda offset, into: kept.append(into)
    ds.load(ROOT)
    with pytest.raises(ValueError, match="released memoryview"):
        kept[0][0] = 1

    def fail(offset: int, into: memoryview) -> None:
        kept.append(into)
        raise ValueError("\ud800")

    store.before = fail
    with pytest.raises(StorageError, match="ValueError"):
        ds.load(ROOT)
    with pytest.raises(ValueError, match="released memoryview"):
        kept[-1][0] = 1
    held: list[object] = []
    store.before = lambda offset, into: held.append(pickle.PickleBuffer(into))
    with pytest.raises(StorageError, match=f"read {ROOT}/rank-00000.pt: BufferError: memoryview has 1 exported"):
        ds.load(ROOT)


def test_an_interrupted_read_asks_for_nothing_more(store: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, stop = threading.Event(), jobs.ReadJob.stop
    monkeypatch.setattr(jobs.ReadJob, "stop", lambda job: (stop(job), stopped.set()))
    pieces = matrix().nbytes // PIECE
    asked, number = list[int](), itertools.count(1)

    def before(offset: int, into: memoryview) -> None:
        asked.append(offset)
        if next(number) == AT_ONCE:  # two threads could both see so many: a second signal would stop the stopping
            os.kill(os.getpid(), signal.SIGINT)
        assert stopped.wait(60)

    store.before = before
    with pytest.raises(KeyboardInterrupt):
        ds.load(ROOT, **OPTIONS)
    assert len(asked) == AT_ONCE < pieces
    store.before = lambda offset, into: None
    assert (ds.load(ROOT, **OPTIONS)["model"]["w"] == matrix()).all()


def test_threads_keep_what_a_store_keeps_for_them(store: Watched) -> None:
    local, connections = threading.local(), list[int]()

    def before(offset: int, into: memoryview) -> None:
        if not hasattr(local, "connection"):
            local.connection = 1
            connections.append(threading.get_ident())

    store.before = before
    ds.load(ROOT)
    assert 0 < len(connections) <= AT_ONCE < len(store.given)


def test_signals_are_not_blocked_in_a_stores_calls(store: Watched) -> None:
    masks: list[set[int]] = []
    store.before = lambda offset, into: masks.append(set(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
    ds.load(ROOT)
    assert masks.count(set(signal.pthread_sigmask(signal.SIG_BLOCK, []))) == len(masks) > 0
