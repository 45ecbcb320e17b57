"""What is seen once ``save_checkpoint()`` has returned is what is seen with DeepSpeed's torch engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SEEN = """
import shutil, subprocess
from datastates.files.transaction import Transaction
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as fp32

root = Path(sys.argv[1])
LIST = "import os, sys; print(sorted(os.listdir(sys.argv[1])), sorted(os.listdir(sys.argv[1] + '/tag')))"
other = engine(2, TORCH)

def loads(folder, **options):
    path, client = other.load_checkpoint(folder, **options)
    return Path(path).name, client["step"], other.global_steps

def rotated(folder):
    # a loop of a user's own, after the save
    for old in sorted(folder.glob("global_step*"))[:-1]:
        shutil.rmtree(old)
    return sorted(os.listdir(folder))

LOOKS = {
    "zero_to_fp32": lambda folder: leaves(fp32(folder)),
    "zero_to_fp32 by its tag": lambda folder: leaves(fp32(folder, tag="tag")),
    "another engine": loads,
    "another engine by its tag": lambda folder: loads(folder, tag="tag"),
    "torch.load": lambda folder: content_now(folder / "tag" / "mp_rank_00_model_states.pt")["/global_steps"],
    "a program": lambda folder: subprocess.check_output([sys.executable, "-c", LIST, str(folder)]),
    "copytree": lambda folder: names(Path(shutil.copytree(folder, f"{folder}-copy"))),
    "latest": lambda folder: (os.path.isfile(folder / "latest"), (folder / "latest").read_text()),
}

def content_now(file):
    return leaves(torch.load(file, map_location="cpu", weights_only=False))

seen = {}
for name, entry in (("torch", TORCH), ("ours", OURS)):
    trained = engine(2, entry)
    for number, (what, look) in enumerate(LOOKS.items()):
        steps(trained, number, number + 1)
        folder = root / name / str(number)
        trained.save_checkpoint(folder, tag="old", client_state={"step": -1})
        if name == "ours":
            ours(trained).wait()
        with held("sync", until=(Transaction, "see")) if name == "ours" else contextlib.nullcontext():
            trained.save_checkpoint(folder, tag="tag", client_state={"step": number})
            seen[name, what] = look(folder)
    for number in range(2):  # a loop that counts folders, and keeps one
        trained.save_checkpoint(root / name / "rotated", tag=f"global_step{number}")
    seen[name, "rotation"] = rotated(root / name / "rotated")
    trained.destroy()
for what in (*LOOKS, "rotation"):
    assert seen["ours", what] == seen["torch", what], (what, seen["torch", what], seen["ours", what])
"""
TAGS = """
root = Path(sys.argv[1])
for name, entry in (("torch", TORCH), ("ours", OURS)):
    for mode in ("IGNORE", "WARN", "FAIL"):
        trained = engine(2, entry, checkpoint={"tag_validation": mode})
        steps(trained, 0, 1)
        folder = root / name / mode
        try:
            trained.save_checkpoint(folder, tag=f"tag-{rank()}")
            assert mode != "FAIL"
        except AssertionError as error:
            assert mode == "FAIL" and "is not consistent across all ranks" in str(error), (mode, error)
        trained.save_checkpoint(folder, tag="alike")  # the failure was told, and is over
        path, _ = trained.load_checkpoint(folder)
        assert Path(path).parent.name == "alike"
        trained.destroy()
dist.barrier()
for mode in ("IGNORE", "WARN", "FAIL"):
    assert names(root / "torch" / mode) == names(root / "ours" / mode), mode
"""
ORDER = """
from datastates.adapters.deepspeed import Save
root = Path(sys.argv[1])
one, other = engine(2), engine(2)
steps(one, 0, 1), steps(other, 0, 2)
with held("sync", until=(Save, "wait")):
    one.save_checkpoint(root, tag="one")
    other.save_checkpoint(root, tag="other")
assert (root / "latest").read_text() == "other"
one.destroy(), other.destroy()
"""


@pytest.mark.by_hand
def test_whoever_looks_sees_what_is_there_with_torch(train: Any, tmp_path: Path) -> None:
    train(1, SEEN, tmp_path)


@pytest.mark.by_hand
def test_tags_that_differ_by_rank_follow_tag_validation(train: Any, tmp_path: Path) -> None:
    train(2, TAGS, tmp_path)


@pytest.mark.by_hand
def test_of_two_engines_the_later_save_is_the_newest(train: Any, tmp_path: Path) -> None:
    train(2, ORDER, tmp_path)
