"""The command, called in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from datastates.cli import commands


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Its exit status, and what it printed."""
    status = commands.main([str(a) for a in arguments])
    return status, capsys.readouterr().out


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    """The same with ``--json``, read."""
    status, output = run(capsys, *arguments, "--json")
    return status, json.loads(output)
