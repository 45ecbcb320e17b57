"""What an export makes of a path: the end of its name tells."""

from __future__ import annotations

import errno
import os
from pathlib import Path

SAFETENSORS = ".safetensors"
"""The end of the name of a single safetensors file."""
TORCH = (".pt", ".pth", ".bin", ".ckpt")
"""The ends of the names of files that ``torch.load`` opens, by PyTorch's and its trainers' conventions."""


def is_torch(target: Path) -> bool:
    """Whether a target is a file for ``torch.load``."""
    return target.name.endswith(TORCH)


def is_file(target: Path) -> bool:
    """Whether a target is a single file. Any other is a folder of safetensors files."""
    return target.name.endswith((SAFETENSORS, *TORCH))


def refuse_existing(target: Path) -> None:
    """Raise FileExistsError if the target of an export exists and is no empty folder."""
    if target.is_dir() and not is_file(target):
        if not any(target.iterdir()):
            return
        raise FileExistsError(errno.EEXIST, "the target of an export is not empty", str(target))
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, "the target of an export exists", str(target))
