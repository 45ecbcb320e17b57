"""The picture of the README: a training loop while its state is saved, with each of a few systems.

``python benchmarks/picture.py measure OUT.json`` trains the GPT of :mod:`loops` on a GPU and saves once with each
system. ``python benchmarks/picture.py draw IN.json OUT.svg`` draws the picture.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from loops import GpuLoop, MarkedLoop
from machine import describe
from measure import Result
from peers import Roster
from states import nbytes
from training import Watch

SYSTEMS = {"torch.save/load": "torch.save", "DCP async": "DCP async_save", "datastates": "datastates"}
"""The systems of :mod:`peers`, each with its name in the picture."""
_BEFORE, _AFTER = 8, 16
"""Iterations before the save, and least iterations after it."""
_TRAINS, _WAITS, _WRITES = "#4c8f5b", "#d1495b", "#8d96a3"


def measure(loop: MarkedLoop, directory: Path) -> dict[str, Any]:
    """Save with each system, twice: the first save makes caches and processes. Returns what :func:`draw` takes."""
    total = nbytes(loop.state)
    lines = {}
    with Roster(
        directory, result := Result(parameters={}), host_cache=(total // (64 << 20) + 2) * (64 << 20)
    ) as roster:
        for name in SYSTEMS:
            _line(loop, roster, name)
            lines[name] = _line(loop, roster, name)
    if result.errors:
        raise RuntimeError(f"a system failed: {result.errors}")
    return {"date": time.strftime("%Y-%m-%d"), "machine": describe(directory), "bytes": total, "lines": lines}


def _line(loop: MarkedLoop, roster: Roster, name: str) -> dict[str, Any]:
    """Train, save once, and train on until the checkpoint is durable.

    Returns:
        Seconds since the beginning of the save. ``before`` and ``after``: the ends of the iterations before and after
        it, and in ``before`` the beginning of the first one; ``call``: the end of the call that saves; ``durable``: the
        moment at which the checkpoint is on stable storage.
    """
    system = roster[name]
    loop.synchronize()
    before = [loop.mark()]
    for _ in range(_BEFORE):
        loop.iterate(system.gate)
        before.append(loop.mark())
    loop.synchronize()
    begin, first = time.perf_counter(), loop.mark()
    pending = system.save_async(loop.state)
    call = time.perf_counter() - begin
    watch = Watch(pending)
    after: list[Any] = []
    while len(after) < _AFTER or not watch.done:
        loop.iterate(system.gate)
        after.append(loop.mark())
    loop.synchronize()
    watch.join()
    return {
        "before": [-loop.seconds(mark, first) for mark in before],
        "call": call,
        "after": [loop.seconds(first, mark) for mark in after],
        "durable": watch.at - begin,
    }


def draw(measured: dict[str, Any], path: Path) -> None:
    """Draw two bars for each system: the iterations of the loop, and the time until the checkpoint is durable."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "datastates"
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    lines = measured["lines"]
    end = max(line["durable"] for line in lines.values()) * 1.1
    figure, axes = pyplot.subplots(figsize=(8, 2.6), layout="constrained")
    for row, line in enumerate(lines.values()):
        begins, ends = [*line["before"][:-1], line["call"], *line["after"][:-1]], [*line["before"][1:], *line["after"]]
        usual = statistics.median(until - begin for begin, until in zip(begins, ends, strict=True))
        longer = [max(0.0, until - begin - usual) for begin, until in zip(begins, ends, strict=True)]
        slower = [(0.0, line["call"]), *zip(begins, longer, strict=True)]
        trained = [(b + more, e - b - more) for b, e, more in zip(begins, ends, longer, strict=True)]
        seconds = line["after"][-1] - len(line["after"]) * usual
        axes.broken_barh(trained, (row - 0.28, 0.3), facecolor=_TRAINS, edgecolor="white", linewidth=0.4)
        axes.broken_barh(slower, (row - 0.28, 0.3), facecolor=_WAITS)
        axes.broken_barh([(0, line["durable"])], (row + 0.06, 0.16), facecolor=_WRITES)
        axes.text(end * 1.02, row, f"training lost\n{seconds:.2g} s", va="center", fontsize=8)
    axes.set_yticks(range(len(lines)), [SYSTEMS[name] for name in lines])
    axes.set_xlim(lines["datastates"]["before"][0], end)
    axes.invert_yaxis()
    axes.set_xlabel(f"seconds since the save of {measured['bytes'] / 1e9:.1f} GB began")
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles = [Patch(color=color) for color in (_TRAINS, _WAITS, _WRITES)]
    named = ["an iteration", "training waits, or is slower", "until the checkpoint is on stable storage"]
    figure.legend(handles, named, loc="outside upper left", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="train on a GPU, and write what was measured")
    measuring.add_argument("json", type=Path)
    drawing = commands.add_parser("draw", help="draw the picture of what was measured")
    drawing.add_argument("json", type=Path)
    drawing.add_argument("svg", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "draw":
        draw(json.loads(arguments.json.read_text()), arguments.svg)
        return
    with tempfile.TemporaryDirectory(dir=arguments.json.parent) as directory:
        measured = measure(GpuLoop(tiny=False), Path(directory).absolute())
    arguments.json.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
