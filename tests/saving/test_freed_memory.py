"""Memory given back before it is captured: that snapshot fails and names a key, and nothing else fails."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import short

pytest.importorskip("torch")

GIVEN_BACK = {
    "shared memory": ("tensors['7'].share_memory_()", "m/7"),
    "a queue": ("ForkingPickler.dumps(tensors)", "m/7"),
    "no memory": ("tensors['7'].untyped_storage().resize_(0)", "m/7"),
    "larger memory": ("tensors['7'].resize_(3 << 20)", "m/7"),
    "other memory": ("tensors['7'].data = torch.empty(0)", "m/7"),
    "unmapped": ("libc.munmap(ctypes.c_void_p(address), SIZE)", "m/mapped"),
    "partly unmapped": ("libc.munmap(ctypes.c_void_p(address + SIZE // 2), SIZE // 2)", "m/mapped"),
    "small, unmapped": ("libc.munmap(ctypes.c_void_p(pages), 16 << 12)", "m/page1"),
    "protected": ("libc.mprotect(ctypes.c_void_p(address), SIZE, 0)", "m/mapped"),
    "a file cut short": ("os.truncate(file, 0)", "m/file"),
}
"""By what happens to the memory: the statement run after ``snapshot()``, and a key that the error must name."""

SCRIPT = """
import ctypes, mmap, os, sys
from multiprocessing.reduction import ForkingPickler
import numpy as np
import torch
import torch.multiprocessing
import datastates as ds
from datastates import _native
from datastates.errors import TornSnapshotError
from datastates.providers import HostTensorProvider

SIZE = 8 << 20
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
directory, statement, key, fault = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])


def mapped(nbytes):
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = libc.mmap(None, ctypes.c_size_t(nbytes), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, ctypes.c_long(0))
    memory = (ctypes.c_char * nbytes).from_address(address)
    array = np.frombuffer(memory, np.uint8)
    array[:] = 7
    return address, array


tensors = {str(i): torch.full((2 << 20,), float(i)) for i in range(8)}
address, array = mapped(SIZE)
pages, small = mapped(16 << 12)
file = directory + ".file"
np.arange(SIZE, dtype=np.uint8).tofile(file)
others = {f"page{i}": small[i << 12 :][: 1 << 12] for i in range(16)}
others |= {"mapped": array, "file": np.memmap(file, np.uint8, "r+")}
with ds.Checkpointer(directory, host_cache="2MiB", block="1MiB", on_error="warn") as ckpt:
    _native.arm_fault("capture", "fail", 1)  # nothing is captured while this is armed
    if fault:
        _native.arm_fault("host_read", "fail", fault)
    state = [HostTensorProvider("m", {**tensors, **others}, lazy=True)]
    snapshot = ckpt.snapshot(state, step=1)
    exec(statement)
    assert not snapshot.captured
    _native.arm_fault("capture", "delay", 0)
    try:
        snapshot.wait_committed(60)
    except TornSnapshotError as error:
        assert repr(key) in str(error), error
    else:
        raise AssertionError("memory that was given back was taken for what it had been")
    _native.clear_faults()
    good = {"good": torch.arange(1 << 20)}
    ckpt.snapshot([HostTensorProvider("m", good)], step=2).wait_committed(60)
assert torch.equal(ds.load(directory)["m"]["good"], good["good"])
"""


@pytest.mark.by_hand
@pytest.mark.parametrize("how", GIVEN_BACK)
def test_memory_given_back_before_it_is_captured_fails_that_snapshot_by_name(
    how: str, ranks: Any, tmp_path: Path
) -> None:
    ranks(1, SCRIPT, tmp_path / "run", *GIVEN_BACK[how], 0, alone=True)


@pytest.mark.parametrize("fault", [errno.ENOSYS, errno.EFAULT], ids=["forbidden", "beyond its reach"])
@pytest.mark.parametrize(
    "how",
    short.first(["partly unmapped", "no memory", "small, unmapped", "a file cut short"], rest=pytest.mark.by_hand),
)
def test_where_the_kernel_does_not_copy_between_places_it_copies_through_a_file(
    how: str, fault: int, ranks: Any, tmp_path: Path
) -> None:
    ranks(1, SCRIPT, tmp_path / "run", *GIVEN_BACK[how], fault, alone=True)


GONE = {
    "never readable": "libc.mprotect(ctypes.c_void_p(address), SIZE, 0)",
    "partly readable": "libc.mprotect(ctypes.c_void_p(address + SIZE // 2), SIZE // 2, 0)",
    "a file cut short": "os.truncate(file, 0)",
}
"""By what happens to the memory: the statement run before ``snapshot()``."""

GONE_SCRIPT = """
import ctypes, mmap, os, sys
import numpy as np
import datastates as ds
from datastates.errors import TornSnapshotError
from datastates.providers import HostTensorProvider

SIZE = 1 << 20
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
directory, statement, lazy = sys.argv[1], sys.argv[2], sys.argv[3] == "lazy"
flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
address = libc.mmap(None, ctypes.c_size_t(SIZE), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, ctypes.c_long(0))
memory = np.frombuffer((ctypes.c_char * SIZE).from_address(address), np.uint8)
file = directory + ".file"
np.arange(SIZE, dtype=np.uint8).tofile(file)
if "file" in statement:
    memory = np.memmap(file, np.uint8, "r+")
good = {f"good{i}": np.arange(i + 1) for i in range(40)}
small = {f"small{i}": memory[-1000 * (i + 1) :][:1000] for i in range(5)}
state = {**good, "all": memory, **small, "last": np.ones(100_000)}
exec(statement)
snapshot = ds.snapshot([HostTensorProvider("m", state, lazy=lazy)], directory)
try:
    snapshot.wait_committed(60)
except TornSnapshotError as error:
    assert set(error.keys) == {"m/all", *(f"m/{key}" for key in small)}, error.keys
else:
    raise AssertionError("memory that cannot be read was taken for state")
"""


@pytest.mark.by_hand
@pytest.mark.parametrize("lazy", short.first(["lazy", "at once"]))
@pytest.mark.parametrize("how", GONE)
def test_memory_that_is_gone_before_the_call_fails_that_snapshot_by_name(
    how: str, lazy: str, ranks: Any, tmp_path: Path
) -> None:
    ranks(1, GONE_SCRIPT, tmp_path / "c", GONE[how], lazy, alone=True)
