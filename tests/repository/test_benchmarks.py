"""The benchmarks run with states of a few MB and give every row of every system; speed is not checked."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from by_path import module_at

from datastates.commit.claims import PRIME, claims_of
from datastates.ranks import polling
from datastates.schedule.due import best_interval

ROOT = Path(__file__).parents[2]
WRITERS = {"raw", "datastates", "torch.save/load", "safetensors", "DCP", "TorchSnapshot", "torch_checkpointing"}
RANKS = ("raw", "plain", "datastates", "datastates through DCP", "DCP", "DCP async")
RANK_LAYOUTS = ((2, 2), (2, 1), (1, 2), (4, 2))
CPU_ROWS = {
    "write": WRITERS | {"datastates with pwrite"},
    "restore-cold": WRITERS | {"raw restore", "torch.save/load mmap", "datastates with pwrite"},
    "restore-first": WRITERS | {"raw restore", "torch.save/load mmap"},
    "restore-warm": WRITERS | {"torch.save/load mmap"},
    "call": {"few", "many", "module and optimizer", "state_dict() alone"},
    "throughput": {"plain", "datastates", "DCP async", "torch_checkpointing async"},
    "memory": {"datastates", "DCP async"},
    "index": {"plan", "encode", "open", "read one"},
    "files": {"one file", "64 files"},
    "export": {
        "raw",
        "datastates",
        "datastates to a torch file",
        "datastates from DCP",
        "datastates from DeepSpeed",
        "DCP",
        "dcp_to_torch_save",
        "torch_checkpointing",
        "zero_to_fp32",
    },
    "ranks": {f"{system}, {n} → {m}" for system in RANKS for n, m in RANK_LAYOUTS},
    "meshes": {"raw", "datastates", "Orbax", "Orbax with OCDBT"},
    "cadence": {f"datastates{how}, {mtbf}" for how in ("", ", waiting") for mtbf in ("1 h", "6 h", "7 d")},
}
# with tiny states reshard-large does the same
RESHARD_ROWS = {
    "reshard": {
        f"{system}, {layout}"
        for system in ("raw", "raw restore", "datastates", "datastates through DCP", "DCP")
        for layout in ("2 → 2", "2 → 1", "1 → 2", "4 → 2", "2 → 2 in columns")
    }
}
LOADERS = {"datastates", "datastates in place", "InstantTensor", "safetensors", "Run:ai streamer"}
GPU_ROWS = {
    "capture": {"pinned copy", "pinned copy, large", "one tensor", "one large tensor", "many small tensors"},
    "training": {"plain", "datastates", "DCP async", "torch_checkpointing async", "torch.save/load"},
    "durable": {"raw", "datastates", "torch.save/load", "DCP"},
    "durable-tmpfs": {"raw", "datastates", "torch.save/load", "DCP"},
    "load-tmpfs": {"raw", *LOADERS, "fastsafetensors", "torch.load mmap"},
    "load-cold": {"raw", *LOADERS},
}
LAYOUTS = ("FSDP", "own keys", "ZeRO")
SCALE_ROWS = {
    "rank": set(LAYOUTS),
    "agreement": {"2 ranks", "4 ranks"},
    "store": {"votes", "looks of one client", "looks of 8 clients", "one question about many keys"},
    "coordinator": {f"{layout}, {ranks} ranks" for layout in LAYOUTS for ranks in (4, 8, 16)},
    "restore": {f"{layout}, as saved" for layout in LAYOUTS}
    | {"FSDP, on 12 ranks", "ZeRO, on 12 ranks", "manifest.json"},
    "commit": {f"{ranks} ranks, {latency} µs" for ranks in (4, 8, 16) for latency in ("50", "1,000")},
}


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory on the sources' file system; that of temporary files may be in memory, where no cache is cold."""
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="tests-") as directory:
        yield Path(directory)


def run_script(name: str | Path, *arguments: str | Path, cores: set[int] | None = None) -> str:
    """Run a script of benchmarks/, or another one, as a user does; on ``cores`` only, if they are given."""
    # a make that started the tests sets MAKE…; with PYTHONSAFEPATH a script does not find its neighbours
    unwanted = ("MAKE", "MFLAGS", "PYTHONSAFEPATH")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)} | {"OMP_NUM_THREADS": "1"}
    # one in .whl was carried to a machine that cannot build it
    if name == "run.py" and not (ROOT / ".whl" / "raw_io").exists():
        subprocess.run(["make", "--no-print-directory", "build/raw_io"], cwd=ROOT, env=environment, check=True)
    command = [sys.executable, str(ROOT / "benchmarks" / name), *map(str, arguments)]
    if cores:
        command = ["taskset", "--cpu-list", ",".join(map(str, cores)), *command]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_suite(suite: str, scratch: Path, page: Path, *, only: Collection[str] = ()) -> dict[str, Any]:
    page.mkdir()
    path = page / f"{suite}.json"
    some = ["--only", *only] if only else []
    run_script("run.py", suite, "--tiny", "--repeat", "1", "--directory", scratch, "--json", path, *some)
    report: dict[str, Any] = json.loads(path.read_text())
    assert not list(scratch.iterdir()), "files are left"
    return report


def check(report: dict[str, Any], rows: dict[str, set[str]]) -> None:
    assert set(report["benchmarks"]) == set(rows)
    for name, systems in rows.items():
        benchmark = report["benchmarks"][name]
        assert benchmark["errors"] == {}, name
        assert systems <= set(benchmark["samples"]), name
        for system, samples in benchmark["samples"].items():
            assert len(samples) == 1, (name, system)
            # Processor time may be too short to count; the time lost is a difference of two measurements.
            signed = {"cpu_seconds", "lost"}
            assert all(value > 0 for s in samples for k, value in s.items() if k not in signed), (name, system)


@pytest.mark.by_hand
@pytest.mark.timeout(1200)  # every benchmark of a suite: minutes on a machine that does other things, too
@pytest.mark.parametrize("rows", [CPU_ROWS, RESHARD_ROWS], ids=["most", "reshard"])
def test_the_cpu_suite_and_its_page(rows: dict[str, set[str]], scratch: Path, tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    report = run_suite("cpu", scratch, folder, only=rows)
    check(report, rows)

    run_script("report.py", folder)
    page = (tmp_path / "docs.md").read_text()
    assert "trial with tiny states" in page
    assert page.count("[cpu](docs/cpu.json)") == len(rows)
    for system in set().union(*rows.values()):
        label = system.partition(", ")[0].removeprefix("datastates ")
        assert label in {"plain", "raw", "datastates"} or re.search(rf"[ >]{re.escape(label)} ", page), system
    if writes := report["benchmarks"].get("write"):
        rate = writes["parameters"]["bytes"] / writes["samples"]["DCP"][0]["seconds"] / 1e9
        assert f"<br>DCP {float(f'{rate:.3g}'):g}<br>" in page


@pytest.mark.by_hand
def test_the_benchmark_of_buckets(scratch: Path, tmp_path: Path) -> None:
    pytest.importorskip("localbucket")
    report = run_suite("cpu", scratch, tmp_path / "docs", only=["buckets"])
    samples = report["benchmarks"]["buckets"]["samples"]
    assert {"raw", "datastates from a bucket"} <= set(samples)
    assert all(one["get"] > 0 < one["put"] for system in samples.values() for one in system)


@pytest.mark.by_hand
def test_the_benchmark_of_drains(scratch: Path, tmp_path: Path) -> None:
    pytest.importorskip("localbucket")
    samples = run_suite("cpu", scratch, tmp_path / "docs", only=["drains"])["benchmarks"]["drains"]["samples"]
    assert {"raw", "datastates"} == set(samples)
    assert all(one["seconds"] > 0 < one["steps"] for system in samples.values() for one in system)


@pytest.mark.by_hand
def test_the_benchmark_of_copies(scratch: Path, tmp_path: Path) -> None:
    report = run_suite("cpu", scratch, tmp_path / "docs", only=["copies-tmpfs"])
    samples = report["benchmarks"]["copies-tmpfs"]["samples"]
    assert {"raw", "datastates"} == set(samples)
    assert all(one["seconds"] > 0 < one["cpu"] for system in samples.values() for one in system)


MACHINE = {
    **dict.fromkeys(("cpu", "kernel", "storage", "python", "datastates"), "some"),
    "cores": 2,
    "memory": 2**30,
    "packages": {},
}


def report_of(suite: str, name: str, samples: dict[str, list[dict[str, float]]], **benchmark: Any) -> dict[str, Any]:
    """The report of a suite with one benchmark."""
    made = {"parameters": {"bytes": 10**9, "period": 3}, "settings": {}, "samples": samples, "errors": {}} | benchmark
    circumstances = {"suite": suite, "tiny": False, "repeat": 3, "date": "today", "machine": MACHINE}
    return {**circumstances, "benchmarks": {name: made}}


@pytest.mark.by_hand
def test_the_scale_suite_and_its_page(scratch: Path, tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    report = run_suite("scale", scratch, folder)
    check(report, SCALE_ROWS)
    # a rank makes the same number of Store calls, however many ranks there are
    agreed = [samples[0] for samples in report["benchmarks"]["agreement"]["samples"].values()]
    assert {sample["rank_calls"] for sample in agreed} == {sample["rank_calls_least"] for sample in agreed} == {5}

    run_script("report.py", folder)
    page = (tmp_path / "scale.md").read_text()
    shown = set().union(*SCALE_ROWS.values()) - SCALE_ROWS["store"] - {"manifest.json"}
    assert all(f"\n| {system} |" in page for system in shown)
    nbytes = report["benchmarks"]["rank"]["samples"]["FSDP"][0]["vote_bytes"]
    assert f"| {nbytes:,} |" in page
    assert "A trial with few ranks" in page
    assert not (tmp_path / "docs.md").exists()


def page_of(folder: Path, **reports: dict[str, Any]) -> str:
    """The page of reports by the names of their files."""
    folder.mkdir(exist_ok=True)
    for name, report in reports.items():
        (folder / f"{name.replace('_', '-')}.json").write_text(json.dumps(report))
    run_script("report.py", folder)
    return folder.with_suffix(".md").read_text()


def cells_of(page: str, begin: str) -> list[str]:
    """The figures of the one row of a page that begins so."""
    (row,) = (line for line in page.splitlines() if line.startswith("| ") and begin in line.split(" | ")[0])
    return [cell.strip() for cell in row.strip("| ").split(" | ")[1:]]


def test_the_pages_are_made_of_the_samples(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs" / "benchmarks", docs / "benchmarks")
    run_script("report.py", docs / "benchmarks")
    for name in ("benchmarks.md", "scale.md"):
        assert (docs / name).read_text() == (ROOT / "docs" / name).read_text(), f"docs/{name} was not made anew"


def test_a_row_has_medians_with_wide_ranges_and_what_failed_is_said(tmp_path: Path) -> None:
    samples = {
        "raw": [{"seconds": s} for s in (0.5, 0.52, 0.48)],
        "DCP": [{"seconds": s} for s in (2.0, 1.0, 4.0)],
        "safetensors": [{"seconds": 1.0}],
        "datastates with pwrite": [{"seconds": 1.25}] * 3,
        "datastates": [{"seconds": 0.8}] * 3,
    }
    page = page_of(
        tmp_path / "docs", cpu=report_of("cpu", "write", samples, errors={"TorchSnapshot": "OSError: no\nroom"})
    )
    assert cells_of(page, "**Durable write**, 1 GB, [cpu](docs/cpu.json)<br>GB/s") == [
        "1.25<br>with pwrite 0.8",
        "2",
        "DCP 0.5 (0.25–1)<br>safetensors 1 (once)",
    ]
    assert "- Durable write: TorchSnapshot failed: `OSError: no room`" in page
    assert "trial with tiny states" not in page


def test_the_newest_run_of_a_benchmark_is_shown(tmp_path: Path) -> None:
    def report(date: str, seconds: float) -> dict[str, Any]:
        beside = {"datastates": [{"seconds": seconds}], "DCP": [{"seconds": 2.0}]}
        return report_of("cpu", "restore-first", beside) | {"date": date}

    old, new = report("2026-01-02 10:00 UTC", 1.0), report("2026-01-03 10:00 UTC", 0.5)
    old["benchmarks"]["files"] = report_of(
        "cpu", "files", {"one file": [{"seconds": 1.0}]}, parameters={"bytes": 10**9, "files": 64}
    )["benchmarks"]["files"]
    for place, first, second in (("here", old, new), ("there", new, old)):
        page = page_of(tmp_path / place, cpu=first, cpu_first=second)
        assert cells_of(page, "**First restore of a process**")[0] == "2"
        assert cells_of(page, "**One rank restores many files**")[0] == "one file 1"
        assert "2026-01-02, 1 rounds" in page
        assert "the newest is of 2026-01-03" in page
    alone = page_of(tmp_path / "alone", cpu=report("2026-01-02", 1.0), cpu_first=new)
    assert "2026-01-02" not in alone, "nothing of this run is shown"


def test_ranks_are_compared_with_those_of_the_same_layout(tmp_path: Path) -> None:
    samples = {
        "raw, 2 → 2": [{"write": 1.0, "read": 1.0}],
        "plain, 2 → 2": [{"seconds": 6.0}],
        "datastates, 2 → 2": [{"write": 1.0, "read": 1.0, "seconds": 6.5}],
        "raw, 4 → 2": [{"write": 0.5, "read": 0.5}],
        "plain, 4 → 2": [{"seconds": 7.0}],
        "datastates, 4 → 2": [{"write": 0.8, "read": 0.4, "seconds": 7.25}],
        "DCP async, 4 → 2": [{"seconds": 8.0}],
    }
    several = report_of("gpu", "ranks", samples)
    several["machine"] = MACHINE | {"gpu": "some", "gpus": 4, "driver": "1", "cuda": "2"}
    skipped = report_of("gpu", "ranks", {}, settings={"4 → 2": "skipped: why not"})
    page = page_of(tmp_path / "docs", gpus_4=several, gpu=skipped)
    assert page.count("**Several ranks**") == 1
    assert "- gpus-4: today, 1 rounds, 4 × some, driver 1, CUDA 2, some, 2 cores" in page
    assert cells_of(page, "**Several ranks**")[:2] == ["1", "1"]
    assert cells_of(page, "| 2→2: training lost, s")[0] == "0.5"
    assert cells_of(page, "| 4→2: write, GB/s")[:2] == ["1.25", "2"]
    assert cells_of(page, "| 4→2: restore, GB/s")[:2] == ["2.5", "2"]
    assert cells_of(page, "| 4→2: training lost, s") == ["0.25", "", "DCP async 1"]


@pytest.mark.by_hand
@pytest.mark.long
def test_ranks_without_a_core_each_are_skipped_and_that_is_said(scratch: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("here the ranks have GPUs")
    path = tmp_path / "cpu.json"
    core = {min(os.sched_getaffinity(0))}
    run_script("run.py", "cpu", "--only", "ranks", "--directory", scratch, "--json", path, cores=core)
    ranks = json.loads(path.read_text())["benchmarks"]["ranks"]
    assert (ranks["samples"], ranks["errors"]) == ({}, {})
    assert ranks["settings"] == {
        f"{n} → {m}": f"skipped: {max(n, m)} ranks need a core each, here are 1" for n, m in RANK_LAYOUTS
    }


TEAM = f"""
import multiprocessing, sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
from team import Team

def fail(team, command, **arguments):
    try:
        team.call(command, **arguments)
    except RuntimeError as error:
        print(error)
    assert not multiprocessing.active_children()

if __name__ == "__main__":
    with Team(2, "tiny") as team:
        size = team.call("nbytes")
        assert size[0] == size[1] > 0, size
        fail(team, "train", period="no number")
        assert team.call("nbytes") == size
        multiprocessing.active_children()[0].kill()
        fail(team, "train", period=1)
        assert team.call("nbytes") == size
    assert not multiprocessing.active_children()
"""


@pytest.mark.by_hand
@pytest.mark.long
def test_a_rank_that_fails_ends_its_team_and_the_next_command_has_a_new_one(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "script.py"
    script.write_text(TEAM)
    misused, killed = run_script(script).splitlines()
    assert all(f"rank {rank}: TypeError" in misused for rank in (0, 1)), misused
    assert "ended with exit code -9" in killed


def load(name: str) -> ModuleType:
    """A module of benchmarks/ that needs none of the others."""
    return module_at(ROOT / "benchmarks" / f"{name}.py")


def test_systems_take_turns_and_one_that_fails_is_left_out() -> None:
    measure = load("measure")
    calls: list[str] = []

    def action(name: str, fails_at: int = 100) -> dict[str, float]:
        calls.append(name)
        if calls.count(name) > fails_at:
            raise ValueError(f"{name} is full")
        return {"seconds": float(len(calls))}

    result = measure.Result()
    actions = {"a": lambda: action("a"), "b": lambda: action("b", 2), "c": lambda: action("c")}
    measure.interleave(result, actions, measure.Plan(repeat=3), rounds={"c": 1})
    assert "".join(calls) == "abc" + "abc" + "ab" + "a"
    assert {name: len(samples) for name, samples in result.samples.items()} == {"a": 3, "b": 1, "c": 1}
    assert result.errors == {"b": "ValueError: b is full"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_claims_made_in_columns_are_those_of_the_tables(name: str) -> None:
    layout = load("layouts").Layout(name, 5, 7)
    total = 0
    for rank in range(5):
        made, right = layout.claims(rank), claims_of(layout.table(rank))
        for column in ("form", "begin", "end") if name == "own keys" else ("key", "form", "begin", "end"):
            np.testing.assert_array_equal(getattr(made, column), getattr(right, column))
        total += right.cover - made.cover
    assert total % PRIME == 0


def test_simulated_ranks_pause_as_real_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("commit_model")
    slept: list[float] = []
    monkeypatch.setattr(polling.time, "sleep", slept.append)
    polling.until(lambda: True if len(slept) == 30 else None, float("inf"), polling.slowest(16_384))
    assert slept == pytest.approx(list(islice(model.pauses(16_384), 30)))


def test_a_simulated_commit_takes_what_its_parts_take() -> None:
    model = load("commit_model")
    # two ranks, a network that is slow, a server that is not
    setting = model.Setting(2, 0.0, 10.0, 0.0, 0.0, 0.0, 100, 7.0)
    o = model.simulate(setting, 1)
    # six calls: a look in vain, has one failed, a look that finds the mark, are all there, one multi_get, the gate
    assert o.heard == pytest.approx(6 * 20, abs=0.1)
    assert o.committed - o.heard == pytest.approx(7)
    # the answer is sent, a look finds it (the look before may just have missed it), and the answer is fetched
    assert 40 <= o.last - o.committed <= 60.1
    # the server serves one at a time
    slow = model.simulate(model.Setting(50, 0.0, 0.0, 1.0, 0.0, 0.0, 100, 0.0), 1)
    assert slow.busy == pytest.approx(slow.requests)
    assert slow.last >= 50 * 2 + 50


def test_a_simulated_job_keeps_what_was_durable() -> None:
    model = load("failure_model")
    # snapshots begin after 9, 19 … s, and are durable 2 s later
    setting = model.Setting(cost=1.0, durable=2.0, mtbf=50.0, restart=5.0)
    for life, durable in ((10.9, 0), (11.0, 1), (20.9, 1), (100.0, 9)):
        assert model.useful(setting, 10.0, np.array([life])) == pytest.approx(durable * 9 / (life + 5))
    assert model.useful(setting, 10.0, np.array([11.0, 3.0])) == pytest.approx(9 / 24)
    # snapshots that come faster than they are durable wait
    assert model.useful(setting, 1.5, np.array([100.0])) == model.useful(setting, 2.0, np.array([100.0]))
    times = model.lives(50.0, 10_000, 3)
    assert times.mean() == pytest.approx(50, rel=1e-3)
    assert (times > 100).mean() == pytest.approx(np.exp(-2), abs=1e-3)


@pytest.mark.parametrize("mtbf", [3600.0, 21600.0, 604800.0])
@pytest.mark.parametrize("durable", [1.0, 30.0, 400.0])
@pytest.mark.parametrize("cost", [0.01, 0.1, 0.9])
def test_the_chosen_interval_is_the_best_of_simulated_failures(cost: float, durable: float, mtbf: float) -> None:
    model = load("failure_model")
    setting = model.Setting(cost * (durable if cost > 0.5 else 1), durable, mtbf, 120.0)
    times = model.lives(mtbf, 20_000, 1)
    chosen, best = best_interval(setting.cost, mtbf, durable), model.best(setting, times)
    assert chosen == pytest.approx(best, rel=0.03)
    assert model.useful(setting, chosen, times) > 0.999 * model.useful(setting, best, times)


def test_no_round_begins_too_late() -> None:
    measure = load("measure")
    result = measure.Result()
    measure.interleave(result, {"a": lambda: {"seconds": 1.0}}, measure.Plan(repeat=5, until=0.0))
    assert result.samples == {"a": [{"seconds": 1.0}]}


def test_a_dropped_file_is_cold_and_a_filled_one_warm(scratch: Path) -> None:
    page_cache = load("page_cache")
    file = scratch / "file"
    file.write_bytes(bytes(3 << 20))
    assert page_cache.resident(file) == 3 << 20
    page_cache.drop(scratch)
    assert page_cache.resident(file) == 0
    page_cache.fill(scratch)
    assert page_cache.resident(file) == 3 << 20


@pytest.mark.gpu
def test_the_gpu_suite_and_its_page(scratch: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine: the GPU benchmarks did NOT run")
    folder = tmp_path / "docs"
    gpus = torch.cuda.device_count()
    layouts = [f"{n} → {m}" for n, m in RANK_LAYOUTS if max(n, m) <= gpus]
    rows = GPU_ROWS | {"ranks": {f"{system}, {layout}" for system in RANKS for layout in layouts}}
    rows["reshard-large"] = {row for row in RESHARD_ROWS["reshard"] if max(map(int, re.findall(r"\d", row))) <= gpus}
    check(run_suite("gpu", scratch, folder), rows)
    run_script("report.py", folder)
    page = (tmp_path / "docs.md").read_text()
    assert page.count("[gpu](docs/gpu.json)") == len([name for name, systems in rows.items() if systems])


PICTURE = """
import json, pathlib, sys
import picture
from loops import CpuLoop
folder = pathlib.Path(sys.argv[1])
picture.draw(picture.measure(CpuLoop(tiny=True), folder), folder / "picture.svg")
"""


@pytest.mark.by_hand
def test_the_picture_of_the_readme_is_drawn_from_a_run(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", PICTURE, str(tmp_path)], cwd=ROOT / "benchmarks", check=True)
    assert (tmp_path / "picture.svg").read_text().count("</svg>") == 1
