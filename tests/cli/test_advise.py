"""``advise`` says what the trace of snapshots implies."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import run, run_json
from hold import GATE, held

import datastates as ds
from datastates import _native
from datastates.cli import commands
from datastates.cli.advise import advice
from datastates.executor import jobs
from datastates.executor.timeline import SNAPSHOTS, STEP, TRAINING_THREAD, Span, coarse, read_trace, write_trace
from datastates.providers import HostTensorProvider
from datastates.saving import running
from datastates.saving.snapshot import spans_of
from datastates.schedule.due import best_interval

GB = 10**9


def spans(
    *, gate: float = 0.0, room: float = 0.0, write: float = 1.0, gpu: bool = False, begin: float = 5.0
) -> list[Span]:
    """One snapshot of 1 GB that takes 10 ms in the call, and 2 s until it is durable."""
    track = "copies from GPU 0" if gpu else "capture thread"
    return [
        Span("stall", TRAINING_THREAD, begin, begin + 0.01, 0),
        Span("gate", TRAINING_THREAD, begin + 0.1, begin + 0.1 + gate, 0),
        Span("cache_wait", "waiting for the cache", begin + 0.1, begin + 0.1 + room, 0),
        Span("capture", track, begin, begin + 0.5, GB),
        Span("write", "write slot 0", begin + 0.05, begin + 0.05 + write, GB),
        Span("sync", "engine thread", begin + 1.9, begin + 1.95, 0),
        Span("commit", "engine thread", begin + 1.95, begin + 2.0, 0),
    ]


def in_run(step: int | str, found: list[Span]) -> list[Span]:
    """The spans of a snapshot as the trace of a run has them."""
    return coarse(found, f"snapshot {step}", SNAPSHOTS)


def about(found: list[Any]) -> dict[str, str]:
    return dict(found)


def test_the_cost_and_the_interval() -> None:
    run = [*in_run(1, spans(gate=0.04)), *in_run(2, spans(gate=0.06, begin=100.0))]
    found = about(advice(run, 3600.0))
    assert found["cost"] == (
        "training waited 60.0 ms for each of 2 snapshot(s), 10.0 ms in the call and 50.0 ms at gates; "
        "durable after 2.00 s"
    )
    assert found["every"].startswith(f"save each {best_interval(0.06, 3600.0, 2.0):.3g} s")
    assert "--mtbf" in about(advice(spans(), None))["every"]


def test_the_caches() -> None:
    assert about(advice(spans(room=0.5), None))["host_cache"] == "leave it: no step waited for the capture"
    assert about(advice(spans(gate=0.2), None))["host_cache"].startswith("leave it: the capture waited 0.0 ms")
    small = about(advice(spans(gate=0.2, room=0.15), None))
    assert small["host_cache"] == "1000MB hold the whole state: its capture waited 150.0 ms for room in the cache"
    assert "device_cache" not in small
    gpu = about(advice(spans(gate=0.2, gpu=True), None))
    assert gpu["device_cache"] == "up to 1000MB of free GPU memory shorten the 200.0 ms that steps waited at gates"


@pytest.mark.parametrize(("write", "what"), [(1.8, "only faster storage"), (1.0, "it is not the limit")])
def test_the_storage(write: float, what: str) -> None:
    found = about(advice(spans(write=write), None))["storage"]
    assert found.startswith(f"it wrote {1 / write:.2f} GB/s, and was busy for {50 * write:.0f} %")
    assert what in found


def test_a_real_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = ds.snapshot([HostTensorProvider("m", {"w": np.ones(100_000)})], tmp_path / "c")
    snapshot.wait_committed()
    snapshot.trace(tmp_path / "t.json")
    read = sorted(read_trace(tmp_path / "t.json"))
    assert [(s.stage, s.track, s.nbytes) for s in read] == [
        (s.stage, s.track, s.nbytes) for s in sorted(spans_of(snapshot))
    ]
    status, text = run(capsys, "advise", tmp_path / "t.json", "--mtbf", "6h")
    assert status == 0
    assert [line.partition(": ")[0] for line in text.splitlines()] == ["cost", "every", "host_cache", "storage"]
    status, told = run_json(capsys, "advise", tmp_path / "t.json")
    assert (status, told["ok"], told["advice"][0]["about"]) == (0, True, "cost")


def test_both_traces_of_a_snapshot_say_the_same() -> None:
    waits = [Span("cache_wait", "waiting for the cache", 5.1 + n / 100, 5.102 + n / 100, 0) for n in range(80)]
    one = [*spans(gate=0.2, gpu=True), *waits]
    around = [
        Span(STEP, TRAINING_THREAD, 4.0, 9.0, 0),
        Span("write", "write", 1.0, 5.0, GB),
    ]  # its snapshot is forgotten
    assert advice([*around, *in_run(5, one)], 3600.0) == advice(one, 3600.0)


def test_only_committed_snapshots_of_a_run_count() -> None:
    one, overlapping = in_run(1, spans(gate=0.2)), in_run(2, spans(gate=0.2, begin=6.0))
    others = [*in_run("3 failed", spans(begin=20.0)[:5]), *in_run("4 in flight", spans(begin=30.0)[:2])]
    found = about(advice([*others, *overlapping, *one], None))
    assert "for each of 2 snapshot(s), 10.0 ms in the call and 200.0 ms at gates; durable after 2.00 s" in found["cost"]
    assert found["storage"].startswith("it wrote 1.00 GB/s, and was busy for 67 %")


def test_a_real_run_from_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def from_gpu(job: Any) -> jobs.Recorded:
        found = jobs.recorded(job)
        return replace(found, track=np.where(found.stage == jobs._CAPTURE, jobs._GPU, found.track))

    monkeypatch.setattr(running, "recorded", from_gpu)
    provider = HostTensorProvider("m", {"w": np.ones(8 << 20, "u1")}, lazy=True)
    with ds.Checkpointer(tmp_path / "c", on_error="warn", host_cache="2MiB", block="1MiB") as checkpointer:
        taken = []
        for step in (1, 2):
            with held("write", until=GATE):
                taken.append(checkpointer.snapshot([provider], step=step))
                checkpointer.gate()
            checkpointer.wait()
        _native.arm_fault("write", "fail", errno.EIO, 1, 1)
        checkpointer.snapshot([provider], step=3)
    checkpointer.trace(tmp_path / "run.json")
    found = about(advice(read_trace(tmp_path / "run.json"), None))
    stalls = [1e3 * snapshot.report.stall_seconds for snapshot in taken]
    assert found["cost"].startswith(f"training waited {sum(stalls) / 2:.1f} ms for each of 2 snapshot(s), ")
    assert "device_cache" in found, found
    write = [snapshot.report.stages["write"] for snapshot in taken]
    rate = sum(one.nbytes for one in write) / sum(one.busy_seconds for one in write) / 1e9
    assert found["storage"].startswith(f"it wrote {rate:.2f} GB/s, and was busy for ")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": [{"ph": "X", "name": "stall"}]}'])
def test_what_is_no_trace_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.json").write_text(text)
    assert commands.main(["advise", str(tmp_path / "t.json")]) == 2
    assert "t.json is no trace of snapshots: " in capsys.readouterr().err


def test_a_trace_without_a_commit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "t.json", spans()[:3], "a snapshot in flight")
    assert commands.main(["advise", str(tmp_path / "t.json")]) == 2
    assert "it has no snapshot from its call to its commit" in capsys.readouterr().err
    assert commands.main(["advise", str(tmp_path / "nothing")]) == 1


def test_what_is_no_time_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commands.main(["advise", "t.json", "--mtbf", "often"])
    assert "'often' is no time" in capsys.readouterr().err
