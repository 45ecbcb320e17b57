"""Carries a container to another place: each byte is compared with its checksum, so that damage does not travel."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from datastates._base.ahead import ahead
from datastates.container import every_byte
from datastates.container.file import Container, Named, open_named, read_index
from datastates.errors import CorruptError, FormatError
from datastates.ranks.link import Link
from datastates.storage import store_of
from datastates.storage.location import Location

SILENCE = 30.0
"""Seconds after which a rank that is silent ends a link. A busy one answers sooner."""
_PIECES = 64
"""Pieces, most of them chunks, that are read while others are sent."""
MakeLink = Callable[[str, int, float], Link]
"""Makes a link of a name to another rank, with a time-out in seconds; see :class:`~datastates.ranks.link.Link`."""


def index_crc(file: Location, nbytes: int) -> int | None:
    """CRC-32 of the index of a file that should be a container of so many bytes; None if it is none."""
    try:
        return read_index(file, nbytes).footer.crc
    except FormatError:
        return None


def compared(one: Named, pace: Callable[[int], object] = lambda nbytes: None) -> Iterator[memoryview]:
    """The bytes of a container, in the order of the file.

    ``pace`` is called with the number of bytes before they are given. It may wait, and what it raises is raised.

    Raises:
        CorruptError: A byte is damaged; the message names the tensor, the object or the place.
        FormatError: The file is not the container that is named.
        StorageError: It cannot be read.
    """
    (source,) = open_named([one])
    for data in every(source):
        pace(len(data))
        yield data


def every(source: Container) -> Iterator[memoryview]:
    """As :func:`compared`, of an opened container."""

    def wrong(key: str, what: str) -> None:
        raise CorruptError(f"{key!r} in {source.path} {what}, and is not copied", key=key, path=str(source.path))

    at = 0
    for data in every_byte.read(source, wrong):
        at += len(data)
        yield data
    if at != source.nbytes:
        raise FormatError(f"{source.path} has bytes that its index does not describe")


def send(link: Link, one: Named, pace: Callable[[int], object] = lambda nbytes: None) -> None:
    """Send a container to a rank that calls :func:`receive` with it.

    Raises:
        CorruptError, FormatError, StorageError: As :func:`compared` does; the other rank is told.
        UnreachableError, CommitError: As :meth:`Link.send`.
    """
    if link.hear():
        link.send(ahead(compared(one, pace), _PIECES), one.nbytes)


def receive(link: Link, one: Named, *, anew: bool = False) -> None:
    """Receive a container, and put it where it belongs: whole at once, and durable.

    Args:
        link: The link to the rank that calls :func:`send` with it.
        one: The container, as it lies here.
        anew: Whether it is sent although it seems to be here.

    Raises:
        StorageError: It cannot be written.
        UnreachableError, CommitError: As :meth:`Link.receive`.
    """
    is_here = not anew and store_of(one.path).lengths([one.path]) == [one.nbytes]
    is_here = is_here and index_crc(one.path, one.nbytes) == one.index_crc
    link.tell(int(not is_here))
    if not is_here:
        store_of(one.path).upload(one.path, ahead(link.receive(one.nbytes), 1), one.nbytes)
