"""Checks of the paths that users give: only paths of file systems are supported, no addresses of stores."""

from __future__ import annotations

import os
import re
from pathlib import Path

PathLike = str | os.PathLike[str]

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # one slash: pathlib turns two into one; a drive has one letter


def refuse_address(path: PathLike) -> None:
    """Refuse the address of a store or a server, such as ``s3://bucket``.

    Taken as a path, it would name a folder below the working directory.

    Raises:
        ValueError: The path is an address; the message says what to give instead.
    """
    text = os.fspath(path)
    if (match := _ADDRESS.match(text)) is not None:
        raise ValueError(
            f"path: {text} is an address ({match[1]}:), and checkpoints are saved to file systems only: "
            "give a path, of local storage or of a mount"
        )


def local(path: PathLike) -> Path:
    """The absolute path for what a user gave, with ``~`` expanded.

    Raises:
        TypeError: It is neither a string nor an os.PathLike.
        ValueError: It is empty, or an address.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: must be a string or os.PathLike, got {path!r:.40} ({type(path).__name__})")
    if not os.fspath(path):
        raise ValueError("the path of a checkpoint is empty")
    refuse_address(path)
    return Path(path).expanduser().absolute()
