"""Checks of the paths that users give, which are paths of file systems, no addresses of stores; names beside them."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

_LONGEST_NAME = 255
"""Most bytes of a file's name, on every usual file system."""
_KEPT = 200
"""Bytes of a longer name that the name of its partial directory begins with."""

PathLike = str | os.PathLike[str]

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # one slash: pathlib turns two into one; a drive has one letter


def is_address(path: PathLike) -> bool:
    """Whether this is the address of a store or a server, such as ``s3://bucket``."""
    return _ADDRESS.match(os.fspath(path)) is not None


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


def stem_of_partial(name: str) -> str:
    """What the name of a partial directory begins with, given the name that it is written for.

    That is the name itself; of a very long one, its beginning and a digest of it: the whole must fit into a name.
    """
    encoded = os.fsencode(name)
    if len(encoded) + len(".partial-xxxxxxxx") + len(".replaced") <= _LONGEST_NAME:
        return name
    digest = hashlib.blake2b(encoded, digest_size=8).hexdigest()
    return f"{encoded[:_KEPT].decode(errors='ignore')}~{digest}"
