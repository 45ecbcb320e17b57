"""Nothing that a program plugs in stops its training, or hides that a snapshot has failed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from steps import OPTIONS, PRELUDE, providers

import datastates as ds
from datastates._base import log

PLUGGED = Path(__file__).parent / "plugged.py"


@pytest.mark.by_hand
def test_nothing_that_is_plugged_in_stops_training(tmp_path: Path, run: Callable[..., Any]) -> None:
    ended = run("-P", PLUGGED, tmp_path, timeout=600)
    assert ended.returncode == 0, ended.stdout[-1000:] + ended.stderr
    assert ended.stdout.endswith("all rounds have ended\n")


def test_a_handler_that_raises_at_exit_does_not_hide_a_failure(tmp_path: Path, run: Callable[..., Any]) -> None:
    script = f"""
{PRELUDE}
import logging
class Handler(logging.Handler):
    def emit(self, record):
        raise ConnectionError("the log server is away")
logging.getLogger().addHandler(Handler())
_native.arm_fault("sync", "fail", 28)
ckpt = ds.Checkpointer(root, **OPTIONS)
ckpt.snapshot(providers(1), step=1)
"""
    ended = run("-c", script, tmp_path)
    assert ended.returncode == 120, ended.stderr
    assert "ConnectionError: the log server is away" in ended.stderr
    assert "snapshot 1 failed, and nobody asked" in ended.stderr


def test_a_program_that_wants_no_word_of_failing_handlers_gets_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> bool:
        raise ConnectionError

    monkeypatch.setattr(logging, "raiseExceptions", False)
    monkeypatch.setattr(logging.getLogger("datastates"), "filters", [fail])
    log.error("a line")
    assert capsys.readouterr().err == ""


def test_an_interrupt_in_a_handler_is_raised_on_the_program_s_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(logging.getLogger("datastates"), "filters", [interrupt])
    with pytest.raises(KeyboardInterrupt):
        log.warning("a line")


def test_a_line_names_the_module_that_logs_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "datastates"), ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        ckpt.snapshot(providers(1), step=1)
    (line,) = caplog.records
    assert (line.module, line.funcName) == ("engine", "_log_and_tell")
    assert line.threadName is not None
    assert line.threadName.startswith("datastates-teller")
    assert threading.current_thread().name != line.threadName
