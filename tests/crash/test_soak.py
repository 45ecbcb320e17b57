"""Many snapshots of random states: every one kept loads, and no descriptor, thread or memory is left over."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hold import held
from random_states import differences, random_array, random_tree

import datastates as ds
from datastates import _native
from datastates._base import faults
from datastates.commit import newest
from datastates.commit.tiers import tier_of
from datastates.errors import StorageError
from datastates.formats.own import verify_container
from datastates.providers import HostTensorProvider, PickledObjectProvider, from_state_dict
from datastates.reading.every_container import open_checkpoint

OPTIONS: dict[str, Any] = {"host_cache": "2MiB", "block": "1MiB"}
PATIENCE = 20.0
"""Seconds that threads may take to end."""


def rounds(short: int, full: int) -> pytest.MarkDecorator:
    """Run a test with a few rounds, and with all of them among the long tests."""
    return pytest.mark.parametrize("rounds", [short, pytest.param(full, marks=pytest.mark.by_hand)])


def state_of(step: int) -> dict[str, Any]:
    rng = random.Random(step)
    return {
        "lazy": {f"{i}": random_array(rng) for i in range(rng.randint(0, 6))},
        "tree": {"root": random_tree(rng)},
        "object": random_tree(rng, 2),
    }


def providers_of(state: dict[str, Any]) -> list[ds.StateProvider]:
    return [
        HostTensorProvider("lazy", state["lazy"], lazy=True),
        from_state_dict("tree", state["tree"]),
        PickledObjectProvider("object", get=lambda: state["object"], set=lambda _: None),
    ]


def assert_holds(path: Path, step: int) -> None:
    opened, containers = open_checkpoint(path)
    assert opened.step == step
    assert [p for c in containers for p in verify_container(c, lambda _: None)] == []
    assert differences(ds.load(path, **OPTIONS), state_of(step)) == []


def resident() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return sorted(found)


def in_use() -> Counter[object]:
    """Python's threads, the kernel's threads and the open files."""
    open_files = descriptors()
    return Counter([*threading.enumerate(), *os.listdir("/proc/self/task"), *open_files])


def in_use_at_first() -> Counter[object]:
    """What is in use once the threads of other tests have ended: nothing has changed for a while."""
    gc.collect()
    found = [in_use()]
    while len(found) < 10 or found[-10:] != found[-1:] * 10:
        time.sleep(0.01)
        found.append(in_use())
    return found[-1]


def assert_in_use(before: Counter[object]) -> None:
    """Check that nothing new is in use, once threads that were told to end have had the time to.

    A thread of an earlier test may end meanwhile.
    """
    gc.collect()
    end = time.monotonic() + PATIENCE
    while in_use() - before and time.monotonic() < end:
        time.sleep(0.01)
    assert in_use() - before == Counter()


@pytest.mark.long
@rounds(63, 310)
def test_random_snapshots_leave_nothing_behind(rounds: int, backend: str, tmp_path: Path) -> None:
    rng = random.Random(7)
    before = in_use_at_first()
    warm = 0
    with ds.Checkpointer(tmp_path, keep_last=5, keep_every=50, io_backend=backend, on_error="warn", **OPTIONS) as ckpt:
        for step in range(1, rounds + 1):
            if step % 25 == 0:
                _native.arm_fault(rng.choice(["write", "open", "sync"]), "fail", errno.EIO, 1, 1)
            ckpt.snapshot(providers_of(state_of(step)), step=step)
            if step % 25 == 0:
                ckpt.wait()
                _native.clear_faults()
            if rng.random() < 0.05:
                ckpt.wait()
                last = ckpt.latest()
                assert last is not None
                assert ckpt.restore(providers_of(state_of(last))).step == last
            if step == rounds // 5:
                warm = resident()
        ckpt.wait()
        grown = resident() - warm
        failures = ckpt.failures
    assert grown < 64 << 20
    assert 1 <= failures <= rounds // 25
    assert_in_use(before)
    committed = newest.committed(tier_of(tmp_path))
    assert list(committed)[-1] == rounds
    assert len(committed) >= 5
    assert sorted(tmp_path.iterdir()) == sorted(committed.values())
    for step, path in committed.items():
        assert_holds(path, step)


@pytest.mark.by_hand
@pytest.mark.parametrize("rounds", [100])
def test_single_snapshots_restores_and_loads_leave_nothing_behind(rounds: int, tmp_path: Path) -> None:
    def once(step: int) -> None:
        path = tmp_path / f"{step}"
        ds.snapshot(providers_of(state_of(step)), path, step=step, **OPTIONS).wait_committed()
        assert_holds(path, step)
        assert ds.restore(providers_of(state_of(step)), path, **OPTIONS).step == step

    def join() -> None:
        for thread in threading.enumerate():  # of engines that were told to end
            if thread.name.startswith("datastates"):
                thread.join()

    for step in range(rounds // 5):
        once(step)
    join()
    before = in_use_at_first()
    warm = resident()
    for step in range(rounds // 5, rounds):
        once(step)
    join()
    assert resident() - warm < 64 << 20
    assert_in_use(before)


@pytest.mark.by_hand
@pytest.mark.parametrize("rounds", [60])
def test_checkpointers_opened_and_closed_leave_nothing_behind(rounds: int, backend: str, tmp_path: Path) -> None:
    def once(step: int) -> None:
        with ds.Checkpointer(tmp_path, keep_last=2, io_backend=backend, **OPTIONS) as ckpt:
            ckpt.snapshot(providers_of(state_of(step)), step=step)

    for step in range(5):
        once(step)
    before = in_use_at_first()
    warm = resident()
    for step in range(5, rounds):
        once(step)
    assert resident() - warm < 64 << 20
    assert_in_use(before)
    assert list(newest.committed(tier_of(tmp_path))) == [rounds - 2, rounds - 1]


@pytest.mark.by_hand
@pytest.mark.parametrize("fails", [False, True], ids=["committed", "failed"])
def test_a_snapshot_kept_after_close_keeps_neither_threads_nor_cache(fails: bool, tmp_path: Path) -> None:
    before = in_use_at_first()
    ckpt = ds.Checkpointer(tmp_path, on_error="warn", host_cache="64MiB", block="1MiB")
    big = np.ones(4_000_000)
    ckpt.snapshot(
        [HostTensorProvider("m", {"a": big}, lazy=True)], step=0
    ).wait_committed()  # now the cache is allocated
    if fails:
        _native.arm_fault("write", "fail", errno.EIO, 1, 1)
    kept = ckpt.snapshot([HostTensorProvider("m", {"a": big}, lazy=True)], step=1)
    ckpt.wait()
    held = resident()
    ckpt.close()
    del ckpt
    assert (kept.committed, isinstance(kept.exception(), StorageError)) == (not fails, fails)
    assert_in_use(before)
    assert held - resident() > 24 << 20
    assert kept.report.nbytes == big.nbytes


def provider_of_a_copy(torch: Any) -> tuple[ds.StateProvider, list[Any]]:
    """A provider of a tensor that nobody else holds, and weak references to the tensors that it has made."""
    made: list[Any] = []

    def value() -> dict[str, Any]:
        tensor = torch.zeros(1_000_000)
        made.append(weakref.ref(tensor))
        return {"a": tensor}

    return from_state_dict("model", value), made


@pytest.mark.long
@pytest.mark.parametrize("point", ["open", "write", "sync", "store.rename"])
def test_a_failed_snapshot_lets_go_of_the_state(point: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    provider, gone = provider_of_a_copy(torch)
    with ds.Checkpointer(tmp_path, on_error="warn", **OPTIONS) as ckpt:
        if "." in point:
            faults.arm(faults.Fault(point, "fail", errno.EIO))
        else:
            _native.arm_fault(point, "fail", errno.EIO, 1, 1)
        kept = ckpt.snapshot([provider], step=1)
        ckpt.wait()
        assert not kept.committed
        gc.collect()
        assert gone[0]() is None


def test_a_captured_snapshot_lets_go_of_the_state_while_it_is_being_written(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    provider, gone = provider_of_a_copy(torch)
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt, held("sync"):
        snapshot = ckpt.snapshot([provider], step=1)
        snapshot.wait_captured()
        while gone[0]() is not None and not snapshot.committed:
            time.sleep(0.01)
            gc.collect()
        assert not snapshot.committed
