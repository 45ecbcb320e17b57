"""Paths and addresses as immutable text: checks of those that users give, and names beside one."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

PathLike = str | os.PathLike[str]
Face = Path | str
"""A location as users get it: a ``pathlib.Path`` for a path, a string for an address."""

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # one slash: pathlib turns two into one; a drive has one letter


class Location:
    """The path of a file or a folder in a file system, or an address in a registered store, as text. Immutable.

    It makes other locations, and does nothing else. A :class:`~datastates.storage.objects.Store` reads and writes
    there. An address is ``SCHEME://PLACE/NAME``; ``SCHEME://PLACE`` is the root of its locations.

    Attributes:
        scheme: The scheme of an address; empty for a path.
    """

    __slots__ = ("_text", "scheme")
    _text: str
    scheme: str

    def __init__(self, text: PathLike) -> None:
        """Take the path or address as it is, without redundant slashes and dots."""
        given = text._text if isinstance(text, Location) else os.fspath(text)
        self.scheme = scheme_of(given)
        if self.scheme:  # a path of pathlib has one slash after the scheme
            self._text = f"{self.scheme}:/{PurePosixPath('/', given[len(self.scheme) + 1 :].lstrip('/'))}"
        else:
            self._text = str(PurePosixPath(given))

    @classmethod
    def of(cls, path: PathLike) -> Location:
        """The location that a user gave: an address, or a path, which is made absolute, with ``~`` expanded.

        Raises:
            TypeError: It is neither a string nor an os.PathLike.
            ValueError: It is empty.
        """
        if isinstance(path, Location) and path.scheme:
            return path
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"path: must be a string or os.PathLike, got {path!r:.40} ({type(path).__name__})")
        if not os.fspath(path):
            raise ValueError("the path of a checkpoint is empty")
        return cls(path if scheme_of(path) else Path(path).expanduser().absolute())

    @classmethod
    def given(cls, path: PathLike) -> Location:
        """The path that a framework gave, also a relative one; raises as :func:`refuse_address`."""
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
            return self._with(self._names / name)
        return _made(f"{self._text}/{name}", self.scheme)

    @property
    def _names(self) -> PurePosixPath:
        """The path; of an address, its names below the root as an absolute path."""
        return PurePosixPath(self._text[len(self._root) :] or "/") if self.scheme else PurePosixPath(self._text)

    @property
    def _root(self) -> str:
        """The root of an address; empty for a path."""
        return "/".join(self._text.split("/", 3)[:3]) if self.scheme else ""

    def _with(self, names: PurePosixPath) -> Location:
        """The location of other names, as :attr:`_names` gives them, in the same store."""
        return Location(f"{self._root}{names}" if self.scheme else names)

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
        """The folder that holds this path; a root is its own."""
        above = self._text.rpartition("/")[0]
        if above in ("", ".") or above.endswith("/"):
            return self._with(self._names.parent)
        return _made(above, self.scheme)

    @property
    def parents(self) -> list[Location]:
        """The folders above this path, the deepest first."""
        return [self._with(one) for one in self._names.parents]

    def with_name(self, name: str) -> Location:
        """The location of another name in the same folder."""
        return self._with(self._names.with_name(name))

    def is_relative_to(self, other: Location) -> bool:
        """Whether this location equals ``other`` or is below it."""
        return self._root == other._root and self._names.is_relative_to(other._names)

    @property
    def face(self) -> Face:
        """This location for users."""
        return self._text if self.scheme else Path(self._text)

    def __fspath__(self) -> str:
        """The path, for calls of the system and for the native core; raises as :func:`refuse_address`."""
        if self.scheme:
            refuse_address(self)
        return self._text

    def __str__(self) -> str:
        """The path or the address, for messages."""
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


def _made(text: str, scheme: str) -> Location:
    """The location of a text that needs no check, as it is for every file of every checkpoint in a directory."""
    made = object.__new__(Location)
    made._text, made.scheme = text, scheme
    return made


def scheme_of(path: PathLike) -> str:
    """The scheme of the address of a store or a server, ``s3`` for ``s3://bucket``; empty for a path."""
    if isinstance(path, Location):
        return path.scheme
    return "" if (match := _ADDRESS.match(os.fspath(path))) is None else match[1]


def refuse_address(path: PathLike) -> None:
    """Raise ValueError for the address of a store or a server, such as ``s3://bucket``, where only a path will do.

    Taken as a path, it would name a folder below the working directory.

    Raises:
        ValueError: The path is an address; the message says what to give instead.
    """
    if scheme := scheme_of(path):
        raise ValueError(
            f"path: {path} is an address ({scheme}:), and this takes file systems only: give a path, of local storage "
            "or of a mount"
        )
