"""Native calls that slow storage can hold up release the GIL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HELD_UP = """
import os, sys, threading
from datastates import _native

sys.setswitchinterval(1e6)  # a thread is only put aside where it lets go by itself
_native.arm_fault("statfs", "delay", 20_000)
begun = threading.Event()
ended = []

def ask():
    begun.set()
    _native.in_memory(sys.argv[1])
    ended.append(True)

threading.Thread(target=ask).start()
begun.wait()
os._exit(len(ended))
"""


def test_python_goes_on_while_a_mount_does_not_answer(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", HELD_UP, tmp_path], check=False).returncode == 0
