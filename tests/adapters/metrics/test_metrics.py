"""Metrics of snapshots and restores, read back from what each library has written."""

from __future__ import annotations

import itertools
import json
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hold import held
from wandb_file import records

import datastates as ds
from datastates.adapters.metrics.figures import FIGURES, figures
from datastates.providers import HostTensorProvider, PickledObjectProvider

STEPS = (10, 20)
NBYTES = 8 << 20


def run(folder: Path, metrics: Callable[[Any], None]) -> tuple[list[ds.Snapshot], ds.Restored]:
    """Take two snapshots, each recorded before the next, and restore the last; returns them and the restore."""
    provider = HostTensorProvider("m", {"a": np.ones(NBYTES, "u1")})
    called: queue.Queue[ds.Snapshot] = queue.Queue()

    def on_commit(snapshot: ds.Snapshot) -> None:
        metrics(snapshot)
        called.put(snapshot)

    with ds.Checkpointer(folder, on_commit=on_commit) as checkpointer:
        taken = []
        for step in STEPS:
            checkpointer.snapshot([provider], step=step)
            taken.append(called.get(timeout=60))
        restored = checkpointer.restore([provider])
        assert restored is not None
        metrics(restored)
    return taken, restored


def expected(done: ds.Snapshot | ds.Restored) -> dict[str, float]:
    return {figure.path: value for figure, value in figures(done).items()}


def test_figures_are_those_of_the_reports(tmp_path: Path) -> None:
    (first, _), restored = run(tmp_path, lambda done: None)
    found = expected(first)
    report = first.report
    assert report.persist_seconds is not None
    assert found == {
        "datastates/snapshot/size_bytes": NBYTES,
        "datastates/snapshot/stall_seconds": report.snapshot_seconds + report.gate_seconds,
        "datastates/snapshot/persist_seconds": report.persist_seconds,
        "datastates/snapshot/commit_seconds": report.commit_seconds,
        "datastates/snapshot/rate_bytes_per_second": pytest.approx(NBYTES / report.persist_seconds),
    }
    found = expected(restored)
    assert found == {
        "datastates/restore/size_bytes": restored.needed_nbytes,
        "datastates/restore/read_bytes": restored.read_nbytes,
        "datastates/restore/duration_seconds": restored.report.seconds,
        "datastates/restore/rate_bytes_per_second": pytest.approx(restored.needed_nbytes / restored.report.seconds),
    }


def test_a_restore_without_bytes_has_no_rate(tmp_path: Path) -> None:
    provider = PickledObjectProvider("o", get=lambda: 1, set=lambda _: None)
    ds.snapshot([provider], tmp_path / "c").wait_committed()
    restored = ds.restore([provider], tmp_path / "c")
    assert [figure.name for figure in figures(restored)] == ["size", "read", "duration"]


def test_what_has_no_figures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not of None"):
        figures(None)  # type: ignore[arg-type]
    with held():
        snapshot = ds.snapshot([HostTensorProvider("m", {"a": np.ones(1 << 20)})], tmp_path / "c")
        with pytest.raises(ValueError, match=r"step=0 .* is not committed: give .*on_commit"):
            figures(snapshot)
    snapshot.wait_committed()
    assert figures(snapshot)


def test_opentelemetry(tmp_path: Path) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    from datastates.adapters.metrics.opentelemetry import OpenTelemetryMetrics

    with (tmp_path / "metrics.json").open("w") as file:
        reader = export.PeriodicExportingMetricReader(export.ConsoleMetricExporter(out=file))
        provider = sdk.MeterProvider([reader])
        taken, restored = run(tmp_path / "c", OpenTelemetryMetrics(provider))
        provider.shutdown()
    (resource,) = json.loads((tmp_path / "metrics.json").read_text())["resource_metrics"]
    (scope,) = resource["scope_metrics"]
    assert (scope["scope"]["name"], scope["scope"]["version"]) == ("datastates", ds.__version__)
    found = {one["name"]: one for one in scope["metrics"]}
    assert list(found) == [f"datastates.{figure.of}.{figure.name}" for figure in FIGURES]
    for figure in FIGURES:
        one = found[f"datastates.{figure.of}.{figure.name}"]
        assert (one["unit"], one["description"]) == (figure.unit, figure.description)
        values = [figures(done)[figure] for done in (taken if figure.of == "snapshot" else [restored])]
        (point,) = one["data"]["data_points"]
        assert (point["count"], point["max"]) == (len(values), max(values))
        assert point["sum"] == pytest.approx(sum(values))
        assert sum(point["bucket_counts"][1:]) == len(values), "all below the first bucket"


def test_tensorboard(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    from datastates.adapters.metrics.tensorboard import TensorBoardMetrics

    with tensorboard.SummaryWriter(tmp_path / "board") as writer:
        taken, restored = run(tmp_path / "c", TensorBoardMetrics(writer))
    board = accumulators.EventAccumulator(str(tmp_path / "board")).Reload()
    assert board.Tags()["scalars"] == [figure.path for figure in FIGURES]
    for done in [*taken, restored]:
        for path, value in expected(done).items():
            scalars = {scalar.step: scalar.value for scalar in board.Scalars(path)}
            assert list(scalars) == (list(STEPS) if "/snapshot/" in path else [restored.step])
            assert scalars[done.step] == pytest.approx(value)


def history(folder: Path) -> tuple[list[dict[str, float]], dict[str, str]]:
    """The rows of the only run below a folder, and the metric on the x axis of each metric."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # waits for the process that writes the file
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    rows: list[dict[str, float]] = []
    axes: dict[str, str] = {}
    for record in map(Record.FromString, records(file)):
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            rows.append({key: json.loads(text) for key, text in items.items() if key not in ("_runtime", "_timestamp")})
        elif record.WhichOneof("record_type") == "metric":
            axes[record.metric.name] = record.metric.step_metric
    return rows, axes


@pytest.mark.long
def test_wandb(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    from datastates.adapters.metrics.wandb import WandbMetrics

    with wandb.init(mode="offline", dir=tmp_path, project="p") as offline:
        metrics, losses = WandbMetrics(offline), itertools.count()

        def record_and_log(done: ds.Snapshot | ds.Restored) -> None:
            metrics(done)
            offline.log({"loss": next(losses)})

        taken, restored = run(tmp_path / "c", record_and_log)
    rows, axes = history(tmp_path)
    assert rows == [
        {"_step": 0, "loss": 0, "datastates/snapshot/step": 10, **expected(taken[0])},
        {"_step": 1, "loss": 1, "datastates/snapshot/step": 20, **expected(taken[1])},
        {"_step": 2, "loss": 2, "datastates/restore/step": 20, **expected(restored)},
    ]
    assert axes.items() >= {figure.path: f"datastates/{figure.of}/step" for figure in FIGURES}.items()


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> list[ds.Snapshot]:
    """Two snapshots that were committed."""
    return run(tmp_path_factory.mktemp("committed"), lambda done: None)[0]


def logs_steps(log: Callable[..., None], commit: Callable[[], None]) -> None:
    for step in (11, 12, 30):
        log({"loss": step}, step=step)
        commit()
        log({"accuracy": step}, step=step)


def logs_parts_of_rows(log: Callable[..., None], commit: Callable[[], None]) -> None:
    for step in (1, 2, 3):
        log({"loss": step}, commit=False)
        commit()
        log({"accuracy": step})


def logs_rows(log: Callable[..., None], commit: Callable[[], None]) -> None:
    for step in (1, 2, 3):
        commit()
        log({"loss": step})


@pytest.mark.parametrize("loop", [logs_steps, logs_parts_of_rows, logs_rows])
def test_the_callers_rows_are_those_of_a_run_without_metrics(
    loop: Callable[..., None], committed: list[ds.Snapshot], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wandb = pytest.importorskip("wandb")
    from datastates.adapters.metrics.wandb import WandbMetrics

    with wandb.init(mode="offline", dir=tmp_path / "without", project="p") as offline:
        loop(offline.log, lambda: None)
    with wandb.init(mode="offline", dir=tmp_path / "with", project="p") as offline:
        metrics, left = WandbMetrics(offline), committed.copy()

        def commit() -> None:
            if left:
                told = threading.Thread(target=metrics, args=[left.pop(0)])
                told.start()
                told.join()

        loop(offline.log, commit)
    assert "ignored" not in capfd.readouterr().err
    rows, _ = history(tmp_path / "with")
    ours = [{key: value for key, value in row.items() if key.startswith("datastates/")} for row in rows]
    theirs = [{key: value for key, value in row.items() if not key.startswith("datastates/")} for row in rows]
    assert theirs == history(tmp_path / "without")[0]
    assert ours == [*({"datastates/snapshot/step": one.step, **expected(one)} for one in committed), {}]


def test_tensorboard_keeps_the_callers_scalars(committed: list[ds.Snapshot], tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    from datastates.adapters.metrics.tensorboard import TensorBoardMetrics

    with tensorboard.SummaryWriter(tmp_path) as writer:
        for step in (30, 31):
            writer.add_scalar("loss", step, step)
            told = threading.Thread(target=TensorBoardMetrics(writer), args=[committed[step - 30]])
            told.start()
            told.join()
            writer.add_scalar("accuracy", step, step)
    board = accumulators.EventAccumulator(str(tmp_path)).Reload()
    for tag in ("loss", "accuracy"):
        assert [(scalar.step, scalar.value) for scalar in board.Scalars(tag)] == [(30, 30.0), (31, 31.0)]
    assert [scalar.step for scalar in board.Scalars("datastates/snapshot/size_bytes")] == list(STEPS)
