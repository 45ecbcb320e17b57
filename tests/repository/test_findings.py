"""The scripts of ``findings/`` have one form, and the index names each. They run by hand: they install packages."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "findings"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
ROWS = dict(re.findall(r"^\| \[([\w-]+)\]\(\1\.sh\) \| ([^|]+) \|", (FOLDER / "README.md").read_text(), re.M))


def test_the_index_names_each_script() -> None:
    assert list(ROWS) == [script.stem for script in SCRIPTS] != []
    assert {path.name for path in FOLDER.iterdir()} == {"README.md", *(script.name for script in SCRIPTS)}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_script_has_the_form(script: Path) -> None:
    text = script.read_text()
    head, _, program = text.partition("set -eu\n")
    assert os.access(script, os.X_OK)
    assert re.fullmatch(
        r"#!/bin/sh\n# Behaviour: .+?\n# Seen:.*\n(#   .+\n)+# Exits 0 if it is still so, 1 .+, 77 .+\n", head, re.S
    )
    assert "datastates" not in text  # the findings are about other software
    assert re.search(r"^trap '.*rm -rf \"\$place\"' EXIT$", program, re.M)
    assert re.search(r"__version__|\bversion\(|--version|mkfs\.xfs -V", program)
    python = re.findall(r"^cat > (\w+\.py) <<'EOF'\n(.*?)^EOF$", program, re.M | re.S)
    assert "case.py" in dict(python)
    for name, source in python:
        compile(source, f"{script.stem}/{name}", "exec")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_script_pins_what_it_installs(script: Path) -> None:
    text = script.read_text()
    packages = " ".join(re.findall(r'^PINS="(.*)"$', text, re.M)).split()
    system = " ".join(re.findall(r'^DEBIAN="(.*)"$', text, re.M)).split()
    assert packages or system
    assert all(re.fullmatch(r"[\w.-]+(\[\w+\])?==[\d.]+", package) for package in packages)
    assert all(re.fullmatch(r"[\w.-]+=\d[\w.+:-]*", package) for package in system)
    software, version = ROWS[script.stem].partition(",")[0].split()
    assert any(re.match(rf"{software}==?{re.escape(version)}\b", package) for package in packages + system)
