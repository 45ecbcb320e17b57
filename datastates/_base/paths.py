"""What users give as paths: of file systems, as stores behind an address are not reached."""

from __future__ import annotations

import os
import re
from pathlib import Path

PathLike = str | os.PathLike[str]

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # one slash, as pathlib leaves of two; drives have one letter


def refuse_address(path: PathLike) -> None:
    """Refuse the address of a store or a server; ValueError says what to give instead.

    As a path it would be a folder of that name below the working directory.
    """
    text = os.fspath(path)
    if (match := _ADDRESS.match(text)) is not None:
        raise ValueError(
            f"path: {text} is an address ({match[1]}:), and checkpoints are saved to file systems only: "
            "give a path, of local storage or of a mount"
        )


def local(path: PathLike) -> Path:
    """The absolute path that is meant; TypeError or ValueError where it is none."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: must be a string or os.PathLike, got {path!r:.40} ({type(path).__name__})")
    if not os.fspath(path):
        raise ValueError("the path of a checkpoint is empty")
    refuse_address(path)
    return Path(path).expanduser().absolute()
