"""A failing disk fails the snapshot with operation, path and errno; training, the next snapshot and restore go on."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hold import held

import datastates as ds
from datastates import _native
from datastates._base import faults
from datastates._base.faults import Fault
from datastates.commit import fence, newest
from datastates.commit.tiers import tier_of
from datastates.errors import StorageError
from datastates.formats.own import verify_container
from datastates.providers import HostTensorProvider
from datastates.reading.every_container import open_checkpoint
from datastates.state.provider import StateProvider

OPTIONS: dict[str, Any] = {"host_cache": "2MiB", "block": "1MiB"}
COMMIT_STEPS = [
    (f"store.{operation}", operation, nth)
    for operation, hits in [
        ("mkdir", 1),
        ("lock", 1),
        ("open", 1),
        ("write", 1),
        ("sync", 1),
        ("close", 1),
        ("sync_directory", 2),
        ("rename", 1),
        ("unlock", 1),
    ]
    for nth in range(1, hits + 1)
]
CONTAINER_STEPS = [
    (operation, operation, nth)
    for operation, numbers in [
        ("open", (1,)),
        ("allocate", (1,)),
        ("write", (1, 3, 5)),
        ("sync", (1,)),
        ("close", (1,)),
    ]
    for nth in numbers
]


def state_of(step: int) -> dict[str, Any]:
    return {"a": np.full(500_000, step, np.float64), "b": np.arange(1000) * step}


def update(state: dict[str, Any], step: int) -> None:
    for key, array in state_of(step).items():
        state[key][...] = array


def providers_of(state: dict[str, Any]) -> list[StateProvider]:
    return [HostTensorProvider("model", state, lazy=True)]


def arm(point: str, action: str, value: int = 0, nth: int = 1, count: int = 1) -> None:
    if "." in point:
        faults.arm(Fault(point, action, value, nth))
    else:
        _native.arm_fault(point, action, value, nth, count)


def disarm() -> None:
    faults.clear()
    _native.clear_faults()


def assert_holds(root: Path, step: int) -> None:
    """Check that the newest checkpoint is that of ``step``, whole and right."""
    assert newest.find(newest.given(root, is_checkpoint=False)) == newest.committed(tier_of(root))[step]
    _, containers = open_checkpoint(newest.find(newest.given(root, is_checkpoint=False)))
    assert [p for c in containers for p in verify_container(c, lambda _: None)] == []
    loaded = ds.load(root)["model"]
    assert all(np.array_equal(loaded[key], array) for key, array in state_of(step).items())


def entries(root: Path) -> list[str]:
    return sorted(e.name for e in root.iterdir() if e.name != fence.FOLDER)


def fail_one_of_three(
    root: Path, break_it: Callable[[], object], mend_it: Callable[[], object], **options: Any
) -> StorageError:
    """Take snapshots 1, 2 and 3 in one run, of which 2 fails; returns its error."""
    state = state_of(0)
    with ds.Checkpointer(root, **OPTIONS, **options) as ckpt:
        update(state, 1)
        ckpt.snapshot(providers_of(state), step=1).wait_committed()
        update(state, 2)
        break_it()
        failed = ckpt.snapshot(providers_of(state), step=2)
        with pytest.raises(StorageError) as caught:
            failed.wait_committed()
        ckpt.gate()
        update(state, 7)  # training goes on
        mend_it()
        assert (failed.committed, failed.report.state, failed.exception()) == (False, "failed", caught.value)
        if root.exists() and ckpt.steps():
            assert entries(root) == ["step-00000001"]
            assert ckpt.restore(providers_of(state)).step == 1
            assert all(np.array_equal(state[key], array) for key, array in state_of(1).items())
        update(state, 3)
        ckpt.snapshot(providers_of(state), step=3).wait_committed()
        assert_holds(root, 3)
        assert 2 not in ckpt.steps()
    assert tier_of(root).debris() == []
    return caught.value


@pytest.mark.long
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize(("point", "operation", "nth"), COMMIT_STEPS)
def test_a_failing_commit_fails_its_snapshot_only(
    point: str, operation: str, nth: int, number: int, tmp_path: Path
) -> None:
    error = fail_one_of_three(tmp_path / "run", lambda: arm(point, "fail", number, nth), disarm)
    assert (error.errno, error.operation) == (number, operation)
    assert str(error.filename).startswith(str(tmp_path / "run"))
    assert os.strerror(number) in str(error)


@pytest.mark.long
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=["ENOSPC", "EDQUOT"])
@pytest.mark.parametrize(("point", "operation", "nth"), CONTAINER_STEPS)
def test_a_failing_container_fails_its_snapshot_only(
    point: str, operation: str, nth: int, number: int, backend: str, tmp_path: Path
) -> None:
    error = fail_one_of_three(tmp_path, lambda: arm(point, "fail", number, nth), disarm, io_backend=backend)
    assert (error.errno, error.operation) == (number, operation)
    assert Path(str(error.filename)).parent.parent == tmp_path
    assert os.strerror(number) in str(error)


@pytest.mark.parametrize(("point", "operation", "nth"), [step for step in CONTAINER_STEPS if step[0] != "allocate"])
def test_a_container_on_a_broken_disk_fails_its_snapshot_only(
    point: str, operation: str, nth: int, backend: str, tmp_path: Path
) -> None:
    error = fail_one_of_three(tmp_path, lambda: arm(point, "fail", errno.EIO, nth), disarm, io_backend=backend)
    assert (error.errno, error.operation) == (errno.EIO, operation)


@pytest.mark.parametrize("number", [errno.EIO, errno.ERANGE, errno.EPERM, errno.ENOTTY])
def test_a_file_system_that_allocates_nothing_holds_checkpoints(number: int, backend: str, tmp_path: Path) -> None:
    arm("allocate", "fail", number, count=0)
    with ds.Checkpointer(tmp_path, io_backend=backend, **OPTIONS) as ckpt:
        ckpt.snapshot(providers_of(state_of(1)), step=1).wait_committed()
    disarm()
    assert_holds(tmp_path, 1)


def test_every_step_of_the_commit_is_broken_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: set[str] = set()
    monkeypatch.setattr(faults, "is_armed", lambda: True)
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        monkeypatch.setattr(faults, "hit", lambda point, path: passed.add(point))
        ckpt.snapshot(providers_of(state_of(1)), step=1).wait_committed()
    looks = {"store.list", "store.read", "store.stat"}
    assert {point for point in passed if point.startswith("store.")} - looks == {point for point, _, _ in COMMIT_STEPS}


def test_a_disk_that_stays_broken_fails_every_snapshot_until_it_is_mended(tmp_path: Path) -> None:
    state = state_of(1)
    with ds.Checkpointer(tmp_path, on_error="warn", **OPTIONS) as ckpt:
        _native.arm_fault("write", "fail", errno.EIO)
        for step in range(1, 5):
            with pytest.raises(StorageError, match="Input/output error"):
                ckpt.snapshot(providers_of(state), step=step).wait_committed()
        assert entries(tmp_path) == []
        _native.clear_faults()
        ckpt.snapshot(providers_of(state), step=5).wait_committed()
        assert ckpt.steps() == [5]
        assert ckpt.failures == 4


@pytest.mark.parametrize(
    ("point", "action", "count"),
    [
        ("write", "short", 0),
        ("write", "eintr", 5),
        ("open", "eintr", 2),
        ("allocate", "eintr", 2),
        ("close", "eintr", 2),
        ("sync", "eintr", 2),
    ],
)
def test_short_and_interrupted_calls_of_a_snapshot_just_work(
    point: str, action: str, count: int, backend: str, tmp_path: Path
) -> None:
    arm(point, action, count=count)
    with ds.Checkpointer(tmp_path, io_backend=backend, **OPTIONS) as ckpt:
        ckpt.snapshot(providers_of(state_of(1)), step=1).wait_committed()
    disarm()
    assert_holds(tmp_path, 1)


@pytest.mark.parametrize(
    ("point", "action", "count"), [("read", "short", 0), ("read", "eintr", 5), ("open", "eintr", 2)]
)
def test_short_and_interrupted_calls_of_a_restore_just_work(
    point: str, action: str, count: int, backend: str, tmp_path: Path
) -> None:
    state = state_of(0)
    with ds.Checkpointer(tmp_path, io_backend=backend, **OPTIONS) as ckpt:
        ckpt.snapshot(providers_of(state_of(1)), step=1).wait_committed()
        arm(point, action, count=count)
        assert ckpt.restore(providers_of(state)).step == 1
    assert all(np.array_equal(state[key], array) for key, array in state_of(1).items())


@pytest.mark.parametrize(("point", "operation"), [("store.read", "read"), ("open", "open"), ("read", "read")])
def test_a_failing_restore_says_so_and_the_next_one_works(
    point: str, operation: str, backend: str, tmp_path: Path
) -> None:
    state = state_of(0)
    with ds.Checkpointer(tmp_path, io_backend=backend, **OPTIONS) as ckpt:
        ckpt.snapshot(providers_of(state_of(1)), step=1).wait_committed()
        arm(point, "fail", errno.EIO)
        with pytest.raises(StorageError) as caught:
            ckpt.restore(providers_of(state))
        assert (caught.value.errno, caught.value.operation) == (errno.EIO, operation)
        assert Path(str(caught.value.filename)).parent == tmp_path / "step-00000001"
        disarm()
        assert ckpt.restore(providers_of(state)).step == 1
    assert all(np.array_equal(state[key], array) for key, array in state_of(1).items())


@pytest.mark.parametrize("operation", ["rename", "sync_directory", "remove"])
def test_a_failing_deletion_is_logged_and_made_up_for(
    operation: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = state_of(0)
    # the commit passes some of these points before the deletion does
    nth = {"rename": 2, "sync_directory": 3, "remove": 1}[operation]
    with ds.Checkpointer(tmp_path, keep_last=1, max_in_flight=1, **OPTIONS) as ckpt:
        ckpt.snapshot(providers_of(state), step=1).wait_committed()
        update(state, 2)
        arm(f"store.{operation}", "fail", errno.EIO, nth)
        with caplog.at_level(logging.WARNING, "datastates"):
            ckpt.snapshot(providers_of(state), step=2).wait_committed()
            ckpt.snapshot(providers_of(state), step=3).wait_committed()
    assert any(operation in record.getMessage() for record in caplog.records)
    assert ckpt.failures == 0
    assert list(newest.committed(tier_of(tmp_path))) == [3]
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        ckpt.snapshot(providers_of(state), step=4)
    assert entries(tmp_path) == ["step-00000003", "step-00000004"]


def test_the_directory_vanishes_under_a_snapshot(tmp_path: Path) -> None:
    root = tmp_path / "run"
    state = state_of(1)
    with ds.Checkpointer(root, **OPTIONS) as ckpt:
        with held():
            failed = ckpt.snapshot(providers_of(state), step=1)
            while not list(root.rglob("*.pt")):  # a file that appears meanwhile would make the removal fail
                time.sleep(0.001)
            shutil.rmtree(root)
        with pytest.raises(StorageError) as caught:
            failed.wait_committed()
        assert caught.value.errno == errno.ENOENT
        assert str(caught.value.filename).startswith(str(root))
        with pytest.raises(StorageError, match=r"run is gone: the directory .* was deleted"):
            ckpt.snapshot(providers_of(state), step=1).wait_committed()
        assert not root.exists()
    with ds.Checkpointer(root, **OPTIONS) as ckpt:
        ckpt.snapshot(providers_of(state), step=1)
    assert_holds(root, 1)


def test_the_directory_is_replaced_by_a_file(tmp_path: Path) -> None:
    root = tmp_path / "run"
    state = state_of(1)
    with ds.Checkpointer(root, on_error="warn", **OPTIONS) as ckpt:
        ckpt.snapshot(providers_of(state), step=1).wait_committed()
        root.rename(tmp_path / "away")
        root.write_text("not a directory")
        with pytest.raises(StorageError, match="run is a file now") as caught:
            ckpt.snapshot(providers_of(state), step=2).wait_committed()
        assert (caught.value.errno, caught.value.filename) == (errno.ENOTDIR, str(root))
        root.unlink()
        (tmp_path / "away").rename(root)
        ckpt.snapshot(providers_of(state), step=3).wait_committed()
        assert ckpt.steps() == [1, 3]


def test_a_checkpointer_below_a_regular_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError) as caught:
        ds.Checkpointer(tmp_path / "file" / "run")
    assert caught.value.errno in (errno.ENOTDIR, errno.EEXIST)
    assert caught.value.operation == "mkdir"
    assert str(caught.value.filename).startswith(str(tmp_path / "file"))


@pytest.mark.parametrize("name", ["run", "run/deeper"])
def test_a_single_snapshot_below_a_regular_file_fails_without_stopping_training(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    failed = ds.snapshot(providers_of(state_of(1)), tmp_path / "file" / name, **OPTIONS)
    with pytest.raises(StorageError) as caught:
        failed.wait_committed()
    assert caught.value.errno in (errno.ENOTDIR, errno.EEXIST)
    assert str(caught.value.filename).startswith(str(tmp_path / "file"))


@pytest.mark.parametrize("point", ["store.rename", "store.sync_directory", "sync", "open"])
def test_a_failed_single_snapshot_leaves_nothing(point: str, tmp_path: Path) -> None:
    arm(point, "fail", errno.EIO)
    with pytest.raises(StorageError, match="Input/output error"):
        ds.snapshot(providers_of(state_of(1)), tmp_path / "one", **OPTIONS).wait_committed()
    disarm()
    assert entries(tmp_path) == []
    ds.snapshot(providers_of(state_of(1)), tmp_path / "one", **OPTIONS).wait_committed()
    assert np.array_equal(ds.load(tmp_path / "one")["model"]["a"], state_of(1)["a"])


LIMITED = """
import resource, sys
import numpy as np
import datastates as ds
from datastates.errors import StorageError
from datastates.providers import HostTensorProvider
root, backend = sys.argv[1:]
small, big = ([HostTensorProvider("model", {"a": np.arange(n, dtype=np.float64)}, lazy=True)] for n in (1000, 500_000))
with ds.Checkpointer(root, host_cache="2MiB", block="1MiB", io_backend=backend) as ckpt:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    ckpt.snapshot(small, step=1).wait_committed()
    failed = ckpt.snapshot(big, step=2)
    try:
        failed.wait_committed()
    except StorageError as error:
        print(error.errno, error.operation, error.filename)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    print(ckpt.steps())
    ckpt.snapshot(big, step=3).wait_committed()
    print(ckpt.steps())
"""


def test_a_file_size_limit_fails_the_snapshot_that_exceeds_it(
    backend: str, tmp_path: Path, run: Callable[..., Any]
) -> None:
    ended = run("-c", LIMITED, tmp_path, backend)
    assert ended.returncode == 0, ended.stderr
    first, *steps = ended.stdout.splitlines()
    number, operation, path = first.split(" ", 2)
    assert int(number) == errno.EFBIG
    assert operation in ("allocate", "write")
    assert path.startswith(str(tmp_path))
    assert steps == ["[1]", "[1, 3]"]
    assert entries(tmp_path) == ["step-00000001", "step-00000003"]


FULL = """
import os, subprocess, sys
import numpy as np
import datastates as ds
from datastates.commit import newest
from datastates.commit.tiers import tier_of
from datastates.errors import StorageError
from datastates.providers import HostTensorProvider
root, backend = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", root], check=True)
arrays = {"a": np.arange(500_000, dtype=np.float64)}
providers = [HostTensorProvider("model", arrays, lazy=True)]
with ds.Checkpointer(root, host_cache="2MiB", block="1MiB", io_backend=backend) as ckpt:
    ckpt.snapshot(providers, step=1).wait_committed()
    failed = ckpt.snapshot(providers, step=2)
    try:
        failed.wait_committed()
    except StorageError as error:
        print(error.errno, error.operation, error.filename)
    print([name for name in os.listdir(root) if name[0] != '.'])
    ckpt.restore(providers)
    tier_of(ckpt.directory).remove(newest.committed(tier_of(ckpt.directory))[1])
    ckpt.snapshot(providers, step=3).wait_committed()
    print([name for name in os.listdir(root) if name[0] != '.'])
    assert np.array_equal(ds.load(root)["model"]["a"], np.arange(500_000))
"""


def test_a_full_disk_fails_the_snapshot_and_keeps_the_previous_one(
    backend: str, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    own_mounts = ["unshare", "--mount", "--map-root-user"]
    allowed = "mount -t tmpfs -o size=1m none " + str(tmp_path)
    try:
        possible = subprocess.run([*own_mounts, "sh", "-c", allowed], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        possible = False
    if not possible:
        pytest.skip("no mount namespace of one's own here")
    in_namespace = f"import os, sys; os.execvp('unshare', {own_mounts} + sys.argv[1:])"
    process = start("-c", in_namespace, sys.executable, "-c", FULL, tmp_path, backend)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    error, after_failure, after_next = out.splitlines()
    number, operation, path = error.split(" ", 2)
    assert int(number) == errno.ENOSPC
    assert operation in ("allocate", "write")
    assert path.startswith(str(tmp_path))
    assert after_failure == "['step-00000001']"
    assert after_next == "['step-00000003']"
    assert entries(tmp_path) == []  # only that process saw the mount


def test_everything_is_synced_in_the_order_that_a_power_cut_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []

    def recorded(name: str, path_of: Callable[..., str]) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **named: Any) -> Any:
            done.append((name, path_of(*arguments).replace(str(tmp_path), "")))
            return real(*arguments, **named)

        monkeypatch.setattr(os, name, call)

    recorded("fsync", lambda fd: os.readlink(f"/proc/self/fd/{fd}"))
    recorded("rename", lambda _, to: str(to))
    recorded("unlink", lambda path, **_: str(path))
    with ds.Checkpointer(tmp_path / "run", keep_last=1, **OPTIONS) as ckpt:
        ckpt.snapshot(providers_of(state_of(1)), step=1).wait_committed()
        ckpt.wait()
        done.clear()
        ckpt.snapshot(providers_of(state_of(2)), step=2)
    commit = [
        ("fsync", "/run/step-00000002.partial/manifest.json"),
        ("fsync", "/run/step-00000002.partial"),
        ("rename", "/run/step-00000002"),
        ("unlink", "/run/step-00000002/.lock"),
        ("fsync", "/run"),
    ]
    deletion = [("rename", "/run/step-00000001.partial"), ("fsync", "/run")]
    seen = [(name, re.sub(r"\.partial-\w+", ".partial", path)) for name, path in done]
    assert seen[: len(commit) + len(deletion)] == [*commit, *deletion]


def test_a_new_directory_of_checkpoints_is_synced_into_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with ds.Checkpointer(tmp_path / "new" / "run", **OPTIONS) as ckpt:
        ckpt.snapshot(providers_of(state_of(1)), step=1)
    assert {str(tmp_path), str(tmp_path / "new")} <= set(synced)
