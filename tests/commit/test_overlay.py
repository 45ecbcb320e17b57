"""Checkpoints in a lower layer of overlayfs, as those of an image are: their directories cannot be renamed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import datastates as ds
from datastates.providers import from_state_dict


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Path]:
    """An empty tmpfs, for the layers."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.decode()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_old_checkpoints_of_the_image_are_deleted(image: Path) -> None:
    for name in ("lower", "upper", "work", "merged"):
        (image / name).mkdir()
    provider = from_state_dict("s", {"w": np.ones(3)})
    with ds.Checkpointer(image / "lower") as ckpt:
        for step in (1, 2):
            ckpt.snapshot([provider], step=step).wait_committed()
    layers = ",".join(f"{kind}dir={image / kind}" for kind in ("lower", "upper", "work"))
    done = subprocess.run(
        ["mount", "-t", "overlay", "overlay", "-o", layers, image / "merged"], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no overlay can be mounted here: {done.stderr.decode()}")
    try:
        with ds.Checkpointer(image / "merged", keep_last=2) as ckpt:
            for step in (3, 4):
                ckpt.snapshot([provider], step=step).wait_committed()
        assert sorted(os.listdir(image / "merged")) == ["step-00000003", "step-00000004"]
    finally:
        subprocess.run(["umount", image / "merged"], check=True)
