"""The targets, and how each figure is computed from the samples."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from tables import Benchmark, beside, column, ratios

MIB = 1 << 20
Values = Callable[[Benchmark], list[float]]
"""Computes a figure from a benchmark's samples, round by round; empty where it was not measured."""


@dataclass(frozen=True)
class Target:
    """One line of the table of targets.

    Attributes:
        suite, benchmark: Where the samples are.
        what: What is measured.
        goal: What the median must reach.
        at_least: Whether more is better.
        unit: The unit of the figure.
        values: Computes the figure round by round.
    """

    suite: str
    benchmark: str
    what: str
    goal: float
    at_least: bool
    unit: str
    values: Values

    def reached(self, benchmark: Benchmark) -> bool | None:
        """Whether the median reaches the goal; None where nothing was measured."""
        values = self.values(benchmark)
        if not values:
            return None
        median = statistics.median(values)
        return median >= self.goal if self.at_least else median <= self.goal


def times_as_fast(slower: str, faster: str = "datastates", figure: str = "seconds") -> Values:
    """How many times as fast one system is as another, within each round."""
    return lambda b: ratios(column(b, slower, figure), column(b, faster, figure))


def scaled(system: str, figure: str, factor: float = 1.0) -> Values:
    """One figure of one system, in another unit."""
    return lambda b: [value * factor for value in column(b, system, figure)]


def cpu_per_gb(system: str) -> Values:
    """CPU seconds for 10⁹ bytes."""
    return lambda b: [value / b["parameters"]["bytes"] * 1e9 for value in column(b, system, "cpu_seconds")]


def lost(system: str) -> Values:
    """Seconds by which the period with a checkpoint is longer than the median plain one."""

    def values(b: Benchmark) -> list[float]:
        plain = column(b, beside(system, "plain"), "seconds")
        return [value - statistics.median(plain) for value in column(b, system, "seconds")] if plain else []

    return values


def draining(system: str) -> Values:
    """Iterations a second while a checkpoint drains, over those of the plain loop."""

    def values(b: Benchmark) -> list[float]:
        plain = column(b, "plain", "seconds")
        iteration = statistics.median(plain) / b["parameters"]["period"] if plain else 0.0
        return [iteration / value for value in column(b, system, "draining")] if plain else []

    return values


def fetched(system: str) -> Values:
    """Bytes that storage read for a restore, over those that all ranks needed."""
    return lambda b: ratios(column(b, system, "fetched"), column(b, system, "needed"))


def _over_the_faster(b: Benchmark) -> list[float]:
    pairs = zip(column(b, "safetensors", "seconds"), column(b, "torch.save/load mmap", "seconds"), strict=False)
    return ratios([min(pair) for pair in pairs], column(b, "datastates", "seconds"))


def _above_the_cache(b: Benchmark) -> list[float]:
    return [(value - b["parameters"]["host_cache"]) / MIB for value in column(b, "datastates", "above")]


def _off(figure: str, best: str) -> Values:
    """Percent by which a figure is off the best one: in each round, of the row where it is most."""

    def values(b: Benchmark) -> list[float]:
        off = [ratios(column(b, row, figure), column(b, row, best)) for row in b["samples"]]
        return [100 * max(abs(1 - ratio) for ratio in of_round) for of_round in zip(*off, strict=False)]

    return values


def _against(suite: str, benchmark: str, verb: str, goals: dict[str, float], figure: str = "seconds") -> list[Target]:
    return [
        Target(suite, benchmark, f"{verb}, over {peer}", goal, True, "×", times_as_fast(peer, figure=figure))
        for peer, goal in goals.items()
    ]


def _over_orbax() -> list[Target]:
    figures = {
        "save call": "call",
        "training time lost": "lost",
        "durable write": "write",
        "restore": "read",
        "restore onto another mesh": "mesh",
    }
    return [
        Target("cpu", "meshes", f"{what}, over {peer}", 2, True, "×", _at_least_a_millisecond(peer, figure))
        for (what, figure), peer in product(figures.items(), ("Orbax", "Orbax with OCDBT"))
    ]


def _at_least_a_millisecond(slower: str, figure: str) -> Values:
    """As :func:`times_as_fast`, where less than a millisecond, such as nothing at all, counts as one."""
    return lambda b: ratios(*([max(s, 1e-3) for s in column(b, system, figure)] for system in (slower, "datastates")))


def _without_io_uring(benchmark: str, verb: str) -> Target:
    values = times_as_fast("datastates", "datastates with pwrite")
    return Target("cpu", benchmark, f"{verb} with pwrite, over io_uring", 0.9, True, "×", values)


def _onto_the_gpu(benchmark: str, whence: str) -> list[Target]:
    compared = {
        "load onto the GPU": ("datastates", {"raw": 0.95, "InstantTensor": 1}),
        "restore onto the GPU": ("datastates in place", {"raw": 0.95}),
    }
    return [
        Target("gpu", benchmark, f"{verb} {whence}, over {peer}", goal, True, "×", times_as_fast(peer, system))
        for verb, (system, goals) in compared.items()
        for peer, goal in goals.items()
    ]


def _of_ranks(layout: str) -> list[Target]:
    ours, raw = f"datastates, {layout}", f"raw, {layout}"
    return [
        Target(
            "gpu", "ranks", f"durable write, {layout}, over raw", 0.95, True, "×", times_as_fast(raw, ours, "write")
        ),
        Target("gpu", "ranks", f"cold restore, {layout}, over raw", 0.95, True, "×", times_as_fast(raw, ours, "read")),
        Target("gpu", "ranks", f"bytes read, {layout}, over those needed", 1.05, False, "×", fetched(ours)),
    ]


def _resharded() -> list[Target]:
    found = []
    layouts = ("2 → 2", "2 → 1", "1 → 2", "4 → 2", "2 → 2 in columns")
    for benchmark, layout in product(("reshard", "reshard-large"), layouts):
        ours, through, raw = (f"{name}, {layout}" for name in ("datastates", "datastates through DCP", "raw"))
        found += [
            Target("cpu", benchmark, f"restore, {layout}, {what}", goal, goal < 1, "×", values)
            for what, goal, values in (
                ("over raw", 0.9, times_as_fast(raw, ours, "read")),
                ("through DCP, over our own", 0.9, times_as_fast(ours, through, "read")),
                ("bytes read, over those needed", 1.05, fetched(ours)),
            )
        ]
    return found


TARGETS = [
    *_against(
        "cpu",
        "write",
        "durable write",
        {"raw": 0.95, "torch.save/load": 4, "DCP": 4, "TorchSnapshot": 4, "safetensors": 1.5},
    ),
    _without_io_uring("write", "durable write"),
    _without_io_uring("restore-cold", "cold restore"),
    Target("cpu", "write", "CPU seconds per GB written", 0.25, False, "s/GB", cpu_per_gb("datastates")),
    *_against(
        "cpu",
        "restore-cold",
        "cold restore",
        {"raw": 0.95, "raw restore": 0.95, "torch.save/load": 3.8, "DCP": 3.8, "TorchSnapshot": 3.8},
    ),
    *_against(
        "cpu",
        "restore-first",
        "first restore of a process",
        {"raw restore": 0.9, "torch.save/load": 3.8, "DCP": 3.8, "TorchSnapshot": 3.8},
    ),
    Target(
        "cpu",
        "restore-warm",
        "warm restore, over the faster of safetensors and torch.load(mmap=True)",
        1,
        True,
        "×",
        _over_the_faster,
    ),
    Target("cpu", "call", "snapshot() call, few tensors", 1, False, "ms", scaled("few", "seconds", 1e3)),
    Target("cpu", "call", "snapshot() call, many tensors", 50, False, "ms", scaled("many", "seconds", 1e3)),
    Target(
        "cpu", "memory", "host memory above the process's own and the host cache", 64, False, "MiB", _above_the_cache
    ),
    Target("cpu", "index", "planning", 1, False, "s", scaled("plan", "seconds")),
    Target("cpu", "index", "encoding the index", 1, False, "s", scaled("encode", "seconds")),
    Target("cpu", "index", "opening the index", 1, False, "s", scaled("open", "seconds")),
    Target("cpu", "index", "reading one tensor", 10, False, "ms", scaled("read one", "seconds", 1e3)),
    Target(
        "cpu", "files", "restore of 64 files, over one file", 0.95, True, "×", times_as_fast("one file", "64 files")
    ),
    *_against("cpu", "export", "export", {"raw": 0.9}),
    Target(
        "cpu",
        "export",
        "host memory of an export, 72 MiB of host cache included",
        136,
        False,
        "MiB",
        scaled("datastates", "above", 1 / MIB),
    ),
    Target("cpu", "ranks", "bytes read, 2 → 2, over those needed", 1.05, False, "×", fetched("datastates, 2 → 2")),
    Target(
        "gpu",
        "capture",
        "capture of one large tensor, over a pinned copy",
        0.95,
        True,
        "×",
        times_as_fast("pinned copy, large", "one large tensor"),
    ),
    Target(
        "gpu",
        "capture",
        "time of many small tensors, over one tensor of as many bytes",
        3,
        False,
        "×",
        times_as_fast("many small tensors", "one tensor"),
    ),
    Target("gpu", "training", "loop time lost per checkpoint", 0.1, False, "s", lost("datastates")),
    Target(
        "gpu",
        "training",
        "loop time lost per checkpoint, with the device cache",
        0.02,
        False,
        "s",
        lost("datastates with device_cache"),
    ),
    Target(
        "gpu", "training", "throughput while draining, over the plain loop", 0.98, True, "×", draining("datastates")
    ),
    *_against("gpu", "durable", "durable write", {"raw": 0.95}, "write"),
    *_against("gpu", "durable", "cold restore onto the GPU", {"raw": 0.95}, "read"),
    *_against("gpu", "durable-tmpfs", "write to tmpfs", {"raw": 0.9}, "write"),
    *_against("gpu", "durable-tmpfs", "restore from tmpfs onto the GPU", {"raw": 0.9}, "read"),
    *_onto_the_gpu("load-tmpfs", "from memory"),
    *_onto_the_gpu("load-cold", "from a cold file"),
    *_of_ranks("2 → 2"),
    *_of_ranks("2 → 1"),
    *_of_ranks("1 → 2"),
    *_of_ranks("4 → 2"),
    *_resharded(),
    *_over_orbax(),
    Target("cpu", "cadence", "chosen interval, off the best one", 10, False, "%", _off("interval", "best")),
    Target("cpu", "cadence", "useful time, less than with the best interval", 1, False, "%", _off("useful", "most")),
]
