"""A restore sees the snapshots that its own checkpointer has in flight, however slow the storage is."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hold import END, held
from steps import OPTIONS, array_of, providers

import datastates as ds
from datastates import _native
from datastates.errors import StorageError
from datastates.providers import HostTensorProvider


def target() -> tuple[Any, list[HostTensorProvider]]:
    array = np.zeros(100_000)
    return array, [HostTensorProvider("model", {"a": array})]


def test_the_only_checkpoint_is_in_flight(tmp_path: Path) -> None:
    array, live = target()
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt, held("sync", until=END):
        snapshot = ckpt.snapshot(providers(1), step=1)
        assert not snapshot.committed
        assert ckpt.restore(live).step == 1
    assert np.array_equal(array, array_of(1))


@pytest.mark.parametrize("wish", [None, 2])
def test_the_newest_is_in_flight(wish: int | None, tmp_path: Path) -> None:
    array, live = target()
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        ckpt.snapshot(providers(1), step=1).wait_committed()
        with held("sync", until=END):
            ckpt.snapshot(providers(2), step=2)
            assert ckpt.latest() == 1
            assert ckpt.restore(live, step=wish).step == 2
    assert np.array_equal(array, array_of(2))


def test_one_that_fails_in_flight_is_told_as_ever(tmp_path: Path) -> None:
    array, live = target()
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        ckpt.snapshot(providers(1), step=1).wait_committed()
        _native.arm_fault("sync", "fail", errno.EIO, 1, 1)
        ckpt.snapshot(providers(2), step=2)
        assert ckpt.restore(live).step == 1
        assert np.array_equal(array, array_of(1))
        with pytest.raises(StorageError, match="Input/output error"):
            ckpt.snapshot(providers(3), step=3)


@pytest.mark.parametrize("name", ["run", "link"])
def test_another_checkpointer_of_the_process_has_it_in_flight(name: str, tmp_path: Path) -> None:
    array, live = target()
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    old = ds.Checkpointer(tmp_path / "run", **OPTIONS)
    with held("sync", until=END):
        old.snapshot(providers(1), step=1)
        with ds.Checkpointer(tmp_path / name, **OPTIONS) as new:
            restored = new.restore(live)
            assert restored is not None
            assert restored.step == 1
            new.snapshot(providers(2), step=2)
    old.close()
    assert np.array_equal(array, array_of(1))


def test_a_checkpointer_of_another_directory_is_not_waited_for(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path / "one", **OPTIONS) as one, ds.Checkpointer(tmp_path / "two", **OPTIONS) as two:
        two.snapshot(providers(2), step=2).wait_committed()
        with held("sync"):
            snapshot = one.snapshot(providers(1), step=1)
            restored = two.restore(target()[1])
            assert restored is not None
            assert not snapshot.committed
