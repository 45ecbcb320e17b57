"""The ``datastates`` command, called in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from datastates.cli import commands


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Call the command; returns its exit status and what it printed."""
    status = commands.main([str(a) for a in arguments])
    return status, capsys.readouterr().out


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    """Call the command with ``--json``; returns its exit status and the decoded output."""
    status, output = run(capsys, *arguments, "--json")
    return status, json.loads(output)


def inspected(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[list[str], list[str]]:
    """Call ``inspect``, which must end well; returns the lines of its summary and of its list."""
    status, output = run(capsys, "inspect", *arguments)
    assert status == 0
    summary, listed = output.split("\n\n")
    return summary.splitlines(), listed.splitlines()
