"""DeepSpeed on GPUs, over NCCL: a state that was captured while training went on is resumed bit for bit."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).parents[1]
gpus = torch.cuda.device_count()
COUNTS = [1, pytest.param(2, marks=pytest.mark.skipif(gpus < 2, reason=f"needs 2 GPUs, {gpus} here: did NOT run"))]
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: its tests did NOT run"
)

SCRIPT = f"""
import sys
sys.path.insert(0, {str(TESTS / "adapters" / "deepspeed")!r})
from training import *

torch.use_deterministic_algorithms(True)
begin()
root = Path(sys.argv[1])


def made(stage, entry, dtype):
    torch.manual_seed(7)
    return engine(int(stage), entry, dtype, model=Net(512))


for case in sys.argv[2:]:
    stage, dtype = case.split("-")
    found = {{}}
    for entry, name in ((TORCH, "torch"), (OURS, "ours")):
        trained = made(stage, entry, dtype)
        steps(trained, 0, 3)
        trained.save_checkpoint(root / case / name, client_state={{"next": 3}})
        found[f"{{name}} went on"] = [steps(trained, 3, 6), state(trained)]
        trained.destroy()
    for entry, name in ((TORCH, "ours"), (OURS, "torch"), (OURS, "ours")):
        trained = made(stage, entry, dtype)
        path, client = trained.load_checkpoint(root / case / name)
        assert path is not None, name
        found[f"{{name}} resumed {{entry != TORCH}}"] = [steps(trained, client["next"], 6), state(trained)]
        trained.destroy()
    say(case, found)
end()
"""


@needs_deepspeed
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_training_goes_on_alike(ranks: Any, tmp_path: Path, count: int, dtype: str) -> None:
    cases = [f"{stage}-{dtype}" for stage in (0, 1, 2, 3)]
    variables = {"DEEPSPEED_LOG_LEVEL": "warning", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    for done in ranks(count, SCRIPT, tmp_path, *cases, timeout=150, **variables):
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"word"')]
        assert [line["word"] for line in lines] == cases
        for line in lines:
            expected, *others = line["value"].values()
            assert len(others) == 4
            for name, found in zip(list(line["value"])[1:], others, strict=True):
                assert found == expected, (line["word"], name)


@needs_deepspeed
@pytest.mark.skipif(gpus < 2, reason=f"needs 2 GPUs, {gpus} here: did NOT run")
def test_one_gpu_resumes_what_two_have_saved_and_the_other_way_round(ranks: Any, tmp_path: Path) -> None:
    loop = TESTS / "adapters" / "deepspeed" / "elastic_loop.py"
    ranks(2, loop, tmp_path, "all", "save", "load=2", timeout=150)
    ranks(1, loop, tmp_path, "all", "load=2", "save", timeout=150)
    ranks(2, loop, tmp_path, "all", "load=1", "refuse", timeout=150)


@needs_deepspeed
def test_files_are_loaded_onto_the_gpu(tmp_path: Path) -> None:
    """These tests run without a GPU as well. They are in another folder, and so run in a process of their own."""
    tests = TESTS / "adapters" / "deepspeed" / "test_map_location.py"
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run([*command, "-k", "cuda"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
