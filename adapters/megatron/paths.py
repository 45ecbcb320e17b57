"""Where Megatron's checkpoints are."""

from __future__ import annotations

import os
from pathlib import Path

from datastates._base import paths


def local(checkpoint_dir: str | os.PathLike[str]) -> Path:
    """A checkpoint's directory in a file system; ValueError for the address of a store."""
    paths.refuse_address(checkpoint_dir)
    return Path(checkpoint_dir)
