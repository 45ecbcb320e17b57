"""A shell completes commands, options and paths."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from datastates.cli import main

ASK = """
source /dev/stdin
COMP_WORDS=({words}) COMP_CWORD={last}
{function}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completed(words: str, capsys: pytest.CaptureFixture[str], folder: Path) -> list[str]:
    """The words that bash offers for the last one of ``words``."""
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit, match="0"):
        main(["--print-completion", "bash"])
    script = capsys.readouterr().out
    function = re.findall(r"^complete .*-F (\S+)", script, re.MULTILINE)[-1]
    asked = ASK.format(words=words, last=len(words.split()) - 1, function=function)
    command = ["bash", "-O", "extglob", "-c", asked]
    done = subprocess.run(command, input=script, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_commands_and_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert completed("datastates ver", capsys, tmp_path) == ["verify"]
    assert completed("datastates diff --v", capsys, tmp_path) == ["--values"]


def test_paths(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert completed("datastates ls check", capsys, tmp_path) == ["checkpoints"]


def test_without_shtab_the_error_names_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit, match="2"):
        main(["--print-completion", "bash"])
    assert "pip install 'datastates[cli]'" in capsys.readouterr().err
