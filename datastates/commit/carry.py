"""Carries a container to another place: each byte is compared with its checksum, so that damage does not travel."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Iterator

from datastates._base.ahead import ahead
from datastates.commit.manifest import is_kept
from datastates.commit.names import STEP, final_of
from datastates.container import every_byte
from datastates.container.file import Container, Named, open_named, read_index
from datastates.errors import CorruptError, FormatError, StorageError
from datastates.ranks.link import Link
from datastates.storage import Folders, store_of
from datastates.storage.location import Location

SILENCE = 30.0
"""Seconds after which a rank that is silent ends a link. A busy one answers sooner."""
_NEAREST = 3
"""Checkpoints in which a kept container is looked for."""
_whole: set[tuple[tuple[int, ...], int]] = set()
"""The kept containers that this process has read whole, by their places and the checksums of their indexes."""
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


def adopted(one: Named, file: Location, pace: Callable[[int], object] = lambda nbytes: None) -> bool:
    """Link a kept container that a checkpoint beside has, as ``file`` of one that comes there; whether that was done.

    Each byte of what is linked is compared, once in a process. ``pace`` is as for :func:`compared`.
    """
    store, own = store_of(file), STEP.match(final_of(file.parent.name) or file.parent.name)
    if not (isinstance(store, Folders) and is_kept(file.name)) or own is None:
        return False
    place = file.parent.parent
    steps = {name: abs(int(match[1]) - int(own[1])) for name in store.names(place) if (match := STEP.match(name))}
    for name in heapq.nsmallest(_NEAREST, steps, key=steps.__getitem__):
        there = Named(place / name / file.name, one.nbytes, one.index_crc, one.identity)
        with contextlib.suppress(CorruptError, FormatError, StorageError):  # another one, damaged, or links are refused
            if _is_whole(there, pace) and store.link(there.path, file):
                store.sync_folder(file.parent)
                if index_crc(file, one.nbytes) == one.index_crc:
                    return True
                store.discard([file])
    return False


def _is_whole(one: Named, pace: Callable[[int], object]) -> bool:
    """Whether a kept container is there and whole."""
    if (entry := store_of(one.path).look(one.path)) is None or index_crc(one.path, one.nbytes) != one.index_crc:
        return False
    if (known := (entry.place, one.index_crc)) not in _whole:
        for _ in compared(one, pace):
            pass
        _whole.add(known)
    return True


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
