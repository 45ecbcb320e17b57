"""Reading ahead: a container is read while it is compared, in the same extents, and only where all is wanted."""

from __future__ import annotations

import mmap
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import datastates as ds
from datastates._base.sizes import CHUNK
from datastates.container import zip_frames
from datastates.errors import CorruptError, RestoreError
from datastates.executor.executor import Executor
from datastates.planning import read, write
from datastates.planning.plans import Chunks, ReadPlan
from datastates.providers import from_state_dict
from datastates.restoring import containers_ahead as reading_ahead
from datastates.restoring.restore import Restore
from datastates.state.provider import StateProvider
from datastates.state.runs import Runs

BLOCK = 1 << 20
OPTIONS: dict[str, Any] = {"host_cache": "64MiB", "block": "1MiB"}
SIZES = st.sampled_from([0, 1, 4096, 70_000, BLOCK, 3 * BLOCK]) | st.integers(BLOCK - 4300, BLOCK + 40)
Extents = list[tuple[int, int]]


def extents_of(plan: ReadPlan) -> Extents:
    return list(zip(plan.extent_offset.tolist(), plan.extent_length.tolist(), strict=True))


def read_all(chunks: Chunks, sizes: list[int], offset: np.ndarray) -> Extents:
    """The extents of a plan that reads each record to a destination of its own, none of which begins on a page."""
    n = np.array(sizes, np.uint64)
    plan = read.plan_read(
        wanted=Runs.single(offset.astype(np.int64), np.zeros(len(n), np.int64), n.astype(np.int64)),
        dest=np.arange(len(n), dtype=np.int32),
        dest_nbytes=n,
        in_place=np.zeros(len(n), np.uint8),
        whole=np.ones(len(n), np.uint8),
        chunks=chunks,
        extent_nbytes=4 * CHUNK,
    )
    return extents_of(plan)


@given(st.lists(SIZES, max_size=12), st.integers(0, 12), st.integers(1, 8))
def test_the_first_extents_are_those_of_all(sizes: list[int], first: int, count: int) -> None:
    sizes.sort(reverse=True)
    n = np.array(sizes, np.uint64)
    offset = write.plan_write(n, np.ones(len(n), np.uint8), zip_frames.header_nbytes(len(n)), BLOCK).data_offset
    chunks = read.plan_chunks(offset, n, np.zeros(int((-(-n.astype(np.int64) // CHUNK)).sum()), np.uint32))
    some = read.plan_chunks(offset[:first], n[:first], chunks.crc)
    ahead = read.plan_ahead(some, count, complete=first >= len(n), extent_nbytes=4 * CHUNK)
    every = read_all(chunks, sizes, offset)
    found = extents_of(ahead)
    assert found == every[: len(found)]
    assert first < len(n) or len(found) == min(count, len(every))


# --- restoring


Array = np.ndarray[Any, Any]


def state_of(seed: int) -> dict[str, Array]:
    generator = np.random.default_rng(seed)
    large = {f"large{i}": generator.random(1 << 20, np.float32) for i in range(5)}
    return large | {f"small{i}": generator.random(100, np.float32) for i in range(20)}


def provider_of(state: dict[str, Array], name: str = "model") -> StateProvider:
    return from_state_dict(name, state)


class Begun(list[tuple[Extents, Any]]):
    """For each read-ahead its extents and its handle. The fixture waits for all its bytes before the comparison."""

    def nbytes_left(self) -> list[int]:
        return [ahead.bytes_read for _, ahead in self]


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begun:
    if subprocess.check_output(["stat", "-f", "-c", "%T", tmp_path], text=True) == "tmpfs\n":
        pytest.skip(f"{tmp_path} is in memory, of which nothing is read ahead")
    seen = Begun()
    real = Executor.read_ahead

    def read_ahead(executor: Executor, path: Path, plan: ReadPlan) -> Any:
        ahead = real(executor, path, plan)
        ahead.wait()
        assert ahead.bytes_read
        seen.append((extents_of(plan), ahead))
        return ahead

    monkeypatch.setattr(Executor, "read_ahead", read_ahead)
    # where there is a device, other tests have used it
    monkeypatch.setattr(reading_ahead, "current_device", lambda: None)
    return seen


def drop_from_cache(root: Path) -> Path:
    """Drop the directory's only container from the page cache; returns its path."""
    (path,) = root.rglob("*.pt")
    with path.open("rb") as file:
        os.fsync(file.fileno())  # the page cache keeps what is not written yet
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def overwrite(path: Path, extents: Extents) -> None:
    with path.open("r+b") as file:
        for offset, length in extents:
            file.seek(offset)
            file.write(bytes(length))


def test_four_extents_are_read_ahead_for_each_read_in_flight(tmp_path: Path, begun: Begun) -> None:
    saved, live = state_of(1), state_of(2)
    ds.snapshot([provider_of(saved)], tmp_path / "step-00000001", step=1, **OPTIONS).wait_committed()
    with ds.Checkpointer(tmp_path, queue_depth=4, **OPTIONS) as ckpt:
        for _ in range(3):
            drop_from_cache(tmp_path)
            assert ckpt.restore([provider_of(live)]) is not None
    assert [len(extents) for extents, _ in begun] == [16, 16, 16]
    assert all((live[key] == saved[key]).all() for key in saved)


def on_pages(array: Array) -> Array:
    """An array of zeros as long as another one, that begins on a page."""
    return np.frombuffer(mmap.mmap(-1, array.nbytes), array.dtype)


@pytest.mark.parametrize("place", [np.zeros_like, on_pages])
def test_what_was_read_ahead_is_not_read_again(
    place: Callable[[Array], Array], tmp_path: Path, begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = state_of(1)
    live = {key: place(array) for key, array in saved.items()}
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        ckpt.snapshot([provider_of(saved)], step=1).wait_committed()
        path = drop_from_cache(tmp_path)
        real = Restore._look

        def look(restore: Restore, **how: bool) -> None:
            real(restore, **how)
            # small extents stay: they lie beside the index, and came into the page cache with it
            overwrite(path, [extent for extent in begun[0][0] if extent[1] > 100_000])

        monkeypatch.setattr(Restore, "_look", look)
        restored = ckpt.restore([provider_of(live)])
        assert restored is not None
        assert all(np.array_equal(live[key], saved[key]) for key in saved)
        nbytes = sum(length for _, length in begun[0][0])
        assert nbytes > 20e6
        assert nbytes <= restored.read_nbytes < 1.1 * nbytes
        assert begun.nbytes_left() == [0]
        drop_from_cache(tmp_path)
        with pytest.raises(CorruptError):
            ckpt.restore([provider_of(live)])


def test_a_single_restore_reads_ahead(tmp_path: Path, begun: Begun) -> None:
    saved, live = state_of(1), state_of(2)
    ds.snapshot([provider_of(saved)], tmp_path / "one", **OPTIONS).wait_committed()
    drop_from_cache(tmp_path)
    ds.restore([provider_of(live)], tmp_path / "one", **OPTIONS)
    assert begun.nbytes_left() == [0]
    assert all(np.array_equal(live[key], saved[key]) for key in saved)


def test_what_does_not_fit_changes_nothing_and_leaves_the_cache_free(tmp_path: Path, begun: Begun) -> None:
    saved, live = state_of(1), state_of(2) | {"other": np.ones(3)}
    before = {key: array.copy() for key, array in live.items()}
    with ds.Checkpointer(tmp_path, host_cache="4MiB", block="1MiB") as ckpt:
        ckpt.snapshot([provider_of(saved)], step=1).wait_committed()
        for _ in range(3):
            drop_from_cache(tmp_path)
            with pytest.raises(RestoreError, match="other"):
                ckpt.restore([provider_of(live)])
        assert len(begun) == 3
        assert all(np.array_equal(live[key], before[key]) for key in before)
        ckpt.snapshot([provider_of(live)], step=2).wait_committed()
        assert ckpt.restore([provider_of(live)], step=2).step == 2


def test_a_state_that_lies_elsewhere_is_read_as_it_is(tmp_path: Path, begun: Begun) -> None:
    saved = state_of(1)
    live = {key: np.zeros(2 * len(t), np.float32)[::2] for key, t in saved.items()}
    live["large0"] = np.zeros_like(saved["large0"])
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        ckpt.snapshot([provider_of(saved)], step=1).wait_committed()
        drop_from_cache(tmp_path)
        ckpt.restore([provider_of(live)])
    assert begun.nbytes_left() == [0]
    assert all(np.array_equal(live[key], saved[key]) for key in saved)


@pytest.mark.parametrize("why", ["one of two providers", "little", "nothing", "a device"])
def test_nothing_is_read_ahead_where_not_all_is_wanted(
    why: str, tmp_path: Path, begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {"little": {"a": np.ones(9)}, "nothing": {}}
    saved = [provider_of(states.get(why, state_of(1))), from_state_dict("rest", {"b": np.ones(4), "text": "x"})]
    if why == "a device":
        monkeypatch.setattr(reading_ahead, "current_device", lambda: 0)
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        ckpt.snapshot(saved, step=1).wait_committed()
        drop_from_cache(tmp_path)
        ckpt.restore(saved[:1] if why == "one of two providers" else saved)
    assert begun == []


def test_a_container_without_arrays_is_restored(tmp_path: Path, begun: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_ahead, "AHEAD_MINIMUM", 0)
    live: dict[str, Any] = {"text": "before"}
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        ckpt.snapshot([from_state_dict("rest", {"text": "saved"})], step=1).wait_committed()
        ckpt.restore([from_state_dict("rest", live)])
    assert live == {"text": "saved"}
    assert begun == []
