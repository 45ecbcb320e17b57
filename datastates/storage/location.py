"""Paths of files and folders as immutable text: checks of the paths that users give, and names beside a path."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

PathLike = str | os.PathLike[str]

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # one slash: pathlib turns two into one; a drive has one letter


class Location:
    """The path of a file or a folder in a file system, as text. Immutable.

    It makes other locations, and does nothing else. A :class:`~datastates.storage.store.Store` reads and writes there.
    """

    __slots__ = ("_text",)

    def __init__(self, text: PathLike) -> None:
        """Take the path as it is, without redundant slashes and dots."""
        self._text = str(PurePosixPath(text))

    @classmethod
    def of(cls, path: PathLike) -> Location:
        """The absolute path for the path that a user gave, with ``~`` expanded.

        Raises:
            TypeError: It is neither a string nor an os.PathLike.
            ValueError: It is empty, or an address.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"path: must be a string or os.PathLike, got {path!r:.40} ({type(path).__name__})")
        if not os.fspath(path):
            raise ValueError("the path of a checkpoint is empty")
        return cls(Path(cls.given(path)).expanduser().absolute())

    @classmethod
    def given(cls, path: PathLike) -> Location:
        """The path that a user or a framework gave, also a relative one; raises as :func:`refuse_address`."""
        refuse_address(path)
        return cls(path)

    @classmethod
    def decode(cls, data: bytes) -> Location:
        """The inverse of :meth:`encode`."""
        return cls(os.fsdecode(data))

    def encode(self) -> bytes:
        """The path as bytes, also if the name of a file is not valid text."""
        return os.fsencode(self._text)

    def __truediv__(self, name: str) -> Location:
        """The location of a name below this one. The name may have slashes in it."""
        if "/" in name or name in ("", ".") or self._text in ("/", "//", "."):
            return Location(PurePosixPath(self._text, name))
        made = object.__new__(Location)  # as it is for every file of every checkpoint in a directory
        made._text = f"{self._text}/{name}"
        return made

    @property
    def name(self) -> str:
        """The last name of the path; empty for the root of the file system, and for the working directory."""
        return "" if self._text == "." else self._text.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """The last name without its last ending."""
        return PurePosixPath(self._text).stem

    @property
    def suffix(self) -> str:
        """The last ending of the last name, with its dot."""
        return PurePosixPath(self._text).suffix

    @property
    def parent(self) -> Location:
        """The folder that holds this path."""
        return Location(PurePosixPath(self._text).parent)

    @property
    def parents(self) -> list[Location]:
        """The folders above this path, the deepest first."""
        return [Location(one) for one in PurePosixPath(self._text).parents]

    def with_name(self, name: str) -> Location:
        """The location of another name in the same folder."""
        return Location(PurePosixPath(self._text).with_name(name))

    def is_relative_to(self, other: PathLike) -> bool:
        """Whether this path equals ``other`` or is below it."""
        return PurePosixPath(self._text).is_relative_to(other)

    def __fspath__(self) -> str:
        """The path, for calls of the system and for the native core."""
        return self._text

    def __str__(self) -> str:
        """The path, for messages."""
        return self._text

    def __repr__(self) -> str:
        """The class and the path."""
        return f"Location({self._text!r})"

    def __eq__(self, other: object) -> bool:
        """Whether two locations have the same path."""
        return isinstance(other, Location) and self._text == other._text

    def __lt__(self, other: Location) -> bool:
        """Whether this path comes before another, name by name."""
        return self._text.split("/") < other._text.split("/")

    def __hash__(self) -> int:
        """A hash, equal for equal paths."""
        return hash(self._text)


def scheme_of(path: PathLike) -> str:
    """The scheme of the address of a store or a server, ``s3`` for ``s3://bucket``; empty for a path."""
    return "" if (match := _ADDRESS.match(os.fspath(path))) is None else match[1]


def refuse_address(path: PathLike) -> None:
    """Raise ValueError for the address of a store or a server, such as ``s3://bucket``.

    Taken as a path, it would name a folder below the working directory.

    Raises:
        ValueError: The path is an address; the message says what to give instead.
    """
    if scheme_of(path):
        raise no_store(path)


def no_store(path: PathLike) -> ValueError:
    """The error for the address of a store or a server, where only a path will do."""
    return ValueError(
        f"path: {os.fspath(path)} is an address ({scheme_of(path)}:), and checkpoints are saved to file systems only: "
        "give a path, of local storage or of a mount"
    )
