"""The timeline of a snapshot: sums of its stages, and the trace that Perfetto shows."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from hold import held

import datastates as ds
from datastates.executor.timeline import TRAINING_THREAD, WAITS_FOR, Span, chrome_trace, coarse, stages
from datastates.providers import HostTensorProvider, PickledObjectProvider


def test_overlapping_spans_count_once() -> None:
    spans = [
        Span("write", "slot 0", 1.0, 2.0, 10),
        Span("write", "slot 1", 1.5, 3.0, 20),
        Span("write", "slot 0", 5.0, 6.0, 30),
        Span("write", "slot 1", 5.2, 5.4, 5),
        Span("capture", "capture", 0.5, 1.0, 7),
    ]
    found = stages(spans)
    assert list(found) == ["capture", "write"]
    write = found["write"]
    assert write.seconds == pytest.approx(5.0)
    assert write.busy_seconds == pytest.approx(3.0)
    assert write.waited_seconds == pytest.approx(2.0)
    assert write.nbytes == 65
    assert write.gbps == pytest.approx(65 / 3 / 1e9)
    assert write.waits_for == "checksum"


def test_a_stage_without_bytes_has_no_rate() -> None:
    assert stages([Span("commit", "engine thread", 1.0, 2.0, 0)])["commit"].gbps is None


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(KeyError, match="lunch"):
        stages([Span("lunch", "t", 0.0, 1.0, 0)])


def test_a_trace_has_one_row_a_track() -> None:
    spans = [Span("write", "slot 0", 2.0, 3.0, 10, 0.5), Span("stall", "training thread", 1.0, 1.5, 0)]
    events = chrome_trace(spans, process=7, name="snapshot 3")["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "training thread", 1: "slot 0"}
    work = [(e["name"], e["tid"], e["ts"], e["dur"], e["args"]) for e in events if e["ph"] == "X"]
    assert work == [
        ("stall", 0, 1e6, 0.5e6, {"bytes": 0, "idle_seconds": 0.0}),
        ("write", 1, 2e6, 1e6, {"bytes": 10, "idle_seconds": 0.5}),
    ]
    assert {e["pid"] for e in events} == {7}


def test_the_trace_of_a_snapshot(tmp_path: Path) -> None:
    providers = [
        HostTensorProvider("m", {"a": np.ones(1 << 20, np.float32), "b": np.ones(10)}, lazy=True),
        PickledObjectProvider("loop", get=lambda: {"epoch": 1}, set=print),
    ]
    before = time.monotonic()
    with ds.Checkpointer(tmp_path / "c", block="1MiB") as checkpointer:
        snapshot = checkpointer.snapshot(providers, step=3)
        checkpointer.gate()
        snapshot.wait_committed()
        after = time.monotonic()
        snapshot.trace(tmp_path / "trace.json")
    report = snapshot.report
    assert set(report.stages) <= set(WAITS_FOR)
    assert {"stall", "serialize", "capture", "write", "encode", "sync", "commit"} <= set(report.stages)
    assert report.stages["capture"].nbytes >= 4 << 20
    assert report.stages["write"].nbytes >= 4 << 20
    trace = json.loads((tmp_path / "trace.json").read_text())
    work = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {e["name"] for e in work} == set(report.stages)
    for event in work:
        assert before * 1e6 <= event["ts"] <= event["ts"] + event["dur"] <= after * 1e6
    for stage in report.stages.values():
        assert 0 <= stage.busy_seconds <= stage.seconds * (1 + 1e-9) + 1e-9


def test_the_index_is_encoded_while_the_last_extents_are_being_written(tmp_path: Path) -> None:
    provider = HostTensorProvider("m", {"a": np.ones(1 << 20, np.float32)}, lazy=True)
    with held():
        snapshot = ds.snapshot([provider], tmp_path / "c")
        while "encode" not in snapshot.report.stages:
            time.sleep(0.001)
    snapshot.wait_committed()
    snapshot.trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    end = {e["name"]: e["ts"] + e["dur"] for e in trace["traceEvents"] if e["ph"] == "X"}
    assert end["encode"] < end["write"] < end["tail"]


def test_a_trace_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    snapshot = ds.snapshot([HostTensorProvider("m", {"a": np.ones(2)})], tmp_path / "c")
    snapshot.wait_committed()
    with pytest.raises(FileNotFoundError, match=r"nowhere"):
        snapshot.trace(tmp_path / "nowhere" / "trace.json")


# --- the trace of a run


def test_short_gaps_are_closed_and_slots_become_one_track() -> None:
    spans = [
        Span("stall", TRAINING_THREAD, 0.0, 1.0, 0),
        Span("write", "slot 0", 10.0, 20.0, 1),
        Span("write", "slot 1", 15.0, 18.0, 2),
        Span("write", "slot 1", 20.9, 30.0, 4),
        Span("write", "slot 0", 31.1, 100.0, 8),
        Span("capture", "capture", 2.0, 3.0, 16),
        Span("capture", "copies from GPU 1", 2.5, 4.0, 32),
        Span("gate", TRAINING_THREAD, 1.5, 2.0, 0),
    ]
    assert sorted(coarse(spans, "snapshot 3", "snapshots")) == [
        Span("capture", "capture", 2.0, 3.0, 16),
        Span("capture", "copies from GPU 1", 2.5, 4.0, 32),
        Span("gate", TRAINING_THREAD, 1.5, 2.0, 0),
        Span("snapshot 3", "snapshots", 0.0, 100.0, 0),
        Span("stall", TRAINING_THREAD, 0.0, 1.0, 0),
        Span("write", "write", 10.0, 30.0, 7, pytest.approx(0.9)),
        Span("write", "write", 31.1, 100.0, 8),
    ]
    assert coarse([], "nothing", "snapshots") == []


def test_the_number_of_spans_of_a_snapshot_does_not_depend_on_its_size() -> None:
    many = [Span("write", f"slot {n % 16}", n / 10, n / 10 + 0.05, 1) for n in range(50_000)]
    found = coarse(many, "snapshot 1", "snapshots")
    assert len(found) <= 101
    assert sum(span.nbytes for span in found) == 50_000
    assert stages(found[1:])["write"].busy_seconds == pytest.approx(2500.0)


def test_spans_that_cross_are_in_rows_of_their_own() -> None:
    spans = [
        Span("step", "t", 0.0, 10.0, 0),
        Span("stall", "t", 2.0, 4.0, 0),
        Span("crosses", "t", 3.0, 12.0, 0),
        Span("crosses too", "t", 9.0, 15.0, 0),
        Span("step", "t", 10.0, 20.0, 0),
        Span("after", "t", 12.0, 13.0, 0),
    ]
    events = chrome_trace(spans, process=1, name="run")["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    rows = [(e["name"], names[e["tid"]]) for e in events if e["ph"] == "X"]
    assert rows == [
        ("step", "t"),
        ("stall", "t"),
        ("crosses", "t (2)"),
        ("crosses too", "t (3)"),
        ("step", "t"),
        ("after", "t"),
    ]
