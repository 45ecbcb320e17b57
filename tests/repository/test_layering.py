"""Imports between packages go down only, nobody reaches into another's private names, and files stay short."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = next(p for p in Path(__file__).parents if (p / "pyproject.toml").exists())
# from bottom to top: a package may import those of earlier lines, but not those of its own line
ORDER = [
    {"errors"},
    {"_base"},  # every stage uses it
    {"storage"},  # knows no checkpoints
    {"kept"},
    {"config"},
    {"state"},  # no I/O
    {"planning"},  # pure
    {"executor"},
    {"container"},
    {"ranks"},  # knows nothing of checkpoints
    {"commit"},
    {"reading"},  # no providers, no agreements
    {"saving", "restoring"},
    {"formats"},
    {"schedule"},  # when to save
    {"exporting", "draining"},
    {"files"},  # files under a framework
    {"api", "checkpointer"},
    {"protocol", "cli"},
    {"__init__", "__main__"},
    {"adapters", "serving", "testing", "demo"},
]
PROVIDERS = {"errors", "_base", "state", "container", "protocol"}
NATIVE = {
    "storage.local",
    "storage.local_files",
    "executor.executor",
    "executor.handed",
    "executor.jobs",
    "container.checksums",
    "container.pickle_native",
    "state.tensor_scan",
}
FRAMEWORKS = {
    "torch",
    "cupy",
    "jax",
    "ml_dtypes",
    "accelerate",
    "deepspeed",
    "megatron",
    "lightning",
    "opentelemetry",
    "torchtitan",
    "transformers",
    "vllm",
    "wandb",
}
STORAGE = {"_base", "storage"}
"""The packages that may call the system on files. ``adapters`` may, too: frameworks hand them files of their own."""
PURE = {
    "PathLike",
    "_exit",
    "environ",
    "fsdecode",
    "fsencode",
    "fspath",
    "getpid",
    "getppid",
    "kill",
    "register_at_fork",
    "strerror",
}
"""Names of ``os`` that do not touch files."""
NO_CHECKPOINTS = {
    "files.looks": "stands in for the calls by which others look, and makes none for itself",
    "executor.timeline": "writes a trace to the path that the user gives",
    "cli.output": "keeps the interpreter from writing to a closed pipe",
    "container.pickle_policy": "makes the paths that are part of a state",
}
KNOW_CUDA = {
    "files.looks": "names a module of torch that starts programs",
    "demo.torch_gpt": "a user's program",
}
"""The modules beside ``state.devices`` that know a kind of accelerator."""
NAMES, ROOMS = 74, 13
"""The most names of other packages that ``adapters`` may use, and the most packages; each change lowers them."""
LINES = 400
LONG = {
    "native/bindings/plain_pickle.cpp": "one table of opcodes",
}
LEVEL = {name: level for level, line in enumerate(ORDER) for name in line}


def _modules() -> dict[str, Path]:
    """Every module below ``datastates`` by its dotted name; the name of a package stands for its ``__init__``."""
    found = {}
    for folder, prefix in (("datastates", ()), ("providers", ("providers",)), ("adapters", ("adapters",))):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join([*prefix, *parts])
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = _modules()


def _package(module: str) -> str:
    return module.split(".")[0]


def _imports(module: str) -> list[tuple[str, str, str, bool]]:
    """Every import of a module: its source, its name there and here, and whether it runs at the module's own import."""
    tree = ast.parse(MODULES[module].read_text())
    inside = {
        id(n) for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)) for n in ast.walk(f)
    }
    found = []
    for node in ast.walk(tree):
        top = id(node) not in inside
        if isinstance(node, ast.Import):
            assert not any(a.name.startswith("datastates.") for a in node.names), f"{module}: say from ... import ..."
            found += [(a.name, "", a.asname or a.name, top) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            found += [(node.module or "", a.name, a.asname or a.name, top) for a in node.names]
    return found


def _ours(module: str) -> list[tuple[str, str, str]]:
    """A module's imports from this package: module, name there (empty for a module as a whole), and name here."""
    found = []
    for source, name, here, _ in _imports(module):
        if source == "datastates" or source.startswith("datastates."):
            inner = source.removeprefix("datastates").lstrip(".")
            both = f"{inner}.{name}".lstrip(".")
            if both in MODULES or both == "_native":
                found.append((both, "", here))
            else:
                found.append((inner or "__init__", name, here))
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_only(module: str) -> None:
    own = _package(module)
    for target, _, _ in _ours(module):
        package = _package(target)
        if package in (own, "_native") or (own == "__init__" and package in ("providers", "adapters")):
            continue
        if own == "providers":
            assert package in PROVIDERS, f"{module} imports {target}"
            continue
        if package == "providers":
            assert own in ("adapters", "testing", "demo", "api", "files"), f"{module} imports {target}"
            continue
        assert package in LEVEL, f"{module} imports {target}, which has no place in ORDER"
        assert LEVEL[package] < LEVEL[own], f"{module} imports {target}, which is not below it"


def test_adapters_use_few_names_of_few_packages() -> None:
    of_adapters = (used for m in MODULES if _package(m) == "adapters" for used in _ours(m))
    names = {(target, name) for target, name, _ in of_adapters if _package(target) != "adapters"}
    assert (len(names) <= NAMES, len({_package(target) for target, _ in names}) <= ROOMS) == (True, True), sorted(names)


def test_every_package_has_its_place_and_says_what_it_is() -> None:
    assert {_package(m) for m in MODULES} - {"providers"} == set(LEVEL)
    for package in {p.parent for p in MODULES.values()}:
        doc = ast.get_docstring(ast.parse((package / "__init__.py").read_text()))
        assert doc, f"{package.name}/__init__.py does not say what it is"


def test_no_module_imports_what_imports_it() -> None:
    graph = {m: {t for t, _, _ in _ours(m) if t in MODULES and t != m} for m in MODULES if m != "__init__"}
    for m, targets in graph.items():
        targets.discard("__init__")
        assert m.endswith("__main__") or "." not in m or _package(m) not in targets, f"{m} imports its own face"
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("module", MODULES)
def test_private_names_stay_in_their_package(module: str) -> None:
    ours, own = _ours(module), _package(module)
    for target, name, _ in ours:
        private = [part for part in [*target.split(".")[1:], name] if part.startswith("_") and part != "__version__"]
        assert not private or _package(target) == own, f"{module} imports {name or target}"
    foreign = {here for target, name, here in ours if not name and _package(target) != own}
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in foreign:
            assert not node.attr.startswith("_"), f"{module} uses {node.value.id}.{node.attr}"


def test_files_are_short() -> None:
    files = [p for folder in ("datastates", "providers", "adapters") for p in (ROOT / folder).rglob("*.py")]
    files += [p for p in (ROOT / "native").rglob("*.?pp") if "tests" not in p.parts]
    long = {str(p.relative_to(ROOT)) for p in files if len(p.read_text().splitlines()) > LINES}
    assert long == set(LONG)


def test_the_doors_to_the_native_core() -> None:
    # besides the executor: checksums of the container, and scans of many arrays or opcodes at once
    assert {m for m in MODULES if any(target == "_native" for target, _, _ in _ours(m))} == NATIVE


def test_only_stores_touch_files() -> None:
    above = {m for m in MODULES if _package(m) not in {*STORAGE, "adapters", "providers", "testing", "demo"}}
    found = {}
    for module in above:
        tree = ast.parse(MODULES[module].read_text())
        uses = {
            f"os.{node.attr}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"
        }
        imports = {source.split(".")[0] for source, _, _, _ in _imports(module)}
        found[module] = {use for use in uses if use.removeprefix("os.") not in PURE}
        found[module] |= imports & {"fcntl", "glob", "pathlib", "shutil", "tempfile"}
        if not any(isinstance(node, ast.FunctionDef) and node.name == "open" for node in tree.body):
            calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
            found[module] |= {"open()" for call in calls if isinstance(call, ast.Name) and call.id == "open"}
    assert {module for module, uses in found.items() if uses} == set(NO_CHECKPOINTS)


def test_one_module_knows_the_kinds_of_accelerators() -> None:
    assert {module for module, path in MODULES.items() if _knows_cuda(ast.parse(path.read_text()))} == {
        "state.devices",
        *KNOW_CUDA,
    }


def _knows_cuda(tree: ast.Module) -> bool:
    """Whether a module's code, apart from its docstrings, has a name or a text with ``cuda`` in it."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    words = (
        getattr(node, field, None)
        for node in ast.walk(tree)
        if id(node) not in docstrings
        for field in ("attr", "id", "name", "arg", "module", "value")
    )
    return any(isinstance(word, str) and "cuda" in word for word in words)


def test_one_module_writes_the_log() -> None:
    # a handler of the program may raise, and a filter for warnings may turn one into an error, in the middle of a save
    found = {m for m in MODULES if {source for source, _, _, _ in _imports(m)} & {"logging", "warnings"}}
    assert found == {"_base.log"}


def test_no_type_of_numpy_is_made_as_loses_an_interrupt() -> None:
    # NumPy 2.4.6 tries the length as a type first, and clears whatever that raises: findings/numpy-loses-interrupts.sh
    found = [module for module, path in MODULES.items() if re.search(r"dtype\(\((np\.void|['\"])", path.read_text())]
    assert not found, 'np.dtype(f"V{nbytes}") loses none'


def test_frameworks_are_imported_inside_functions_only() -> None:
    for module in MODULES:
        if _package(module) not in ("adapters", "serving"):
            tops = {source.split(".")[0] for source, _, _, top in _imports(module) if top}
            assert not tops & FRAMEWORKS, f"{module} imports {tops & FRAMEWORKS}"


def test_the_command_line_loads_no_framework() -> None:
    code = (
        "import sys, datastates.cli, datastates.providers; print(sorted(set(sys.modules) & {'torch', 'cupy', 'jax'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


FIRST_CALLS = """
import sys
import numpy as np
import datastates as ds
from datastates.providers import HostTensorProvider, PickledObjectProvider
path, before = sys.argv[1], set(sys.modules)
providers = [HostTensorProvider("m", {"w": np.ones(70000)}), PickledObjectProvider("o", lambda: {"step": 1}, [].append)]
ds.snapshot(providers, path).wait_committed()
ds.restore(providers, path)
ds.load(path)
with ds.open(path) as opened:
    opened["m/w"]
print(sorted({name.split(".")[0] for name in set(sys.modules) - before} - {"datastates"}))
"""


def test_the_first_calls_load_no_more_modules(tmp_path: Path) -> None:
    # some parts of NumPy are loaded at their first use: 10 to 70 ms in the first restore of a process
    done = subprocess.run(
        [sys.executable, "-P", "-c", FIRST_CALLS, str(tmp_path / "c")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
