"""Saves, restores, loads, exports and verifies in a directory; prints what happened in each part, as JSON.

Called with the directory, another path to it, and a folder of another file system.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

import datastates as ds
from datastates.commit import fence
from datastates.providers import from_state_dict

KEEP = 2
STEPS = 4


def state_of(step: int) -> dict[str, Any]:
    """The state of a step: an array of some blocks, one that fills no page, and an object."""
    random = np.random.default_rng(step)
    return {"large": random.random(700_001), "small": random.integers(0, 256, 777, np.uint8), "step": step}


def same(found: dict[str, Any], step: int) -> None:
    """Check that arrays are those of a step."""
    for key, array in state_of(step).items():
        if key != "step":
            assert np.array_equal(np.asarray(found[key]), array), f"{key} of step {step} is another one"


def run_rank(directory: Path, rank: int, size: int) -> None:
    """Save all steps as one rank, open the directory anew, and restore the newest step."""
    options: dict[str, Any] = {"rank": rank, "world_size": size} if size > 1 else {}
    state = state_of(0)
    providers = [from_state_dict(f"rank{rank}", state)]
    with ds.Checkpointer(directory, keep_last=KEEP, **options) as ckpt:
        for step in range(1, STEPS):
            state.update(state_of(step))
            ckpt.snapshot(providers, step=step).wait_committed()
    with ds.Checkpointer(directory, keep_last=KEEP, **options) as ckpt:
        state.update(state_of(STEPS))
        ckpt.snapshot(providers, step=STEPS).wait_committed()
        state.update(state_of(0))
        restored = ckpt.restore(providers)
        assert restored is not None
        assert restored.step == state["step"] == STEPS
        same(state, STEPS)


def save(directory: Path, size: int) -> None:
    """Save by a process alone, or by several."""
    words = [sys.executable, __file__, "rank", str(directory)]
    ranks = [
        subprocess.Popen([*words, str(rank), str(size)], stderr=subprocess.PIPE, text=True) for rank in range(size)
    ]
    said = [rank.communicate()[1].strip() for rank in ranks]
    failed = [text.splitlines()[-1] for rank, text in zip(ranks, said, strict=True) if rank.returncode]
    if failed:
        raise RuntimeError(failed[0])


def retained(directory: Path) -> None:
    """Only the last steps are there, and nothing is left of what was on its way."""
    with ds.Checkpointer(directory) as ckpt:
        assert ckpt.steps() == list(range(STEPS - KEEP + 1, STEPS + 1)), f"steps {ckpt.steps()} are there"
    left = sorted(path.name for path in directory.iterdir() if path.name != fence.FOLDER)
    assert left == [f"step-{step:08d}" for step in range(STEPS - KEEP + 1, STEPS + 1)], f"left are {left}"
    hidden = [path.name for path in directory.rglob("*") if path.name.startswith(".fuse_hidden")]
    assert not hidden, f"left are {hidden}"


def loaded(directory: Path, rank: int) -> None:
    same(ds.load(directory)[f"rank{rank}"], STEPS)


def verified(directory: Path) -> None:
    command = [str(Path(sys.executable).with_name("datastates")), "verify", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr.strip().splitlines()[-1]


def exported(source: Path, target: Path) -> None:
    """Export, and read it by the stock libraries."""
    target.parent.mkdir(exist_ok=True)
    ds.export(source, target, keys="rank0/*")
    if target.suffix == ".pt":
        same({key: tensor.numpy() for key, tensor in torch.load(target).items()}, STEPS)
    else:
        file = target if target.is_file() else target / "model.safetensors"
        same({key: tensor.numpy() for key, tensor in safetensors.torch.load(file.read_bytes()).items()}, STEPS)
    names = [path.name for path in target.parent.iterdir()]
    left = [one for one in names if one.startswith(".fuse_hidden") or ".partial-" in one]
    assert not left, f"left are {left}"


def told(call: Callable[[], object]) -> str:
    """Call a part; returns "ok", or what it says."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def main(place: Path, other: Path, elsewhere: Path) -> None:
    """Exercise all parts. What cannot be saved is exported from elsewhere."""
    solo, ranks = place / "solo", place / "ranks"
    found = {"save": told(lambda: save(solo, 1)), "save by two ranks": told(lambda: save(ranks, 2))}
    for directory, part, rank in ((solo, "save", 0), (ranks, "save by two ranks", 1)):
        if found[part] == "ok":
            found[f"retention ({directory.name})"] = told(lambda path=directory: retained(path))
            found[f"load ({directory.name})"] = told(lambda path=other / directory.name, rank=rank: loaded(path, rank))
            found[f"verify ({directory.name})"] = told(lambda path=directory: verified(path))
    source = ranks if found["save by two ranks"] == "ok" else elsewhere
    if source == elsewhere:
        save(source, 1)
    for name in ("one.safetensors", "one.pt", "folder"):
        found[f"export to {name}"] = told(lambda name=name: exported(source, place / "exports" / name))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        run_rank(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        main(*map(Path, sys.argv[1:]))
