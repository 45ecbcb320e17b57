"""An exception at any line of a public call, as of Ctrl-C, leaves all usable: no lock, file, folder or thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from short import first

PROGRAM = Path(__file__).with_name("interrupting.py")
CALLS = [
    "checkpointer",
    "close",
    "compare",
    "export",
    "gate",
    "load",
    "one_restore",
    "one_snapshot",
    "open",
    "restore",
    "snapshot",
    "steps_and_latest",
    "wait",
    "wait_committed",
]
OF_ADAPTERS = {"dcp": "torch", "folder": "torch", "lightning": "lightning"}


def finds_nothing(ended: Any) -> None:
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr.replace("\r", "\n")[-4000:]


@pytest.mark.long
def test_a_snapshot_that_is_interrupted_anywhere(tmp_path: Path, run: Callable[..., Any]) -> None:
    finds_nothing(run(PROGRAM, tmp_path, "snapshot", "--seconds", 4))


@pytest.mark.long
@pytest.mark.parametrize("call", first(CALLS, rest=pytest.mark.by_hand))
def test_a_call_that_is_interrupted_anywhere(call: str, tmp_path: Path, run: Callable[..., Any]) -> None:
    finds_nothing(run(PROGRAM, tmp_path, call, "--seconds", 12, timeout=280))


@pytest.mark.by_hand
@pytest.mark.parametrize("call", OF_ADAPTERS)
def test_a_save_of_an_adapter_that_is_interrupted_anywhere(call: str, tmp_path: Path, run: Callable[..., Any]) -> None:
    pytest.importorskip(OF_ADAPTERS[call])
    finds_nothing(run(PROGRAM, tmp_path, call, "--seconds", 12, timeout=280))


@pytest.mark.by_hand
@pytest.mark.parametrize(
    "call", first(["snapshot", "restore", "open", "export", "one_snapshot"], rest=pytest.mark.by_hand)
)
def test_a_call_that_signals_interrupt(call: str, tmp_path: Path, run: Callable[..., Any]) -> None:
    finds_nothing(run(PROGRAM, tmp_path, call, "--signals", 20, timeout=280))
