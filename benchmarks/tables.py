"""Medians, spreads and tables of a benchmark's samples."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Benchmark = dict[str, Any]
"""One benchmark as in the JSON: parameters, settings, samples, errors."""


def system_of(row: str) -> str:
    """The system of a row: the text before the first comma."""
    return row.partition(", ")[0]


def beside(row: str, system: str) -> str:
    """The row of another system under the same circumstances."""
    return system + row[len(system_of(row)) :]


def column(benchmark: Benchmark, system: str, figure: str) -> list[float]:
    """One figure of one system, round by round; empty where it was not measured."""
    return [sample[figure] for sample in benchmark["samples"].get(system, []) if figure in sample]


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Ratios within each round."""
    return [a / b for a, b in zip(above, below, strict=False)]


def spread(values: Sequence[float], digits: str) -> str:
    """Median and range, as ``1.23 (1.20–1.30)``."""
    if not values:
        return "–"
    low, high = min(values), max(values)
    return f"{statistics.median(values):{digits}} ({low:{digits}}–{high:{digits}})"


def medians(benchmark: Benchmark) -> str:
    """One line for each system, with the median of each figure, and one for each error."""
    lines = []
    for system, samples in benchmark["samples"].items():
        figures = {figure: column(benchmark, system, figure) for sample in samples for figure in sample}
        shown = ", ".join(f"{figure} {statistics.median(values):.6g}" for figure, values in figures.items())
        lines.append(f"  {system:30} {shown}")
    lines += [f"  {system:30} FAILED: {error}" for system, error in benchmark["errors"].items()]
    return "\n".join(lines)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
