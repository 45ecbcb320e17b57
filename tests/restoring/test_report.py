"""What a restore tells about itself: its report, its log line and its trace."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

import datastates as ds
from datastates.providers import HostTensorProvider, PickledObjectProvider

MIB = 1 << 20


def _providers() -> list[ds.StateProvider]:
    arrays = {"a": np.ones(MIB), "b": np.ones(10)}
    return [HostTensorProvider("m", arrays), PickledObjectProvider("loop", get=lambda: 1, set=lambda _: None)]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    ds.snapshot(_providers(), tmp_path / "c", step=7).wait_committed()
    return tmp_path / "c"


def test_the_report_has_the_stages_and_their_bytes(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "datastates"):
        restored = ds.restore(_providers(), saved, verify="digest")
    report = restored.report
    assert (report.step, report.path) == (restored.step, restored.path) == (7, saved)
    assert report.nbytes == restored.needed_nbytes >= 8 * MIB
    assert report.read_nbytes == restored.read_nbytes
    called = ["open", "compare", "wait", "digest", "objects"]  # one after the other on the calling thread
    assert [s.stage for s in restored.spans if s.stage in called] == called
    assert sum(report.stages[name].seconds for name in called) <= report.seconds
    assert report.gbps == report.nbytes / report.seconds / 1e9
    lines = [r.getMessage() for r in caplog.records if "restored" in r.getMessage()]
    assert lines == [str(report)]
    assert lines[0].startswith("step 7 restored: 0.008 GB in ")


@pytest.mark.parametrize("keys", [None, "m/a"])
def test_the_native_core_tells_what_it_read(keys: str | None, saved: Path) -> None:
    report = ds.restore(_providers(), saved, keys=keys).report
    in_order = ["open", "compare", "read", "verify", "copy", "wait", "digest", "objects"]
    assert [*report.stages] == [stage for stage in in_order if stage in report.stages]
    for stage in ("read", "verify"):
        assert report.stages[stage].nbytes >= 8 * MIB
        assert report.stages[stage].gbps


def test_a_trace_has_the_calling_thread_and_the_reads(saved: Path, tmp_path: Path) -> None:
    ds.restore(_providers(), saved, keys="m/a").trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"name": "datastates, restore of step 7"} in [e["args"] for e in events if e["name"] == "process_name"]
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"training thread", "read slot 0"} <= tracks
    assert {"open", "compare", "read", "objects"} <= {e["name"] for e in events if e["ph"] == "X"}


def test_a_checkpoint_without_arrays_has_no_rate(tmp_path: Path) -> None:
    provider = PickledObjectProvider("loop", get=lambda: 1, set=lambda _: None)
    ds.snapshot([provider], tmp_path / "c").wait_committed()
    report = ds.restore([provider], tmp_path / "c").report
    assert (report.nbytes, report.gbps) == (0, None)
    assert "GB/s" not in str(report)
