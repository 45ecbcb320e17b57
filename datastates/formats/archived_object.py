"""An object that ``torch.save`` wrote into a stretch of a file, as in DCP. It is small: it is read at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from datastates.container import pickle_reader
from datastates.container.object_entry import ObjectEntry
from datastates.container.pickle_reader import Trust
from datastates.container.unbuilt import Unbuilt
from datastates.errors import FormatError, naming
from datastates.formats.archives import DATA, PICKLE, Archive, check_place, open_archive
from datastates.state import memory
from datastates.state.new_memory import Into
from datastates.state.shards import ArrayRef, StoredArray
from datastates.storage import store_of
from datastates.storage.location import Location
from datastates.storage.stores import reader


class ArchivedObject:
    """An object in an archive.

    Attributes:
        path: The file.
        offset, nbytes: The archive's place in the file, in bytes.
        unreadable: Why the object cannot be built; None if it can.
    """

    def __init__(self, path: Location, offset: int, nbytes: int, unreadable: str | None = None) -> None:
        """Remember the archive's place; nothing is read yet."""
        self.unreadable = unreadable
        self.path = path
        self.offset = offset
        self.nbytes = nbytes

    @cached_property
    def _archive(self) -> Archive:
        read = reader(self.path)
        archive = open_archive(lambda at, size: read(self.offset + at, size), self.nbytes, largest=self.nbytes)
        if archive is None or PICKLE not in archive.nbytes or not archive.is_little:
            raise FormatError("it is no object that torch.save wrote")
        return archive

    def entry(self, key: str) -> ObjectEntry:
        """The entry that lists this object under ``key`` among the objects of a file."""
        return ObjectEntry(key, 0, self.survey, self, self.offset, self.nbytes)

    def __eq__(self, other: object) -> bool:
        """Whether two archives have the same bytes. Reads both."""
        if not isinstance(other, ArchivedObject) or self.nbytes != other.nbytes:
            return False
        one, two = (store_of(each.path).read(each.path, each.offset, each.nbytes) for each in (self, other))
        return one == two

    def survey(
        self, resolve: Callable[[StoredArray], object], trust: Trust = "all", *, with_torch: bool = True
    ) -> tuple[Any, bool]:
        """Read the object as :func:`datastates.container.pickle_reader.survey` does."""
        if self.unreadable is not None:
            return Unbuilt(), False
        with naming(str(self.path)):
            return pickle_reader.survey(self._archive.read(PICKLE), resolve, trust=trust, with_torch=with_torch)

    def load(self, trust: Trust, into: Into) -> Any:
        """Build the object with its arrays, and verify them.

        Raises:
            TrustError: It needs a class that is not trusted.
            FormatError: It is damaged; the message names the file.
        """
        blocks: dict[str, Any] = {}  # tensors of one storage share it

        def array(stored: StoredArray) -> Any:
            record, name = stored.record, DATA + stored.record.encode()
            check_place(stored, self._archive.nbytes.get(name))
            if record not in blocks:
                data = self._archive.read(name)
                blocks[record] = into.allocate("torch", len(data))
                memory.assign(blocks[record], np.frombuffer(data, np.uint8).copy())
            ref = ArrayRef(record, "torch", stored.dtype, stored.shape, stored.stride)
            return memory.with_grad(into.view(blocks[record], ref, stored.begin), stored.requires_grad)

        with naming(str(self.path)):
            return pickle_reader.loads(self._archive.read(PICKLE), array, trust=trust, with_torch=into.with_torch)

    def check(self) -> None:
        """Raise FormatError if the stretch is no archive with a pickle, or the pickle is damaged."""
        pickle_reader.survey(self._archive.read(PICKLE), lambda stored: stored, trust="all", with_torch=False)

    def verify(self) -> None:
        """Read all records of the archive; raises FormatError if one does not match its checksum."""
        for name in self._archive.nbytes:
            self._archive.read(name)
