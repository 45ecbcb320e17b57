"""Every Python block of the documentation runs, the blocks of one page one after the other in one process."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(p for p in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")] if "```python" in p.read_text())

ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""The variables that torchrun would set, for pages about several ranks, which run here as one."""

FRAMEWORKS = ("accelerate", "deepspeed", "jax", "lightning", "megatron", "transformers")
"""Packages that a page may need and that are not always installed."""


Benchmark = dict[str, Any]
"""One benchmark of a file of samples."""


def frameworks_of(page: Path) -> set[str]:
    return {name for name in FRAMEWORKS if re.search(rf"^(import|from) {name}\b", page.read_text(), re.M)}


SLOW = {
    *("cadence", "deepspeed", "formats", "from-torch-save", "loops", "megatron", "partial-restore"),
    *("dcp", "export", "jax", "providers-reference", "ranks", "running", "seeing", "trainers"),
}
"""Pages that take some ten seconds or more: they are run by hand."""


def marks_of(page: Path) -> list[pytest.MarkDecorator]:
    if page.stem in SLOW:
        return [pytest.mark.by_hand]
    return [] if page.name == "README.md" else [pytest.mark.long]


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name, marks=marks_of(page)) for page in PAGES])
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    if missing := {name for name in frameworks_of(page) if find_spec(name) is None}:
        pytest.skip(f"{', '.join(sorted(missing))} not installed: this page did NOT run")
    run(page, tmp_path)


@pytest.mark.by_hand
def test_the_first_page_runs_again_in_the_same_folder(tmp_path: Path) -> None:
    """Its first example resumes from what it finds, and no other example saves into its directory."""
    for _ in range(2):
        run(ROOT / "README.md", tmp_path)


def run(page: Path, folder: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    script = folder / "page.py"
    script.write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **ONE_RANK},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]:
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if not re.match(r"[a-z]+:", link):
                assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_tests_of_the_guarantees_are_there() -> None:
    named = re.findall(r"`(tests/[\w/.]+)`", (ROOT / "docs" / "guarantees.md").read_text())
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]


def table_below(page: Path, title: str) -> dict[str, list[str]]:
    """The first table below a title: the cells of each row by its first cell."""
    lines = iter(page.read_text().partition(title)[2].splitlines())
    rows: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("| ") and "---" not in line:
            first, *cells = (cell.strip(" *") for cell in line.strip("|").split("|"))
            rows[first] = cells
        elif rows:
            return rows
    raise AssertionError(f"{page.name} has no table below {title!r}")


def lost(benchmark: Benchmark, system: str) -> float:
    """Seconds of training that a save costs."""
    plain, saving = ([sample["seconds"] for sample in benchmark["samples"][name]] for name in ("plain", system))
    return statistics.median(saving) - statistics.median(plain)


def rate(benchmark: Benchmark, system: str) -> float:
    """GB/s."""
    return statistics.median(
        benchmark["parameters"]["bytes"] / sample["seconds"] / 1e9 for sample in benchmark["samples"][system]
    )


@pytest.mark.parametrize(
    ("column", "file", "name", "figure", "peers"),
    [
        (0, "gpu", "training", lost, ("torch_checkpointing async", "DCP async", "torch.save/load")),
        (1, "cpu", "write", rate, ("torch_checkpointing", "DCP", "torch.save/load", "raw")),
        (2, "cpu", "restore-cold", rate, ("torch_checkpointing", "DCP", "torch.save/load", "raw")),
    ],
)
def test_the_figures_of_the_first_page_are_those_of_the_benchmarks(
    column: int, file: str, name: str, figure: Callable[[Benchmark, str], float], peers: tuple[str, ...]
) -> None:
    report = json.loads((ROOT / "docs" / "benchmarks" / f"{file}.json").read_text())
    shown = [cells[column] for cells in list(table_below(ROOT / "README.md", "# datastates").values())[1:]]
    for said, system in zip(shown, ("datastates", *peers), strict=False):
        assert float(said.split()[0]) == float(f"{figure(report['benchmarks'][name], system):.2g}"), system


def test_the_first_pages_say_of_which_build_the_training_was_measured() -> None:
    date = json.loads((ROOT / "docs" / "benchmarks" / "gpu.json").read_text())["date"][:10]
    for page in (ROOT / "README.md", ROOT / "docs" / "index.md"):
        assert f"the build of {date}" in page.read_text(), page.name
