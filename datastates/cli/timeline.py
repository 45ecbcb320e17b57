"""The command ``datastates timeline``: draws a trace as one page of HTML."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from html import escape

from datastates.cli.arguments import as_location
from datastates.cli.output import WrongCallError, as_size, print_json, say
from datastates.executor.timeline import STEP, Span, read_trace
from datastates.storage import store_of

MEANINGS = {
    STEP: "from one optimizer step to the next",
    "snapshot": "one snapshot, from the call to its commit",
    "stall": "the call of snapshot(), which training waits for",
    "gate": "training waits until all is captured",
    "serialize": "values that are no arrays are pickled",
    "submit": "the work is handed to native threads",
    "create": "the file is made",
    "capture": "arrays are copied into the host cache",
    "cache_wait": "waits for room in the host cache",
    "checksum": "checksums of what was captured",
    "encode": "the index of the file is made",
    "write": "data goes to storage",
    "tail": "the index goes to storage",
    "sync": "waits until storage has all of it",
    "commit": "the checkpoint is published, with all ranks",
    "restore": "one restore, from the call to its end",
    "open": "a checkpoint is chosen and opened",
    "compare": "it is compared with the live state",
    "read": "data comes from storage",
    "verify": "checksums of what was read",
    "copy": "data is copied into the live arrays",
    "wait": "the call waits for the reads of all ranks",
    "digest": "digests of whole arrays are compared",
    "objects": "values that are no arrays are built",
}
"""The meaning of each kind of span."""
_LABEL, _WIDTH, _ROW, _AXIS = 180, 1200, 22, 26
"""Pixels: width of the rows' names and of the rows, height of a row and of the axis."""
_INSET, _LETTER = 3, 7
"""Pixels: how much lower a span inside another is drawn, and the width of a letter."""
_COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#44bb99", "#999933", "#885577")
_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 14px system-ui, sans-serif; margin: 1.5em; color: #222; background: #fff; }}
.spans {{ display: flex; }}
.scroll {{ overflow-x: auto; }}
svg {{ flex: none; }}
svg text {{ font: 12px system-ui, sans-serif; fill: #222; }}
svg text.inside {{ fill: #fff; pointer-events: none; }}
table {{ border-collapse: collapse; margin-top: 1.5em; }}
th, td {{ padding: .2em .8em; text-align: right; white-space: nowrap; border-bottom: 1px solid #ddd; }}
th:first-child, td:first-child, th:last-child, td:last-child {{ text-align: left; }}
@media (max-width: 700px) {{ body {{ margin: .7em; }} th, td {{ padding: .2em .4em; }} .track {{ width: 7em; }} }}
</style>
<h1>{title}</h1>
<p>{seconds} s, {count} spans. Point at a span to see its times and size.</p>
{svg}
<div class="scroll">
<table>
<tr><th>span</th><th>number</th><th>sum</th><th>longest</th><th>size</th><th>meaning</th></tr>
{table}
</table>
</div>
</html>
"""


def page(spans: Sequence[Span], title: str) -> str:
    """Draw spans as a page of HTML, which loads nothing; raises ValueError if there are none."""
    if not spans:
        raise ValueError("it has no spans")
    begin, end = min(s.begin for s in spans), max(s.end for s in spans)
    return _PAGE.format(
        title=escape(title),
        seconds=f"{end - begin:.3f}",
        count=len(spans),
        svg=_svg(spans, begin, end),
        table="\n".join(_sums(spans)),
    )


def _svg(spans: Sequence[Span], begin: float, end: float) -> str:
    scale = _WIDTH / ((end - begin) or 1.0)
    ordered = sorted(spans, key=lambda s: (s.begin, -s.end))
    kinds = sorted({_kind(s) for s in spans})
    colors = {kind: _COLORS[i % len(_COLORS)] for i, kind in enumerate(kinds)}
    top = {track: _AXIS + i * _ROW for i, track in enumerate(dict.fromkeys(s.track for s in ordered))}
    height = _AXIS + len(top) * _ROW
    found = ['<div class="spans">', f'<svg class="track" width="{_LABEL}" height="{height}">']
    found += [f'<text x="0" y="{y + 15}">{escape(track)}</text>' for track, y in top.items()]
    found += ["</svg>", '<div class="scroll">', f'<svg width="{_WIDTH}" height="{height}" role="img">']
    for at in _ticks(end - begin):
        x = at * scale
        found.append(f'<line x1="{x:.1f}" y1="{_AXIS - 6}" x2="{x:.1f}" y2="{height}" stroke="#ddd"/>')
        found.append(f'<text x="{x:.1f}" y="{_AXIS - 10}">{at:g} s</text>')
    names = []  # drawn last, over all spans
    around: dict[str, list[float]] = {track: [] for track in top}
    for span in ordered:
        ends = around[span.track]
        while ends and ends[-1] <= span.begin:
            ends.pop()
        inset = min(_INSET * len(ends), _ROW // 2)  # a span inside another is drawn lower than it
        ends.append(span.end)
        x, y = (span.begin - begin) * scale, top[span.track]
        width, seconds = max((span.end - span.begin) * scale, 0.5), span.end - span.begin
        size = f", {as_size(span.nbytes)}" if span.nbytes else ""
        about = f"{span.stage}: {seconds:.6f} s from {span.begin - begin:.6f} s{size}"
        found.append(
            f'<rect x="{x:.2f}" y="{y + 2 + inset}" width="{width:.2f}" height="{_ROW - 4 - inset}" '
            f'fill="{colors[_kind(span)]}"><title>{escape(about)}</title></rect>'
        )
        if width > _LETTER * (len(span.stage) + 1):
            names.append(f'<text class="inside" x="{x + 4:.2f}" y="{y + 15}">{escape(span.stage)}</text>')
    return "\n".join([*found, *names, "</svg>", "</div>", "</div>"])


def _ticks(seconds: float) -> list[float]:
    """Round times, from 0 on, that divide a duration into four to ten parts."""
    if seconds <= 0:
        return [0.0]
    unit = 10.0 ** math.floor(math.log10(seconds / 4))
    step = next(unit * m for m in (5, 2, 1) if seconds / (unit * m) >= 4)
    return [i * step for i in range(int(seconds / step) + 1)]


def _kind(span: Span) -> str:
    """The name of a span, without the number of a snapshot or a restore."""
    return span.stage.split(" ")[0]


def _sums(spans: Sequence[Span]) -> list[str]:
    """The rows of the table: the spans of each kind in numbers, and its meaning. The largest sum comes first."""
    by_kind: dict[str, list[Span]] = {}
    for span in spans:
        by_kind.setdefault(_kind(span), []).append(span)
    found = []
    for kind, ones in by_kind.items():
        times = [s.end - s.begin for s in ones]
        cells = [escape(kind), str(len(ones)), f"{sum(times):.3f} s", f"{max(times):.3f} s"]
        nbytes = sum(s.nbytes for s in ones)
        cells += [as_size(nbytes) if nbytes else "", MEANINGS.get(kind, "")]
        found.append((sum(times), f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"))
    return [row for _, row in sorted(found, key=lambda one: -one[0])]


WHAT = "draw a trace of snapshots, restores or a run as one page of HTML"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments to the command's parser."""
    command.add_argument("trace", metavar="TRACE", type=as_location, help="a file that trace() has written")
    what = "the page to write; an existing file is replaced"
    command.add_argument("-o", "--output", metavar="OUT.html", type=as_location, required=True, help=what)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    trace, output = arguments.trace, arguments.output
    try:
        html = page(read_trace(trace), f"datastates: {trace.name}")
    except ValueError as error:
        raise WrongCallError(f"{trace} is no trace: {error}") from error
    data = html.encode("utf-8", "backslashreplace")
    store_of(output).replace(output, data)
    if arguments.json:
        print_json({"ok": True, "path": str(output), "bytes": len(data)})
    else:
        say(f"{output}: {as_size(len(data))}, to be opened in a browser")
    return 0
