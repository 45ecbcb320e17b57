"""Where Megatron's checkpoints are."""

from __future__ import annotations

import os
from pathlib import Path


def local(checkpoint_dir: str | os.PathLike[str]) -> Path:
    """A checkpoint's directory in a file system; ValueError where Megatron means remote storage."""
    if str(checkpoint_dir).startswith("msc:"):
        raise ValueError(f"{checkpoint_dir}: datastates saves to and loads from file systems only")
    return Path(checkpoint_dir)
