"""A Trainer with DeepSpeed, whose JSON file has the entry ``datastates_ckpt``: nothing is attached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from datastates.container.file import open_container

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: its tests did NOT run")

HERE = Path(__file__).parent
ZERO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    "zero_optimization": {"stage": 2},
    "datastates_ckpt": {"host_cache_size": 0.0625},
}
SCRIPT = f"""
import json, os, sys
sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
from training import losses, torch, trainer
from transformers.trainer_utils import get_last_checkpoint

folder, end = map(Path, sys.argv[1:])
made = trainer(folder, 12, deepspeed={ZERO!r}, use_cpu=True)
there = get_last_checkpoint(folder) if folder.exists() else None
made.train(resume_from_checkpoint=there)
print(json.dumps({{"word": "from", "value": there and Path(there).name}}))
print(json.dumps({{"word": "losses", "value": losses(made)}}))
torch.save(made.model.state_dict(), end)
sys.stdout.flush()
"""


@pytest.mark.by_hand
@pytest.mark.timeout(600)
def test_it_saves_lazily_and_resumes_bit_for_bit(ranks: Any, said: Any, tmp_path: Path) -> None:
    variables = {"DS_ACCELERATOR": "cpu", "DEEPSPEED_LOG_LEVEL": "warning", "TOKENIZERS_PARALLELISM": "false"}
    folder = tmp_path / "run"
    (whole,) = ranks(1, SCRIPT, folder, tmp_path / "whole.pt", timeout=280, imported=(), **variables)
    files = sorted((folder / "checkpoint-10" / "global_step10").iterdir())
    assert [file.suffix for file in files] == [".pt", ".pt"]
    for file in files:
        open_container(file)  # this package wrote it
    (folder / "checkpoint-12").rename(tmp_path / "last")
    (resumed,) = ranks(1, SCRIPT, folder, tmp_path / "resumed.pt", timeout=280, imported=(), **variables)
    assert said(resumed)["from"] == "checkpoint-10"
    assert said(resumed)["losses"] == said(whole)["losses"]
    first, second = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "resumed"))
    assert all(torch.equal(first[name], tensor) for name, tensor in second.items())


ROTATED = f"""
import contextlib, json, os, sys
sys.path[:0] = {[str(HERE), str(HERE.parents[1] / "support")]!r}
from pathlib import Path
from hold import held
from training import get_last_checkpoint, losses, trainer, transformers
from datastates.files.transaction import Transaction

folder, limit, mode = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
zero = {ZERO!r} | {{"zero_optimization": {{"stage": 1}}, "bf16": {{"enabled": True}}}}
if "stock" in mode:
    del zero["datastates_ckpt"]
seen = []

def names(root):
    return sorted(path.name for path in root.iterdir())

class Look(transformers.TrainerCallback):
    def on_save(self, args, state, control, **_):
        newest = Path(get_last_checkpoint(folder))
        files = sorted(str(path.relative_to(newest)) for path in newest.rglob("*"))
        seen.append([names(folder), newest.name, (newest / "latest").read_text(), files])

made = trainer(folder, 8, deepspeed=zero, use_cpu=True, bf16=True, save_total_limit=limit, save_steps=2)
if "looking" in mode:
    made.add_callback(Look())
with held("sync", until=(Transaction, "see")) if "stock" not in mode else contextlib.nullcontext():
    made.train()
seen.append(names(folder))
again = trainer(folder, 10, deepspeed=zero, use_cpu=True, bf16=True)
again.train(resume_from_checkpoint=get_last_checkpoint(folder))
seen.append(losses(again))
print(json.dumps({{"word": "seen", "value": seen}}))
sys.stdout.flush()
"""


@pytest.mark.by_hand
@pytest.mark.timeout(900)
@pytest.mark.parametrize("limit", [pytest.param(1, marks=pytest.mark.by_hand), 2])
def test_the_limit_keeps_what_the_trainer_keeps(limit: int, ranks: Any, said: Any, tmp_path: Path) -> None:
    variables = {"DS_ACCELERATOR": "cpu", "DEEPSPEED_LOG_LEVEL": "warning", "TOKENIZERS_PARALLELISM": "false"}
    seen = {}
    for mode in ("stock-looking", "looking", "alone"):
        (done,) = ranks(1, ROTATED, tmp_path / mode, limit, mode, timeout=280, imported=(), **variables)
        seen[mode] = said(done)["seen"]
    assert seen["looking"] == seen["stock-looking"]
    assert seen["alone"] == seen["looking"][-2:]
