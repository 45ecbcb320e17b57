"""A process of the fork server is like one that Python has started: its files, arguments and exit status."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

SAY = """
import json, os, stat, sys
print(json.dumps({
    "input": os.read(0, 1).decode(),
    "open": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:3],
    "inherited": [os.get_inheritable(fd) for fd in (0, 1, 2)],
    "arguments": sys.argv[1:],
    "variables": [os.environ.get("RANK"), os.environ.get("ONE")],
    "name": __name__,
    "file": __file__ == sys.argv[0],
    "session": os.getsid(0) == os.getpid(),
    "ours": sorted(name for name in sys.modules if name.startswith("datastates")),
    "torch": "torch" in sys.modules,
}))
"""


def test_it_has_what_a_new_process_has(ranks: Any) -> None:
    (done,) = ranks(1, SAY, "a", 1, alone=True, ONE="1")
    assert json.loads(done.stdout) == {
        "input": "",
        "open": [0, 1, 2],
        "inherited": [True, True, True],
        "arguments": ["a", "1"],
        "variables": [None, "1"],
        "name": "__main__",
        "file": True,
        "session": True,
        "ours": [],
        "torch": True,
    }


@pytest.mark.parametrize(
    ("statement", "status"),
    [
        ("pass", 0),
        ("import sys; sys.exit(3)", 3),
        ("raise KeyError('why')", 1),
        ("import atexit, os; atexit.register(os._exit, 7)", 7),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
)
def test_how_it_ends_is_told(statement: str, status: int, ranks: Any) -> None:
    (done,) = ranks(1, statement, alone=True, may_fail=[0])
    assert done.returncode == status
    assert ("KeyError: 'why'" in done.stderr) == ("KeyError" in statement)


def test_what_python_reads_as_it_starts_makes_it_a_new_process(ranks: Any, tmp_path: Path) -> None:
    script = "import os, sys; print(hash('a'), 'torch' in sys.modules)"
    first, second = (ranks(1, script, alone=True, PYTHONHASHSEED="5")[0] for _ in range(2))
    assert first.stdout == second.stdout
    assert first.stdout.endswith(" False\n")
    assert os.environ.get("PYTHONHASHSEED") != "5"
