"""Snapshots do without what a container or a file system forbids, and the report says so."""

from __future__ import annotations

import errno
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import datastates as ds
from datastates import _native
from datastates.errors import DatastatesError
from datastates.providers import HostTensorProvider

OPTIONS: dict[str, Any] = {"host_cache": "2MiB", "block": "1MiB"}
MACHINES = {"x86_64": (0xC000003E, 257), "aarch64": (0xC00000B7, 56)}
"""For each machine, the kernel's number for the architecture, and the number of the system call openat."""

UNDER_A_FILTER = """
import ctypes, struct, sys
import numpy as np
import datastates as ds
from datastates.errors import DatastatesError
from datastates.providers import HostTensorProvider

architecture, first, last, argument, mask, refusal = map(int, sys.argv[2:8])
LOAD, IF_EQUAL, IF_GREATER, IF_NOT_LESS, IF_SET, RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
program = [
    (LOAD, 0, 0, 4), (IF_EQUAL, 0, 6, architecture),
    (LOAD, 0, 0, 0), (IF_NOT_LESS, 0, 4, first), (IF_GREATER, 3, 0, last),
    (LOAD, 0, 0, 16 + 8 * argument), (IF_SET, 0, 1, mask) if mask else (IF_SET, 0, 0, 1),
    (RETURN, 0, 0, 0x00050000 | refusal), (RETURN, 0, 0, 0x7FFF0000),
]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
filter_program = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.c_char_p(filter_program), 0, 0):
    sys.exit("no seccomp")

root = sys.argv[1]
arrays = {"a": np.arange(500_000, dtype=np.float64)}
with ds.Checkpointer(root, host_cache="2MiB", block="1MiB", **dict(s.split("=") for s in sys.argv[8:])) as ckpt:
    snap = ckpt.snapshot([HostTensorProvider("model", arrays, lazy=True)], step=1)
    snap.wait_committed()
    print(snap.report.backend, snap.report.direct)
    arrays["a"][:] = 0
    assert ckpt.restore([HostTensorProvider("model", arrays)]).step == 1
assert np.array_equal(arrays["a"], np.arange(500_000))
assert np.array_equal(ds.load(root)["model"]["a"], np.arange(500_000))
"""
IO_URING_SETUP, IO_URING_REGISTER = 425, 427
"""The number of io_uring_enter lies between them. The numbers are the same on every machine."""
REGISTER_PROBE = 8


def arrays_of(step: int) -> dict[str, Any]:
    return {"a": np.full(500_000, step, np.float64)}


def save_and_restore(root: Path, **options: Any) -> ds.Report:
    with ds.Checkpointer(root, **OPTIONS, **options) as ckpt:
        snapshot = ckpt.snapshot([HostTensorProvider("model", arrays_of(3), lazy=True)], step=1)
        snapshot.wait_committed()
        live = arrays_of(0)
        assert ckpt.restore([HostTensorProvider("model", live)]).step == 1
    assert np.array_equal(live["a"], arrays_of(3)["a"])
    return snapshot.report


def filtered(run: Callable[..., Any], root: Path, *rule: int, settings: tuple[str, ...] = ()) -> Any:
    if platform.machine() not in MACHINES:
        pytest.skip(f"no seccomp filter written for {platform.machine()}")
    ended = run("-c", UNDER_A_FILTER, root, MACHINES[platform.machine()][0], *rule, *settings)
    if "no seccomp" in ended.stderr:
        pytest.skip("this system installs no seccomp filter")
    return ended


def takes_direct(folder: Path) -> bool:
    """Whether files in a folder can be opened with O_DIRECT."""
    path = folder / "probe"
    path.touch()
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    finally:
        path.unlink()
    return True


@pytest.mark.long
@pytest.mark.parametrize("refusal", [errno.EPERM, errno.ENOSYS], ids=["EPERM", "ENOSYS"])
@pytest.mark.parametrize("first", range(IO_URING_SETUP, IO_URING_REGISTER + 1))
def test_under_a_containers_default_profile_a_snapshot_goes_by_pwrite(
    first: int, refusal: int, tmp_path: Path, run: Callable[..., Any]
) -> None:
    """The profiles of Docker and containerd refuse all three calls. Others may refuse only some of them."""
    ended = filtered(run, tmp_path / "run", first, IO_URING_REGISTER, 0, 0, refusal)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split()[0] == "pwrite"


def test_on_a_kernel_that_does_not_tell_its_opcodes_a_snapshot_goes_by_pwrite(
    tmp_path: Path, run: Callable[..., Any]
) -> None:
    """Linux 5.1 to 5.5 are such kernels: they have a ring, but it cannot read and write any memory."""
    ended = filtered(run, tmp_path / "run", IO_URING_REGISTER, IO_URING_REGISTER, 1, REGISTER_PROBE, errno.EINVAL)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split()[0] == "pwrite"


def test_io_uring_asked_for_by_name_and_forbidden_is_an_error(tmp_path: Path, run: Callable[..., Any]) -> None:
    rule = (IO_URING_SETUP, IO_URING_REGISTER, 0, 0, errno.EPERM)
    ended = filtered(run, tmp_path / "run", *rule, settings=("io_backend=io_uring",))
    assert ended.returncode == 1
    assert "StorageError: io_uring_setup" in ended.stderr
    assert "Operation not permitted" in ended.stderr


@pytest.mark.long
@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.EPERM], ids=["EINVAL", "EPERM"])
def test_where_o_direct_is_refused_a_snapshot_goes_through_the_page_cache(
    refusal: int, backend: str, tmp_path: Path, run: Callable[..., Any]
) -> None:
    openat = MACHINES.get(platform.machine(), (0, 0))[1]
    rule = (openat, openat, 2, os.O_DIRECT, refusal)
    ended = filtered(run, tmp_path / "run", *rule, settings=(f"io_backend={backend}",))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [backend, "False"]


def test_the_filters_themselves_change_nothing_else(backend: str, tmp_path: Path, run: Callable[..., Any]) -> None:
    no_such_call = 100_000
    ended = filtered(
        run, tmp_path / "run", no_such_call, no_such_call, 0, 0, errno.EPERM, settings=(f"io_backend={backend}",)
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [backend, str(takes_direct(tmp_path))]


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOMEM], ids=["ENOSYS", "ENOMEM"])
def test_a_ring_that_cannot_be_made_is_done_without(number: int, nth: int, tmp_path: Path) -> None:
    _native.arm_fault("uring_setup", "fail", number, nth, 1)
    report = save_and_restore(tmp_path / "run")
    if nth == 1:
        assert report.backend == "pwrite"


def test_a_ring_asked_for_by_name_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    _native.arm_fault("uring_setup", "fail", errno.ENOSYS)
    with pytest.raises(DatastatesError, match="io_uring_setup"):
        ds.Checkpointer(tmp_path, io_backend="io_uring", **OPTIONS)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP], ids=["EINVAL", "EOPNOTSUPP"])
def test_direct_writes_refused_at_the_first_transfer_go_through_the_page_cache(
    number: int, backend: str, tmp_path: Path
) -> None:
    if not takes_direct(tmp_path):
        pytest.skip("no direct I/O on this file system")
    assert save_and_restore(tmp_path / "before", io_backend=backend).direct
    _native.arm_fault("write", "fail", number, 2, 1)
    assert not save_and_restore(tmp_path / "run", io_backend=backend).direct


def test_direct_io_turned_off_is_off(backend: str, tmp_path: Path) -> None:
    report = save_and_restore(tmp_path / "run", io_backend=backend, direct_io=False)
    assert (report.backend, report.direct) == (backend, False)


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_a_file_system_in_memory_works_and_is_reported_as_it_is(backend: str, shared_memory: Path) -> None:
    report = save_and_restore(shared_memory / "run", io_backend=backend)
    assert (report.backend, report.direct) == ("memory", False)
