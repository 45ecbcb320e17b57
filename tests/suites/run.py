"""Runs a framework's own tests, first with its stock code and then with this package, and compares the outcomes.

``python tests/suites/run.py SUITE FOLDER [TEST...] [-- PYTEST_OPTION...]``. ``FOLDER`` holds the framework's tests,
which are no part of this repository. A suite is a module beside this one. It says in

- ``VARIANTS`` the names of the runs, stock first,
- ``TESTS`` the files and folders below ``FOLDER``,
- ``OPTIONS`` the options of pytest, ``ENVIRONMENT`` the variables of the runs,
- ``MODULE`` the framework's module that ``change(module, variant)`` changes, in every process of a run but a stock one.

It prints a table in Markdown, and each test with another outcome than with stock. It exits with 1 if one passes with
stock and not with this package. ``FOLDER`` gets a log of each run.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OUTCOMES = ("passed", "failed", "skipped")


def outcomes(report: Path) -> dict[str, tuple[str, str]]:
    """The outcome of each test of a JUnit report, and why it did not pass."""
    found: dict[str, tuple[str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        kind, why = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                kind = "skipped" if child.tag == "skipped" else "failed"
                why = (child.get("message") or "").strip().partition("\n")[0]
        if found.get(name, ("", ""))[0] != "failed":  # an error of the teardown is a second entry
            found[name] = kind, why
    return found


def run(suite: Any, folder: Path, variant: str, tests: list[str], options: list[str]) -> dict[str, tuple[str, str]]:
    """Run the tests of a suite in one variant."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        chosen = {"DATASTATES_SUITE": suite.__name__, "DATASTATES_SUITE_VARIANT": variant}
        environment = {**suite.ENVIRONMENT, **chosen, "PYTHONPATH": path}
        command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += [*suite.OPTIONS, *options, *tests]
        log = folder / f"{suite.__name__}, {variant}.log"
        with log.open("w") as output:
            subprocess.run(command, cwd=folder, env=os.environ | environment, stdout=output, stderr=output)
        if not report.exists():
            raise SystemExit(f"{variant}: pytest made no report; see {log}")
        return outcomes(report)


def table(found: Mapping[str, Mapping[str, tuple[str, str]]]) -> str:
    """The counts of each variant, in Markdown."""
    rows = ["| | " + " | ".join(OUTCOMES) + " |", "| --- " * (len(OUTCOMES) + 1) + "|"]
    for variant, results in found.items():
        counts = Counter(kind for kind, _ in results.values())
        rows.append(f"| {variant} | " + " | ".join(str(counts[kind]) for kind in OUTCOMES) + " |")
    return "\n".join(rows)


def main() -> int:
    """Run a suite; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("suite")
    parser.add_argument("folder", type=Path)
    parser.add_argument("tests", nargs="*")
    words, options = sys.argv[1:], []
    if "--" in words:
        words, options = words[: words.index("--")], words[words.index("--") + 1 :]
    given = parser.parse_args(words)
    sys.path.insert(0, str(HERE))
    suite = importlib.import_module(given.suite)
    tests = given.tests or [*suite.TESTS]
    found = {v: run(suite, given.folder, v, tests, options) for v in suite.VARIANTS}
    print(table(found))
    stock, worse = next(iter(found.values())), 0
    for variant, results in list(found.items())[1:]:
        for name in sorted({*stock, *results}):
            before, after = (r.get(name, ("not run", "")) for r in (stock, results))
            if before[0] != after[0]:
                worse += before[0] == "passed"
                print(f"{variant}: {name}: {before[0]} -> {after[0]}: {after[1] or before[1]}")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
