"""Imports go down only, names on one line never import each other, and one door leads to the native core."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# from the bottom to the top; a module may import from lower lines only
LINES = [
    {
        "errors",
        "faults",
        "keys",
        "dtypes",
        "collector",
        "timeline",
        "host_memory",
        "paths",
        "polling",
        "replicas",
        "termination",
        "dressed",
        "depth",
    },
    {"pickling", "plan", "vetted", "own_classes", "durable", "file_board", "store_calls", "agreement"},
    {"unpickling", "packed_keys", "parts", "dtensors", "store_board", "openings"},
    {"protocol", "config"},
    {"key_lookup", "looking"},
    {"arrays", "shard_table", "frames"},
    {"index", "describing", "digest_runs", "nested"},
    {"stored_rows", "claims"},
    {"structure"},
    {"planner", "executor", "container", "manifest", "providers", "futures"},
    {"collecting", "joining", "catalog", "directories", "conflicts"},
    {"opened", "barrier", "health"},
    {"read_queue", "committing", "digests", "stored", "meeting"},
    {"reads", "comparing", "broadcasting", "ending", "telling"},
    {"saved"},
    {"gate", "saving", "restoring", "loading", "reader"},
    {"verifying", "engine", "fallback"},
    {"checkpoint", "cli"},
    {"__init__", "__main__"},
    {"testing", "adapters"},
]
LEVEL = {name: level for level, line in enumerate(LINES) for name in line}
FRAMEWORKS = {"torch", "cupy", "ml_dtypes", "deepspeed", "megatron", "lightning", "transformers"}


def _sources() -> list[tuple[str, Path]]:
    found = [(p.stem, p) for p in (ROOT / "datastates").glob("*.py")]
    found += [("testing", p) for p in (ROOT / "datastates" / "testing").glob("*.py")]
    found += [(folder, p) for folder in ("providers", "adapters") for p in (ROOT / folder).rglob("*.py")]
    return found


def _imports(path: Path) -> list[tuple[str, bool]]:
    """Every imported module's full name, and whether the import runs when the module is imported."""
    tree = ast.parse(path.read_text())
    inside = {
        id(n) for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)) for n in ast.walk(f)
    }
    found = []
    for node in ast.walk(tree):
        top = id(node) not in inside
        if isinstance(node, ast.Import):
            found += [(a.name, top) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            names = [f"{node.module}.{a.name}" if node.module == "datastates" else node.module for a in node.names]
            found += [(name, top) for name in names]
    return found


@pytest.mark.parametrize(("name", "path"), _sources(), ids=lambda v: v if isinstance(v, str) else v.stem)
def test_imports_go_down_only(name: str, path: Path) -> None:
    for module, _ in _imports(path):
        parts = module.split(".")
        if parts[0] != "datastates" or len(parts) == 1:
            continue
        target = parts[1]
        if target in (name, "_native") or (name == "__init__" and target in ("providers", "adapters")):
            continue
        assert target in LEVEL, f"{path.name} imports {module}, which is on no line"
        assert LEVEL[target] < LEVEL[name], f"{path.name} imports {module}, which is not below it"


def test_every_module_is_on_a_line() -> None:
    assert {name for name, _ in _sources()} <= set(LEVEL)


def test_the_doors_to_the_native_core() -> None:
    users = {name for name, path in _sources() for module, _ in _imports(path) if module == "datastates._native"}
    # beside the executor: the container for checksums, looking and structure for many arrays at once
    assert users == {"executor", "container", "looking", "structure"}


def test_frameworks_are_imported_inside_functions_only() -> None:
    for name, path in _sources():
        if name != "adapters":
            tops = {module.split(".")[0] for module, top in _imports(path) if top}
            assert not tops & FRAMEWORKS, f"{path.name} imports {tops & FRAMEWORKS}"


def test_the_command_line_loads_no_framework() -> None:
    import subprocess
    import sys

    code = "import sys, datastates.cli, datastates.providers; print(sorted(set(sys.modules) & {'torch', 'cupy'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
