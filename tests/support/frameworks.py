"""Which files of tests need a framework that is not installed. Without any, the core is tested."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
FRAMEWORKS = ("torch", "jax")
"""What the other frameworks need, too."""
ABSENT = {name for name in FRAMEWORKS if importlib.util.find_spec(name) is None}


@cache
def absent_for(path: Path) -> frozenset[str]:
    """The absent frameworks that a file imports when it is imported, itself or through other files of the tests.

    A folder needs what its ``conftest.py`` needs.
    """
    if path.is_dir():
        conftest = path / "conftest.py"
        return absent_for(conftest) if conftest.exists() else frozenset()
    if path.suffix != ".py":
        return frozenset()
    needed: set[str] = set()
    for name in _imported(path):
        root = name.partition(".")[0]
        needed |= {"torch" if name.startswith("datastates.adapters") else root} & ABSENT
        for beside in (path.with_name(f"{name}.py"), TESTS / "support" / f"{name}.py"):
            if beside != path and beside.exists():
                needed |= absent_for(beside)
    return frozenset(needed)


def _imported(path: Path) -> list[str]:
    statements = ast.parse(path.read_text()).body
    names = [alias.name for s in statements if isinstance(s, ast.Import) for alias in s.names]
    return names + [s.module or "" for s in statements if isinstance(s, ast.ImportFrom)]


def left_out() -> dict[str, list[str]]:
    """The folders and files of tests that are not collected, by the framework that they need."""
    found: dict[str, list[str]] = {}
    for path in [*TESTS.iterdir(), *TESTS.rglob("test_*.py")]:
        above = {folder for folder in path.parents if TESTS in folder.parents}
        if not any(absent_for(folder) for folder in above):
            for framework in absent_for(path):
                found.setdefault(framework, []).append(str(path.relative_to(TESTS)))
    return {framework: sorted(paths) for framework, paths in found.items()}
