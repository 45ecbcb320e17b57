"""Make the page of benchmarks from the JSON files: ``python benchmarks/report.py [DIRECTORY]``.

It reads those of ``MACHINES``, such as ``DIRECTORY/cpu.json``, that exist, draws the pictures next to them, and writes
``DIRECTORY.md``. It makes ``scale.md``, next to that page, from ``scale.json``. A file with a number comes from the GPU
suite on a machine with that many GPUs, and may hold only the benchmarks that need them. Every figure and verdict comes
from the JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

import scale_page
from chapters import CHAPTERS, Chapter
from tables import Benchmark, markdown, spread, system_of
from targets import TARGETS

mpl.use("svg")
mpl.rcParams.update({"svg.hashsalt": "datastates", "svg.fonttype": "none", "font.size": 9})
from matplotlib import pyplot  # noqa: E402 - the backend is chosen first

MACHINES = {
    "gpu": "GPU machine",
    "gpu-load": "GPU machine, onto the GPU",
    "gpus-2": "Machine with two GPUs",
    "gpus-2-load": "Machine with two GPUs, onto a GPU",
    "gpus-2-return": "Machine with two GPUs, what other ranks saved",
    "gpus-4": "Machine with four GPUs",
    "cpu": "CPU machine",
    "cpu-pwrite": "CPU machine, with and without io_uring",
    "cpu-reshard": "CPU machine, what other ranks saved",
    "cpu-reshard-large": "CPU machine, 4.4 GB that other ranks saved",
    "cpu-first": "CPU machine, as after a restart",
    "cpu-files": "CPU machine, many files",
    "cpu-export": "CPU machine, export of weights",
    "cpu-meshes": "CPU machine, JAX's sharded trees",
    "cpu-cadence": "CPU machine, how often to save",
}
_INTRODUCTION = """# Benchmarks

This package beside its peers, on one machine after the other. All systems run interleaved: each once a round, after one
round that does not count. Figures are medians with the range over the rounds; ratios are taken within each round. *Raw*
is a program that moves as many bytes and does nothing else. Each chapter has a link to its samples. At the end are
measurements [of this package alone](#this-package-alone), and [its own goals](#own-goals).

Made by `make bench` and `make bench-gpu`.
"""
_GOALS = """## Own goals

What the project sets itself, most of it beside raw reads and writes, and whether the median reaches it.
"""


def main() -> None:
    """Write the pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=Path("docs/benchmarks"))
    directory: Path = parser.parse_args().directory
    files = {name: path for name in MACHINES if (path := directory / f"{name}.json").exists()}
    scale = directory / "scale.json"
    if scale.exists():
        report = json.loads(scale.read_text())
        directory.with_name("scale.md").write_text(scale_page.page(report, _machine(report)))
    elif not files:
        sys.exit(f"{directory} holds none of {', '.join(f'{name}.json' for name in (*MACHINES, 'scale'))}")
    if not files:
        return
    reports = {name: json.loads(path.read_text()) for name, path in files.items()}
    sections = [_INTRODUCTION]
    if scale.exists():
        sections.append("What many ranks cost is on [a page of its own](scale.md).\n")
    alone, goals = ["## This package alone\n"], [_GOALS]
    for name, report in reports.items():
        beside_peers, by_itself = chapters(report, name, directory)
        if beside_peers:
            sections += [f"## {MACHINES[name]}\n", _circumstances(report), *beside_peers]
        if by_itself:
            alone += by_itself
        others = [r for r in reports.values() if r is not report and r["suite"] == report["suite"]]
        if table_of_goals := targets(report, others):
            goals += [f"### Goals: {MACHINES[name]}\n", table_of_goals + "\n"]
    directory.with_suffix(".md").write_text("\n".join([*sections, *alone, *goals]))


def chapters(report: dict[str, Any], machine: str, directory: Path) -> tuple[list[str], list[str]]:
    """The chapters of one machine that compare this package with peers, and the others."""
    beside_peers: list[str] = []
    by_itself: list[str] = []
    for name, benchmark in report["benchmarks"].items():
        heading, *rest = chapter(name, benchmark, machine, directory)
        if compares(CHAPTERS[name], benchmark):
            beside_peers += [heading, *rest]
        else:
            by_itself += [heading, f"{MACHINES[machine]}: {_circumstances(report)}", *rest]
    return beside_peers, by_itself


def compares(about: Chapter, benchmark: Benchmark) -> bool:
    """Whether a peer was measured, or would have been on a larger machine."""
    systems = {system_of(row) for row in benchmark["samples"]}
    return not about.alone and (not systems or any(not s.startswith(("datastates", "raw", "plain")) for s in systems))


def chapter(name: str, benchmark: Benchmark, machine: str, directory: Path) -> list[str]:
    """One benchmark on one machine: picture, table, and, folded away, how it was measured."""
    about = CHAPTERS[name]
    numbers = {k: f"{v:,}" for k, v in benchmark["parameters"].items()}
    lines = [f"### {about.title}\n"]
    if benchmark["samples"]:
        picture = directory / f"{machine}-{name}.svg"
        draw(about, benchmark, picture)
        lines.append(f"![{about.title}]({directory.name}/{picture.name})\n")
    lines += [table(about, benchmark) + "\n", '<details markdown="1"><summary>How it is measured</summary>\n']
    if benchmark["samples"]:
        lines.append(about.how.format(**numbers) + "\n")
    lines += [f"- {system}: {setting}" for system, setting in benchmark["settings"].items()]
    lines += [f"- {system} failed: `{' '.join(error.split())}`" for system, error in benchmark["errors"].items()]
    return [*lines, f"\n[Every sample]({directory.name}/{machine}.json)\n", "</details>\n"]


def _circumstances(report: dict[str, Any]) -> str:
    trial = "\n**A trial with tiny states: its figures and verdicts mean nothing.**\n" if report["tiny"] else ""
    return f"{_machine(report)}\n{trial}"


def _machine(report: dict[str, Any]) -> str:
    m = report["machine"]
    count = f"{m['gpus']} × " if m.get("gpus", 1) > 1 else ""
    gpu = f"{count}{m['gpu']} (driver {m['driver']}, CUDA {m['cuda']}), " if "gpu" in m else ""
    packages = ", ".join(f"{name} {version}" for name, version in m["packages"].items())
    return (
        f"{report['date']}, {report['repeat']} rounds. {gpu}{m['cpu']}, {m['cores']} cores, "
        f"{m['memory'] / 2**30:.0f} GiB, Linux {m['kernel']}, {m['storage']}. "
        f"Python {m['python']}, datastates {m['datastates']}, {packages}."
    )


def targets(report: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """The table of a suite's targets, with verdicts; empty without any. It leaves out those measured only elsewhere."""
    rows = []
    for target in TARGETS:
        if target.suite != report["suite"]:
            continue
        benchmark = report["benchmarks"].get(target.benchmark)
        values = target.values(benchmark) if benchmark else []
        elsewhere = (other["benchmarks"].get(target.benchmark) for other in others)
        failed = benchmark and benchmark["errors"]
        if not values and not failed and any(target.values(b) for b in elsewhere if b):
            continue
        reached = target.reached(benchmark) if benchmark else None
        sign = "≥" if target.at_least else "≤"
        rows.append(
            (
                f"{target.what} ({CHAPTERS[target.benchmark].title})",
                f"{sign} {target.goal:g} {target.unit}",
                f"{statistics.median(values):.3g} {target.unit}" if values else "–",
                f"{min(values):.3g}–{max(values):.3g}" if values else "–",
                str(len(values)),
                {True: "reached", False: "**missed**", None: "not measured"}[reached],
            )
        )
    return markdown(("target", "goal", "reached", "range", "rounds", "verdict"), rows) if rows else ""


def table(chapter: Chapter, benchmark: Benchmark) -> str:
    """The table of every system's figures."""
    systems = [*benchmark["samples"], *(name for name in benchmark["errors"] if name not in benchmark["samples"])]
    rows = []
    for system in systems:
        cells = [system]
        for column in chapter.columns:
            values = [] if system_of(system) in column.skip else column.values(system)(benchmark)
            cells.append(spread(values, column.digits))
        rows.append(cells)
    return markdown(("", *(column.title for column in chapter.columns)), rows)


def draw(chapter: Chapter, benchmark: Benchmark, path: Path) -> None:
    """Draw a bar for each system's median of the first column, with its range."""
    column = chapter.columns[0]
    found = {
        name: column.values(name)(benchmark) for name in benchmark["samples"] if system_of(name) not in column.skip
    }
    shown = {name: values for name, values in found.items() if values}
    medians = [statistics.median(values) for values in shown.values()]
    errors = [
        [median - min(values) for median, values in zip(medians, shown.values(), strict=True)],
        [max(values) - median for median, values in zip(medians, shown.values(), strict=True)],
    ]
    colors = ["#1f77b4" if name.startswith("datastates") else "#b0b0b0" for name in shown]
    figure, axes = pyplot.subplots(figsize=(7, 0.6 + 0.32 * max(1, len(shown))), layout="constrained")
    axes.barh(list(shown), medians, xerr=errors, color=colors, error_kw={"ecolor": "#404040", "capsize": 2})
    axes.invert_yaxis()
    axes.set_xlabel(column.title)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
