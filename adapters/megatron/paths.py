"""The directories of Megatron's checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

from datastates._base import paths


def local(checkpoint_dir: str | os.PathLike[str]) -> Path:
    """A checkpoint's directory as a path; raises ValueError for the address of a store."""
    paths.refuse_address(checkpoint_dir)
    return Path(checkpoint_dir)
