"""Make the page of benchmarks from the JSON files: ``python benchmarks/report.py [DIRECTORY]``.

It reads the files of ``MACHINES``, such as ``DIRECTORY/cpu.json``, that exist, and writes ``DIRECTORY.md``. It makes
``scale.md``, next to that page, from ``scale.json``. A file may hold some of its suite's benchmarks only. Every figure
comes from the JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import scale_page
from chapters import CHAPTERS, Chapter, Figure
from tables import Benchmark, markdown, system_of

MACHINES = {
    "GPU machine": ("gpu", "gpu-durable", "gpu-load"),
    "Machine with two GPUs": ("gpus-2", "gpus-2-load", "gpus-2-return", "gpus-2-loop"),
    "Machine with four GPUs": ("gpus-4",),
    "CPU machine": (
        "cpu",
        "cpu-first",
        "cpu-files",
        "cpu-reshard",
        "cpu-reshard-large",
        "cpu-export",
        "cpu-meshes",
        "cpu-cadence",
        "cpu-lora",
    ),
    "CPU machine, with and without io_uring": ("cpu-pwrite",),
}
"""The files of each machine, without their suffix."""
_RAW = ("raw", "raw restore", "pinned copy", "state_dict() alone")
_WIDE = 0.3
"""A range wider than this part of the median is shown."""
_INTRODUCTION = """# Benchmarks

This package beside its peers. The systems of a benchmark take turns, a round each, after one round that does not count.
Figures are medians. In brackets: the range, where it is wider than {wide:.0f} % of the median, and *once*, where a
system had one round of several. *Raw* is the least work: a program that moves as many bytes, or torch's copy. A cold
page cache is checked with mincore.

A run measures the build of its date, and not what changed since; the newest is of {newest}. Its name leads to all
samples and settings. Made by `make bench` and `make bench-gpu`, or of the samples alone by
`python benchmarks/report.py`. What many ranks cost is on [a page of its own](scale.md).
"""
_Runs = dict[str, dict[str, Any]]
"""Reports by the names of their files."""


def main() -> None:
    """Write the pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=Path("docs/benchmarks"))
    directory: Path = parser.parse_args().directory
    paths = {name: directory / f"{name}.json" for name in ("scale", *(n for names in MACHINES.values() for n in names))}
    reports: _Runs = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    if not reports:
        sys.exit(f"{directory} holds none of {', '.join(path.name for path in paths.values())}")
    if scale := reports.pop("scale", None):
        directory.with_name("scale.md").write_text(scale_page.page(scale, ", ".join(_circumstances(scale)) + "."))
    if reports:
        directory.with_suffix(".md").write_text(page(reports, directory))


def page(reports: _Runs, directory: Path) -> str:
    """The text of the page."""
    newest = max(report["date"][:10] for report in reports.values())
    sections = [_INTRODUCTION.format(wide=100 * _WIDE, newest=newest)]
    if (directory / "picture.json").exists():
        sections.append(_picture(json.loads((directory / "picture.json").read_text()), directory.name))
    shown: set[str] = set()
    for machine, names in MACHINES.items():
        if runs := {name: reports[name] for name in names if name in reports}:
            found = newest_of(runs)
            shown |= set(found)
            sections += [f"## {machine}\n", *section(machine, runs, found, directory.name)]
    return "\n".join([*sections, "## How it is measured\n", *_how(shown), ""])


def newest_of(runs: _Runs) -> dict[str, str]:
    """The benchmarks of a machine in the page's order, each with the newest of its runs."""
    found = {}
    for benchmark in CHAPTERS:
        held = {name: run["benchmarks"][benchmark] for name, run in runs.items() if benchmark in run["benchmarks"]}
        if ran := [name for name, b in held.items() if b["samples"] or b["errors"]]:
            found[benchmark] = max(ran, key=lambda name: runs[name]["date"])
    return found


def section(machine: str, runs: _Runs, found: dict[str, str], folder: str) -> Iterator[str]:
    """The lines about a machine, its table, and what failed."""
    chosen = [(CHAPTERS[chapter], name, runs[name]["benchmarks"][chapter]) for chapter, name in found.items()]
    usual: list[str] = []
    for run in (name for name in runs if name in found.values()):
        date, *here = _circumstances(runs[run])
        rounds = max(_rounds(benchmark) for _, name, benchmark in chosen if name == run)
        more = [phrase for phrase in here if phrase not in usual]
        yield ", ".join([f"- {run}: {date[:10]}", f"{rounds} rounds", *more])
        usual = usual or here
    if any(runs[name]["tiny"] for name in found.values()):
        yield "\n**A trial with tiny states: its figures mean nothing.**"
    rows = [
        row
        for about, name, benchmark in chosen
        if benchmark["samples"]
        for row in rows_of(about, benchmark, f"{machine} {about.title}", f"[{name}]({folder}/{name}.json)")
    ]
    yield "\n" + markdown(("", "datastates", "raw", "peers"), rows) + "\n"
    for about, _, benchmark in chosen:
        for system, error in benchmark["errors"].items():
            yield f"- {about.title}: {system} failed: `{' '.join(error.split())}`\n"


def rows_of(about: Chapter, benchmark: Benchmark, name: str, link: str) -> Iterator[list[str]]:
    """The rows of one benchmark: one for each figure, and each layout of ranks.

    Args:
        about, benchmark: The benchmark.
        name: What the anchor is made of.
        link: Leads to the samples.
    """
    anchor = re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-")
    sizes = ("bytes", "changing", "large", "host_cache")
    numbers = {name: _size(n) if name in sizes else f"{n:,}" for name, n in benchmark["parameters"].items()}
    title = f'<a id="{anchor}"></a>' + f"**{about.title}**, {about.of.format(**numbers)}, {link}<br>"
    for layout in dict.fromkeys(_parts(about, row)[1] for row in benchmark["samples"]):
        for figure in about.figures:
            if any(cells := _cells(about, benchmark, figure, layout)):
                ranks = f"{layout.replace(' → ', '→')}: " if layout else ""
                yield [f"{title}{ranks}{figure.title}", *cells]
                title = ""


def _parts(about: Chapter, row: str) -> tuple[str, str]:
    """The system of a row, and the layout of ranks if the chapter has any."""
    return (system_of(row), row.partition(", ")[2]) if about.layouts else (row, "")


def _cells(about: Chapter, benchmark: Benchmark, figure: Figure, layout: str) -> list[str]:
    """One figure of this package, of the least work, and of the peers."""
    ours, raw, peers = [], [], []
    for row in sorted(benchmark["samples"], key=lambda row: system_of(row) != "datastates"):
        system, where = _parts(about, row)
        values = figure.values(benchmark, row) if system != "plain" and where == layout else []
        if not values:
            continue
        median = _median(values, _rounds(benchmark))
        if system.startswith(_RAW):
            raw.append(median if system == "raw" else f"{system} {median}")
        elif about.alone or system.startswith("datastates"):
            ours.append(f"{system.removeprefix('datastates').lstrip(' ,')} {median}".lstrip())
        else:
            peers.append(f"{system} {median}")
    return ["<br>".join(cell) for cell in (ours, raw, peers)]


def _rounds(benchmark: Benchmark) -> int:
    return max(map(len, benchmark["samples"].values()), default=0)


def _median(values: Sequence[float], rounds: int) -> str:
    """The median, and what the introduction says of brackets."""
    median, low, high = statistics.median(values), min(values), max(values)
    if high - low > _WIDE * abs(median):
        return f"{_digits(median)} ({_digits(low)}–{_digits(high)})"
    return _digits(median) + (" (once)" if len(values) < 2 <= rounds else "")


def _digits(value: float) -> str:
    """Three digits that count, without an exponent where it can be."""
    return f"{float(f'{value:.3g}'):g}"


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.3g} MB"


def _picture(measured: dict[str, Any], folder: str) -> str:
    size = _size(measured["bytes"])
    return (
        f"![A training loop while {size} are saved, with each of several systems]({folder}/picture.svg)\n\n"
        f"*One save of {size} on {measured['machine']['gpu']}, {measured['date']}, by `benchmarks/picture.py`.*\n"
    )


def _circumstances(report: dict[str, Any]) -> list[str]:
    """The date, the machine and the versions, a phrase each."""
    m = report["machine"]
    count = f"{m['gpus']} × " if m.get("gpus", 1) > 1 else ""
    gpu = [f"{count}{m['gpu']}", f"driver {m['driver']}", f"CUDA {m['cuda']}"] if "gpu" in m else []
    kept = [m["cpu"], f"{m['cores']} cores", f"{m['memory'] / 2**30:.0f} GiB", f"Linux {m['kernel']}", m["storage"]]
    versions = {"Python": m["python"], "datastates": m["datastates"], **m["packages"]}
    return [report["date"], *gpu, *kept, *(f"{name} {version}" for name, version in versions.items())]


def _how(shown: set[str]) -> list[str]:
    """How benchmarks are measured: a point for all that are measured alike."""
    titles: dict[str, list[str]] = {}
    for name, about in CHAPTERS.items():
        if name in shown:
            titles.setdefault(about.how, []).append(about.title)
    return [f"- **{', '.join(alike)}:** {how}" for how, alike in titles.items()]


if __name__ == "__main__":
    main()
