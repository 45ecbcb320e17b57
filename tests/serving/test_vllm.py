"""vLLM itself serves from training checkpoints what transformers computes. By hand, after ``make vllm``."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"

pytestmark = [
    pytest.mark.by_hand,
    pytest.mark.skipif(not PYTHON.exists(), reason="`make vllm` installs vLLM in an environment of its own"),
]


def served(case: str, folder: Path, timeout: int = 300) -> Any:
    command = [PYTHON, ROOT / "tests" / "support" / "served.py", case, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=folder, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.timeout(900)
def test_architectures(tmp_path: Path) -> None:
    found = served("architectures", tmp_path, timeout=800)
    refused, _ = found.pop("MixtralForCausalLM")  # transformers names and packs its experts in another way than vLLM
    assert "no module or parameter named 'layers.0.mlp'" in refused
    assert {name: ours for name, (ours, _) in found.items()} == {name: theirs for name, (_, theirs) in found.items()}
    assert len(found) == 19


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", ["parallel", "tied", "other_formats", "reloading"])
def test_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    ours, theirs = served(case, tmp_path)
    assert ours == theirs


@pytest.mark.timeout(400)
def test_what_is_missing_is_refused(tmp_path: Path) -> None:
    assert "lacks weights of the model below 'model/': model.layers.1.self_attn.o_proj.weight" in served(
        "missing", tmp_path
    )
