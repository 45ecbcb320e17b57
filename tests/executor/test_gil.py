"""Native calls that slow storage can hold up release the GIL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HELD_UP = """
import os, sys, threading
import numpy as np
from datastates import _native

none, one = np.zeros(0, np.uint64), np.zeros(1, np.uint64)
plan = _native.ReadPlan(
    dest_nbytes=none, extent_offset=none, extent_length=none, extent_shared=none.astype(np.uint8),
    extent_span=one, span_offset=none, span_length=none, span_count=none, span_step=none,
    extent_piece=one, piece_dest=none.astype(np.int32), piece_dest_offset=none, piece_extent_offset=none,
    piece_length=none, piece_count=none, piece_extent_step=none, piece_dest_step=none,
    extent_check=one, check_offset=none, check_length=none, check_crc=none.astype(np.uint32),
    check_record=none.astype(np.int32),
)
executor = _native.Executor(
    cache_bytes=2 << 20, block_bytes=1 << 20, queue_depth=1, backend="pwrite", direct=False, io_threads=1
)
sys.setswitchinterval(1e6)  # a thread is only put aside where it lets go by itself
_native.arm_fault("open", "delay", 20_000)
begun = threading.Event()
ended = []

def ask():
    begun.set()
    executor.submit_read(sys.argv[1], plan, none, none.astype(np.int32), none)
    ended.append(True)

threading.Thread(target=ask).start()
begun.wait()
os._exit(len(ended))
"""


def test_python_goes_on_while_a_mount_does_not_answer(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    assert subprocess.run([sys.executable, "-c", HELD_UP, tmp_path / "file"], check=False).returncode == 0
