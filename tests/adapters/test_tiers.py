"""Frameworks' checkpoints go on to a bucket, and a run on a fresh disk resumes from there alone, bit for bit."""

from __future__ import annotations

import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from framework_loops import LOOPS, Loop
from short import first

from datastates.cli.commands import main
from datastates.draining.copies import Copies
from datastates.storage import Location
from datastates.testing.provider_tests import difference

pytestmark = pytest.mark.filterwarnings("ignore")  # from the frameworks themselves
Make = Callable[..., Any]
IMPORTED = {
    "lightning": ("lightning.pytorch", "torch.distributed.checkpoint"),
    "accelerate": ("accelerate", "torch.distributed.fsdp"),
    "transformers": ("accelerate", "transformers.models.llama.modeling_llama", "transformers.trainer"),
}
STEPS = 16
DIES = """
import os, runpy, signal, sys
from datastates.draining.folder_drain import FolderDrains
from datastates.storage.buckets import Buckets

upload, add, sent = Buckets.upload, FolderDrains.add, set()

def upload_and_die(self, path, *rest):
    upload(self, path, *rest)
    sent.add(str(path).split("/")[4])
    if len(sent) == 2:  # the first is whole, the second has begun
        os.kill(os.getpid(), signal.SIGKILL)

def add_and_wait(self, path):
    add(self, path)
    self.wait()

Buckets.upload, FolderDrains.add = upload_and_die, add_and_wait
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(params=LOOPS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Return a function that makes a loop which saves below a folder, with this package or without it."""
    pytest.importorskip(request.param, reason=f"{request.param} is not installed: its tests did NOT run")
    made: list[Loop] = []

    def build(name: str, **options: Any) -> Loop:
        (tmp_path / name).mkdir(exist_ok=True)
        made.append(LOOPS[request.param](tmp_path / name, **options))
        made[-1].train()
        return made[-1]

    yield build
    for one in made:
        one.close()


def copies(place: str) -> list[str]:
    return sorted(copy.name for copy in Copies(Location(place)).every().values())


@pytest.mark.long
def test_the_disk_is_lost_and_the_bucket_alone_resumes(make: Make, bucket: str) -> None:
    ends = []
    for name, options in (("stock", {"lazy": False}), ("ours", {"tiers": {"path": bucket, "keep_last": 1}})):
        one = make(name, **options)
        for number in (1, 2):
            torch.manual_seed(7)
            one.save(number)
            one.train(2)
        ends.append(one.state())
        one.close()
    assert difference(*ends) is None
    assert copies(bucket) == [one.path(2).name]
    shutil.rmtree(one.root)
    assert main(["fetch", bucket, str(one.root)]) == 0
    for lazy in (False, True):
        again = make("ours", lazy=lazy)
        again.load(2)
        again.steps = one.steps - 2
        again.train(2)
        assert difference(again.state(), ends[0]) is None


def test_a_dead_bucket_costs_a_run_nothing(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, bucket: str
) -> None:
    monkeypatch.setenv("DATASTATES_TIERS", "s3://nowhere/run")  # a bucket that is not there
    one = make("ours")
    for number in (1, 2):
        one.save(number)
        one.train()
    one.close()
    assert all(one.path(number).exists() for number in (1, 2))
    said = [r.getMessage() for r in caplog.records if "s3://nowhere/run" in r.getMessage()]
    assert 1 <= len(said) <= 2, said  # once while it trains, if it has come to that, and at the end
    assert main(["drain", str(one.root), bucket]) == 0
    assert copies(bucket) == [one.path(number).name for number in (1, 2)]


@pytest.mark.long
def test_a_name_that_is_saved_again_at_once(make: Make, bucket: str, caplog: pytest.LogCaptureFixture) -> None:
    """What brings the first looks at a path under which the second is under way: it must not wait for that."""
    one, go = make("ours", tiers=bucket, max_in_flight=4), threading.Event()
    one.files.begin()
    one.files.put(one.files.transaction("what comes before", lambda _: go.wait()))
    for _ in range(2):
        if hasattr(one, "io"):  # the others wait for the first before they begin the second
            one.save(1)
            one.train()
    go.set()
    one.save(1)
    saved = one.state()
    one.close()
    assert copies(bucket) == [one.path(1).name]
    shutil.rmtree(one.root)
    assert main(["fetch", bucket, str(one.root)]) == 0
    one.train()
    one.load(1)
    assert difference(one.state(), saved) is None
    assert not [r for r in caplog.records if "waiting for" in r.getMessage()]


class Program:
    """A program that trains in a folder, and resumes what is there; ``run`` gives what it says."""

    def __init__(self, ranks: Any, said: Any, name: str) -> None:
        pytest.importorskip(name)
        self._ranks, self._said, self._file = ranks, said, Path(__file__).parent / name / "training.py"
        self._options = {"imported": IMPORTED[name], "timeout": 200, "ACCELERATE_USE_CPU": "true", "alone": True}
        self._options |= {"PYTHONPATH": str(self._file.parent), "TOKENIZERS_PARALLELISM": "false"}

    def run(self, root: Path, *words: str, **options: Any) -> tuple[dict[str, Any], Any]:
        """Returns where it began and its losses, and the state at the end."""
        (done,) = self._ranks(1, self._file, root, STEPS, *words, **self._options, **options)
        return self._said(done)["trained"], torch.load(f"{root}-end.pt", weights_only=True)

    def killed(self, root: Path, **options: Any) -> None:
        """Run it; it is killed in the middle of the second copy."""
        options |= self._options
        done: subprocess.CompletedProcess[str]
        (done,) = self._ranks(1, DIES, self._file, root, STEPS, may_fail=[0], **options)
        assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.by_hand
@pytest.mark.parametrize("name", IMPORTED)
def test_killed_in_a_drain_it_is_completed_and_resumed_from_the_bucket(
    name: str, ranks: Any, said: Any, tmp_path: Path, bucket: str
) -> None:
    program, root = Program(ranks, said, name), tmp_path / "run"
    folder = root / "checkpoints" if name == "accelerate" else root
    whole, end = program.run(tmp_path / "whole", "stock")
    program.killed(root, DATASTATES_TIERS=bucket)
    assert len(copies(bucket)) == 1
    there = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert main(["drain", str(folder), bucket]) == 0
    assert there <= {*copies(bucket)}, "the command did not complete it"
    shutil.rmtree(root)
    assert main(["fetch", bucket, str(folder)]) == 0
    resumed, again = program.run(root, DATASTATES_TIERS=bucket)
    assert resumed["from"] > 0
    assert resumed["losses"] == whole["losses"][resumed["from"] :]
    assert difference(again, end) is None


EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "tiers"
NEEDS = {
    "trainer": "transformers",
    "accelerate_loop": "accelerate",
    "lightning_fit": "lightning",
    "deepspeed_loop": "deepspeed",
    "megatron_loop": "megatron.core",
}


@pytest.mark.by_hand
@pytest.mark.parametrize("name", first(sorted(path.stem for path in EXAMPLES.glob("*.py")), rest=pytest.mark.by_hand))
def test_the_examples_resume_from_the_bucket_alone(name: str, ranks: Any, tmp_path: Path, bucket: str) -> None:
    pytest.importorskip(NEEDS[name])

    def run(root: Path, place: str, steps: int) -> str:
        options: dict[str, Any] = {"imported": (), "timeout": 200, "ACCELERATE_USE_CPU": "true", "LOCAL_SIZE": "1"}
        (done,) = ranks(1, EXAMPLES / f"{name}.py", root, place, steps, **options)
        found: str = done.stdout.splitlines()[-1]
        assert "sum of the weights" in found, done.stdout
        return found

    whole, root = run(tmp_path / "whole", f"{bucket}-whole", 6), tmp_path / "run"
    run(root, bucket, 4)
    shutil.rmtree(root)
    assert main(["fetch", bucket, str(root / "checkpoints" if name == "accelerate_loop" else root)]) == 0
    assert run(root, bucket, 6) == whole
