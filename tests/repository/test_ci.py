"""The environment that ``.ci/run`` makes for the checks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAKE = """#!/bin/sh
env > "$0.seen"
"""


def test_the_checks_see_no_settings_of_the_machine_but_those_of_downloads(tmp_path: Path) -> None:
    make = tmp_path / "make"
    make.write_text(MAKE)
    make.chmod(0o755)
    passed = {"HOME": str(tmp_path), "PIP_CERT": "a b", "https_proxy": "http://proxy", "SSL_CERT_FILE": "x"}
    hidden = {"PYTHONUNBUFFERED": "1", "LC_ALL": "C", "TERM": "dumb", "TMPDIR": str(tmp_path), "CI": "no"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run([ROOT / ".ci" / "run"], env={**passed, **hidden, "PATH": path}, check=True)
    seen = dict(line.partition("=")[::2] for line in Path(f"{make}.seen").read_text().splitlines())
    for name in ("_", "PWD", "SHLVL", "OLDPWD"):  # the shell's own
        seen.pop(name, None)
    assert seen == {**passed, "PATH": path, "CI": "true"}
