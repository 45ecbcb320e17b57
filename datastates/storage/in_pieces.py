"""Reads most of an object, several pieces of it at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from datastates._base.tasks import each
from datastates.storage.location import Location
from datastates.storage.stores import store_of

_AT_ONCE = 8
"""Pieces that are asked for at once, and kept."""


def in_pieces(path: Location, ranges: Sequence[tuple[int, int]]) -> Iterator[memoryview]:
    """Yield the bytes of each range of an object: an offset and a length. They ascend, and leave little out.

    Each request is for as many ranges as the store's best piece holds.

    Raises:
        StorageError: It cannot be read.
    """
    store = store_of(path)
    pieces: list[list[tuple[int, int]]] = []
    for offset, nbytes in ranges:
        if not pieces or offset + nbytes - pieces[-1][0][0] > store.traits.best_piece:
            pieces.append([])
        pieces[-1].append((offset, nbytes))

    def read(piece: list[tuple[int, int]]) -> bytes:
        begin = piece[0][0]
        return store.read(path, begin, sum(piece[-1]) - begin)

    at_once = 1 if store.traits.has_files else _AT_ONCE  # the kernel reads ahead for who reads in order
    for first in range(0, len(pieces), at_once):
        some = pieces[first : first + at_once]
        for piece, data in zip(some, each(read, some, at_once), strict=True):
            view, begin = memoryview(data), piece[0][0]
            yield from (view[offset - begin :][:nbytes] for offset, nbytes in piece)
