"""The trace of a run has its snapshots, its restores, the waits for the gate and the training steps on one clock."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hold import GATE, held

import datastates as ds
from datastates import _native
from datastates.executor.jobs import NOTHING, Recorded
from datastates.executor.timeline import Span
from datastates.providers import HostTensorProvider, from_stateful
from datastates.saving import gate, run_trace
from datastates.saving.snapshot import Snapshot, attach, detach, fail, reach


def spans_in(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def rows_in(path: Path) -> dict[str, list[str]]:
    """The names of the spans of each track, whose spans may be in several rows."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    rows: dict[str, list[str]] = {}
    for event in spans_in(path):
        rows.setdefault(names[event["tid"]].split(" (")[0], []).append(event["name"])
    return rows


def test_a_run_of_training(tmp_path: Path) -> None:
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    providers = [from_stateful("model", model)]
    begin = time.monotonic()
    with ds.Checkpointer(tmp_path / "c", host_cache="4MiB", block="1MiB") as checkpointer:
        assert checkpointer.restore(providers) is None
        for step in (1, 2, 3):
            model(torch.ones(2, 512)).sum().backward()
            with held("capture", until=GATE):
                checkpointer.snapshot(providers, step=step)
                optimizer.step()
        checkpointer.restore(providers)
    end = time.monotonic()
    checkpointer.trace(tmp_path / "run.json")
    rows = rows_in(tmp_path / "run.json")
    assert rows["snapshots"] == ["snapshot 1", "snapshot 2", "snapshot 3"]
    assert rows["restores"] == ["restore 3"]
    assert Counter(rows["training thread"]) >= Counter(
        {"step": 2, "stall": 3, "gate": 3, "open": 1, "compare": 1, "objects": 1}
    )
    assert {"capture", "write", "sync", "commit", "read", "verify"} <= rows.keys()
    for event in spans_in(tmp_path / "run.json"):
        assert begin * 1e6 <= event["ts"] <= event["ts"] + event["dur"] <= end * 1e6


def test_what_is_in_flight_or_failed_says_so(tmp_path: Path) -> None:
    provider = HostTensorProvider("m", {"a": np.ones(1 << 20)})
    with ds.Checkpointer(tmp_path / "c", on_error="warn") as checkpointer:
        checkpointer.snapshot([provider], step=1)
        checkpointer.wait()
        with held():
            checkpointer.snapshot([provider], step=2)
            checkpointer.trace(tmp_path / "run.json")
        assert rows_in(tmp_path / "run.json")["snapshots"] == ["snapshot 1", "snapshot 2 in flight"]
        checkpointer.wait()
        _native.arm_fault("write", "fail", errno.EIO, 1, 1)
        checkpointer.snapshot([provider], step=3)
    checkpointer.trace(tmp_path / "run.json")
    assert rows_in(tmp_path / "run.json")["snapshots"] == ["snapshot 1", "snapshot 2", "snapshot 3 failed"]


def test_the_steps_of_an_earlier_run_are_left_out_and_their_number_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    ds.snapshot([from_stateful("o", optimizer)], tmp_path / "first").wait_committed()
    optimizer.step()
    optimizer.step()
    with ds.Checkpointer(tmp_path / "c") as checkpointer:
        assert gate.steps(checkpointer._trace._begin) == []
        for _ in range(gate.MOST_STEPS + 10):
            gate._before_step(optimizer, (optimizer,), {})
        assert len(gate.steps(checkpointer._trace._begin)) == gate.MOST_STEPS - 1


def test_the_oldest_spans_are_forgotten_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_trace, "MOST", 3)
    trace = run_trace.RunTrace()
    for step in range(3):
        trace.add_restore(step, [Span("read", "slot 0", step, step + 1, 0)])
    trace.write(tmp_path / "run.json", "a run", [])
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert events[0]["args"] == {"name": "a run, 3 older spans left out"}
    assert [event["name"] for event in events if event["ph"] == "X"] == ["read", "restore 2", "read"]


def test_a_trace_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    with (
        ds.Checkpointer(tmp_path / "c") as checkpointer,
        pytest.raises(FileNotFoundError, match="nowhere"),
    ):
        checkpointer.trace(tmp_path / "nowhere" / "trace.json")


def test_work_is_made_coarse_by_the_thread_that_ends_the_snapshot_alone(tmp_path: Path) -> None:
    snapshot, other = (Snapshot(step, 8, time.monotonic()) for step in range(2))
    calls: list[int] = []

    def recorded() -> Recorded:
        calls.append(threading.get_ident())
        return NOTHING

    attach(snapshot, lambda: None, dict, recorded)
    reach(snapshot, "committed")
    trace = run_trace.RunTrace()
    trace.add_snapshot(snapshot)
    assert (calls, len(trace._kept)) == ([], 0)
    detach(snapshot, {}, NOTHING)
    fail(other, OSError("before a job was made"))
    other.exception()
    trace.add_snapshot(other)
    assert (calls, [kept.name for kept in trace._kept]) == ([], ["snapshot 0", "snapshot 1 failed"])


def test_work_is_written_of_a_snapshot_that_the_engine_is_about_to_let_go(tmp_path: Path) -> None:
    """A snapshot has ended a moment before its work is taken from the native core."""
    write = np.array([_native.STAGES.index("write")], np.uint8)
    work = Recorded(write, np.zeros(1, np.uint32), np.array([1.0]), np.array([2.0]), np.array([8], np.uint64))
    snapshot = Snapshot(1, 8, time.monotonic())
    attach(snapshot, lambda: None, dict, lambda: work)
    reach(snapshot, "committed")
    trace = run_trace.RunTrace()
    trace.add_snapshot(snapshot)
    trace.write(tmp_path / "t.json", "run", ())
    assert rows_in(tmp_path / "t.json")["write"] == ["write"]
