"""The benchmarks run, every row and every system, with states of a few MB; how fast is not looked at."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
WRITERS = {"raw", "datastates", "torch.save/load", "safetensors", "DCP", "TorchSnapshot", "torch_checkpointing"}
CPU_ROWS = {
    "write": WRITERS,
    "restore-cold": WRITERS | {"torch.save/load mmap"},
    "restore-warm": WRITERS | {"torch.save/load mmap"},
    "call": {"few", "many", "module and optimizer", "state_dict() alone"},
    "throughput": {"plain", "datastates", "DCP async", "torch_checkpointing async"},
    "memory": {"datastates", "DCP async"},
    "index": {"plan", "encode", "open", "read one"},
}
GPU_ROWS = {
    "capture": {"pinned copy", "pinned copy, large", "one tensor", "one large tensor", "many small tensors"},
    "training": {"plain", "datastates", "DCP async", "torch_checkpointing async", "torch.save/load"},
    "durable": {"raw", "datastates", "torch.save/load", "DCP"},
    "durable-tmpfs": {"raw", "datastates", "torch.save/load", "DCP"},
}


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory on the sources' file system: that of temporary files may have no cache to be cold."""
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="tests-") as directory:
        yield Path(directory)


def run_script(name: str, *arguments: str | Path) -> None:
    """Run a script of benchmarks/ as a user does."""
    # MAKE…: of the make that may have started the tests; with PYTHONSAFEPATH a script does not find its neighbours
    unwanted = ("MAKE", "MFLAGS", "PYTHONSAFEPATH")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)} | {"OMP_NUM_THREADS": "1"}
    if name == "run.py" and not (ROOT / ".whl" / "raw_io").exists():  # carried to a machine that cannot build it
        subprocess.run(["make", "--no-print-directory", "build/raw_io"], cwd=ROOT, env=environment, check=True)
    command = [sys.executable, str(ROOT / "benchmarks" / name), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def run_suite(suite: str, scratch: Path, page: Path) -> dict[str, Any]:
    page.mkdir()
    path = page / f"{suite}.json"
    run_script("run.py", suite, "--tiny", "--repeat", "1", "--directory", scratch, "--json", path)
    report: dict[str, Any] = json.loads(path.read_text())
    assert not list(scratch.iterdir()), "files are left"
    return report


def check(report: dict[str, Any], rows: dict[str, set[str]]) -> None:
    assert set(report["benchmarks"]) == set(rows)
    for name, systems in rows.items():
        benchmark = report["benchmarks"][name]
        assert benchmark["errors"] == {}, name
        assert systems <= set(benchmark["samples"]), name
        for system, samples in benchmark["samples"].items():
            assert len(samples) == 1, (name, system)
            assert all(value > 0 for s in samples for k, value in s.items() if k != "cpu_seconds"), (name, system)


@pytest.mark.slow
def test_the_cpu_suite_and_its_page(scratch: Path, tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    report = run_suite("cpu", scratch, folder)
    check(report, CPU_ROWS)

    run_script("report.py", folder)
    page = (tmp_path / "docs.md").read_text()
    for name, systems in CPU_ROWS.items():
        picture = folder / f"cpu-{name}.svg"
        assert picture.name in page
        drawn = picture.read_text()
        assert all(system in drawn for system in systems - {"plain"} if name != "throughput"), name
        assert all(f"\n| {system} |" in page for system in systems), name
    writes = report["benchmarks"]["write"]
    rate = writes["parameters"]["bytes"] / writes["samples"]["DCP"][0]["seconds"] / 1e9
    assert f"| DCP | {rate:.2f} ({rate:.2f}–{rate:.2f}) |" in page
    assert "trial with tiny states" in page


def test_verdicts_come_out_of_the_samples(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()

    def page_of(ours: list[float], errors: dict[str, str]) -> str:
        samples = {
            "raw": [{"seconds": 1.0, "cpu_seconds": 0.1}] * 3,
            "datastates": [{"seconds": s, "cpu_seconds": 0.1} for s in ours],
        }
        benchmark = {"parameters": {"bytes": 10**9}, "settings": {}, "samples": samples, "errors": errors}
        machine = {
            **dict.fromkeys(("cpu", "kernel", "storage", "python", "datastates"), "some"),
            "cores": 2,
            "memory": 2**30,
            "packages": {},
        }
        report = {
            "suite": "cpu",
            "tiny": False,
            "repeat": 3,
            "date": "today",
            "machine": machine,
            "benchmarks": {"write": benchmark},
        }
        (folder / "cpu.json").write_text(json.dumps(report))
        run_script("report.py", folder)
        return (tmp_path / "docs.md").read_text()

    fast = page_of([1.0, 0.5, 4.0], {"DCP": "OSError: no\nroom"})
    assert "| durable write, over raw (Durable write) | ≥ 0.95 × | 1 × | 0.25–2 | 3 | reached |" in fast
    assert "| durable write, over DCP (Durable write) | ≥ 4 × | – | – | 0 | not measured |" in fast
    assert "- DCP failed: `OSError: no room`" in fast
    slow = page_of([1.1, 2.0, 1.0], {})
    assert "| durable write, over raw (Durable write) | ≥ 0.95 × | 0.909 × | 0.5–1 | 3 | **missed** |" in slow


def load(name: str) -> ModuleType:
    """A module of benchmarks/ that needs none of the others."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_systems_take_turns_and_one_that_fails_is_left_out() -> None:
    measure = load("measure")
    calls: list[str] = []

    def action(name: str, fails_at: int = 100) -> dict[str, float]:
        calls.append(name)
        if calls.count(name) > fails_at:
            raise ValueError(f"{name} is full")
        return {"seconds": float(len(calls))}

    result = measure.Result()
    actions = {"a": lambda: action("a"), "b": lambda: action("b", 2), "c": lambda: action("c")}
    measure.interleave(result, actions, measure.Plan(repeat=3), rounds={"c": 1})
    assert "".join(calls) == "abc" + "abc" + "ab" + "a"
    assert {name: len(samples) for name, samples in result.samples.items()} == {"a": 3, "b": 1, "c": 1}
    assert result.errors == {"b": "ValueError: b is full"}


def test_no_round_begins_too_late() -> None:
    measure = load("measure")
    result = measure.Result()
    measure.interleave(result, {"a": lambda: {"seconds": 1.0}}, measure.Plan(repeat=5, until=0.0))
    assert result.samples == {"a": [{"seconds": 1.0}]}


def test_a_dropped_file_is_cold_and_a_filled_one_warm(scratch: Path) -> None:
    page_cache = load("page_cache")
    file = scratch / "file"
    file.write_bytes(bytes(3 << 20))
    assert page_cache.resident(file) == 3 << 20
    page_cache.drop(scratch)
    assert page_cache.resident(file) == 0
    page_cache.fill(scratch)
    assert page_cache.resident(file) == 3 << 20


@pytest.mark.gpu
def test_the_gpu_suite_and_its_page(scratch: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine: the GPU benchmarks did NOT run")
    folder = tmp_path / "docs"
    check(run_suite("gpu", scratch, folder), GPU_ROWS)
    run_script("report.py", folder)
    assert all(f"gpu-{name}.svg" in (tmp_path / "docs.md").read_text() for name in GPU_ROWS)
