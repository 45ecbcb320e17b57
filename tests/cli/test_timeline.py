"""``timeline`` draws a trace as one page that loads nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from command import run, run_json

import datastates as ds
from datastates.cli import commands
from datastates.cli.timeline import MEANINGS, _ticks, page
from datastates.executor.timeline import RESTORE_WAITS_FOR, STEP, TRAINING_THREAD, WAITS_FOR, Span
from datastates.providers import HostTensorProvider

SPANS = [
    Span("step", TRAINING_THREAD, 100.0, 104.0, 0),
    Span("stall", TRAINING_THREAD, 101.0, 102.0, 0),
    Span("snapshot 7", "snapshots <&>", 101.0, 108.0, 0),
    Span("write", "write", 103.0, 108.0, 5_000_000),
]


class Elements(HTMLParser):
    """The elements of a page: each one's name and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_a_span_is_a_rectangle_at_its_time() -> None:
    html = page(SPANS, "a title & more")
    rectangles = [attributes for name, attributes in Elements(html).found if name == "rect"]
    place = [(float(r["x"] or ""), float(r["width"] or "")) for r in rectangles]
    assert place == [(0, 600), (150, 1050), (150, 150), (450, 750)]
    heights = [int(r["height"] or "") for r in rectangles]
    assert heights[2] < heights[0], "a call is drawn inside the step around it"
    assert "<title>write: 5.000000 s from 3.000000 s, 4.8 MiB</title>" in html
    assert "snapshots &lt;&amp;&gt;" in html
    assert "a title &amp; more" in html
    meaning = "one snapshot, from the call to its commit"
    assert f"<td>snapshot</td><td>1</td><td>7.000 s</td><td>7.000 s</td><td></td><td>{meaning}</td>" in html
    assert "<td>4.8 MiB</td><td>data goes to storage</td>" in html


def test_every_kind_of_span_has_a_meaning() -> None:
    assert {STEP, "snapshot", "restore", *WAITS_FOR, *RESTORE_WAITS_FOR} == MEANINGS.keys()


def test_a_narrow_window_scrolls_the_spans_and_not_their_names() -> None:
    html = page(SPANS, "t")
    names, spans = (part.partition("</svg>")[0] for part in html.split("<svg")[1:])
    assert TRAINING_THREAD in names
    assert "<rect" in spans
    assert html.index('<div class="scroll">') > html.index(TRAINING_THREAD)


def test_the_page_loads_nothing() -> None:
    html = page(SPANS, "t")
    assert not [a for _, a in Elements(html).found if a.keys() & {"src", "href"}]
    assert not re.search(r"https?:|@import|url\(|<script", html)


@pytest.mark.parametrize("seconds", [0.0, 1e-6, 0.013, 1.0, 3.9, 4.0, 86_400.0, 1e7])
def test_the_axis_has_few_round_ticks(seconds: float) -> None:
    ticks = _ticks(seconds)
    assert ticks[0] == 0
    assert ticks[-1] <= seconds * (1 + 1e-9)
    assert len(ticks) <= 11
    assert len(ticks) >= 5 or not seconds


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    provider = HostTensorProvider("m", {"a": np.ones(1 << 20)})
    with ds.Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.snapshot([provider], step=3)
        checkpointer.restore([provider])
    checkpointer.trace(tmp_path / "run.json")
    return tmp_path / "run.json"


def test_the_command_writes_the_page(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = trace.with_name("out.html")
    assert run(capsys, "timeline", trace, "-o", out)[0] == 0
    assert "snapshot 3" in out.read_text()
    assert "restore 3" in out.read_text()
    status, found = run_json(capsys, "timeline", trace, "-o", out)
    assert (status, found["path"], found["bytes"]) == (0, str(out), out.stat().st_size)


def test_what_is_no_trace_is_refused(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("no JSON", "[]", "{}", '{"traceEvents": []}', '{"traceEvents": [{"ph": "X"}]}'):
        trace.write_text(text)
        assert commands.main(["timeline", str(trace), "-o", str(trace.with_name("out.html"))]) == 2
        assert f"{trace} is no trace" in capsys.readouterr().err
    assert commands.main(["timeline", str(trace.with_name("none")), "-o", str(trace.with_name("out.html"))]) == 1
    assert not trace.with_name("out.html").exists()


CHROMIUM = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: the page was NOT opened in a browser")
def test_a_browser_draws_it(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert CHROMIUM is not None
    out = tmp_path / "out.html"
    run(capsys, "timeline", trace, "-o", out)
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [CHROMIUM, *options, "--dump-dom", out.as_uri()], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.count("<rect") == out.read_text().count("<rect")
    assert done.stdout.count("<td>") == out.read_text().count("<td>")
