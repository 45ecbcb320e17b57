"""Every Python block of the documentation runs, the blocks of one page one after the other in one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(p for p in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")] if "```python" in p.read_text())

ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""The variables that torchrun would set, for pages about several ranks, which run here as one."""

FRAMEWORKS = ("accelerate", "deepspeed", "jax", "lightning", "megatron", "transformers")
"""Packages that a page may need and that are not always installed."""


def frameworks_of(page: Path) -> set[str]:
    return {name for name in FRAMEWORKS if re.search(rf"^(import|from) {name}\b", page.read_text(), re.M)}


@pytest.mark.parametrize(
    "page", [pytest.param(p, id=p.name, marks=[] if p.name == "README.md" else [pytest.mark.long]) for p in PAGES]
)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    if missing := {name for name in frameworks_of(page) if find_spec(name) is None}:
        pytest.skip(f"{', '.join(sorted(missing))} not installed: this page did NOT run")
    run(page, tmp_path)


@pytest.mark.long
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


@pytest.mark.parametrize(
    ("column", "chapter", "peers"),
    [
        (0, "### Training a GPT on the GPU", ("torch_checkpointing async", "DCP async", "torch.save/load")),
        (1, "### Durable write", ("torch_checkpointing", "DCP", "torch.save/load", "raw")),
        (2, "### Cold restore in place", ("torch_checkpointing", "DCP", "torch.save/load", "raw")),
    ],
)
def test_the_figures_of_the_first_page_are_those_of_the_benchmarks(
    column: int, chapter: str, peers: tuple[str, ...]
) -> None:
    measured = table_below(ROOT / "docs" / "benchmarks.md", chapter)
    shown = [cells[column] for cells in list(table_below(ROOT / "README.md", "# datastates").values())[1:]]
    for said, row in zip(shown, ("datastates", *peers), strict=False):
        assert float(said.split()[0]) == float(f"{float(measured[row][0].split()[0]):.2g}"), row
