"""Reads a file of ``torch.save``: a pickle, read without running code, and the storages of its tensors."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from datastates.container import pickle_reader
from datastates.container.composed import Composed, arrays_inside
from datastates.container.object_entry import ObjectEntry
from datastates.container.pickle_picker import Picked
from datastates.container.pickle_reader import Trust
from datastates.container.unbuilt import Unbuilt
from datastates.errors import FormatError, naming
from datastates.executor.executor import Executor
from datastates.formats.archives import DATA, PICKLE, check_place
from datastates.formats.foreign import Foreign
from datastates.formats.foreign_file import ForeignFile, whole
from datastates.formats.seen import Seen
from datastates.formats.torch_parts import HEAD, find_parts, is_legacy
from datastates.reading.new_arrays import NewArrays
from datastates.state import memory
from datastates.state.keys import join, within
from datastates.state.nested import leaves
from datastates.state.new_memory import Into
from datastates.state.shards import ArrayRef, StoredArray
from datastates.storage import store_of
from datastates.storage.location import Location
from datastates.storage.stores import reader

NAME = "a file of torch.save"
_ZIP = b"PK\3\4"
_PLAIN = re.compile(rb"\x80[\x02-\x05]")
"""The beginning of a pickle that is no part of an archive. Such a pickle ends with a dot."""


def recognises(seen: Seen) -> bool:
    """Whether a file is an archive that begins with a pickle or a storage, or is in torch's legacy format."""
    return seen.is_file and is_beginning(seen.beginning[:HEAD])


def is_beginning(head: bytes) -> bool:
    """Whether the first :data:`HEAD` bytes of a file tell that it is of ``torch.save``."""
    return is_legacy(head) or (head.startswith(_ZIP) and (b"/" + PICKLE in head or b"/" + DATA in head))


def is_plain_pickle(seen: Seen) -> bool:
    """Whether a file that no format recognises begins and ends as a pickle does."""
    return _PLAIN.match(seen.beginning[:2]) is not None and seen.ending(1) == b"."


def open(path: Location) -> TorchCheckpoint:
    """Open a file of ``torch.save`` as a checkpoint.

    Raises:
        FormatError: It is damaged, or cannot be read without running code from it; the message names it.
        StorageError: It cannot be read.
    """
    return TorchCheckpoint(NAME, path, [TorchFile(path)])


class TorchFile(ForeignFile):
    """An opened file of ``torch.save``.

    Attributes:
        value: Its value, with a StoredArray for each tensor, and nothing built that would run code of its class.
        composed: The tensors that consist of others, by key.
    """

    def __init__(self, path: Location, prefix: str = "") -> None:
        """Open a file; raises as :func:`open` does.

        Args:
            path: The file.
            prefix: The key of its value; empty for the root.
        """
        nbytes = store_of(path).length(path)
        with naming(str(path)):
            parts = find_parts(reader(path), nbytes)
            self._pickle, self.records, self._numbers = parts.pickle, parts.records, parts.numbers
            self._surveyed: tuple[object, Any] | None = None
            self.value, _ = self._survey(lambda stored: stored, with_torch=False)
            self._prefix = prefix
            self.composed: dict[str, Composed] = {}
            found = [*self._arrays(prefix)]
            tensors = [(self._numbers[a.record], whole(key, a)) for key, a in found]
        super().__init__(path, nbytes, self.records, tensors, self._entries(prefix))

    def _arrays(self, prefix: str) -> Iterator[tuple[str, StoredArray]]:
        """The arrays in the value with their keys, also those that tensors consist of, which :attr:`composed` gets."""
        for key, leaf in leaves(self.value, prefix):
            if isinstance(leaf, StoredArray):
                yield key, leaf
            elif isinstance(leaf, Unbuilt) and leaf.attributes is not None:
                inside = {within(key, path): array for path, array in arrays_inside(leaf)}
                self.composed[key] = Composed(leaf, inside)
                yield from inside.items()

    def number(self, array: StoredArray) -> int:
        """The number of the record that an array of the value lies in."""
        return self._numbers[array.record]

    def _survey(
        self, resolve: Callable[[StoredArray], object], trust: Trust = "all", *, with_torch: bool = True
    ) -> tuple[Any, bool]:
        """Read the value, without objects that need their classes' code. Returns it, and whether none was left out."""

        def checked(stored: StoredArray) -> object:
            return resolve(self._checked(stored))

        return pickle_reader.survey(self._pickle, checked, trust=trust, with_torch=with_torch)

    def _checked(self, stored: StoredArray) -> StoredArray:
        """Return an array of the pickle, once its storage is known to be there; raises FormatError."""
        number = self._numbers.get(stored.record)
        check_place(stored, None if number is None else self.records[number].nbytes)
        return stored

    def _entries(self, prefix: str) -> list[ObjectEntry]:
        """An object entry for each item of the value that holds anything beside tensors."""
        if not isinstance(self.value, dict):
            return [ObjectEntry(prefix, 0, self._survey, self._pickle)] if _has_other(self.value) else []
        return [
            ObjectEntry(join(prefix, key), 0, functools.partial(self._item, key), self._pickle)
            for key, item in self.value.items()
            if _has_other(item)
        ]

    def _item(self, key: object, resolve: Callable[[StoredArray], object]) -> tuple[Any, bool]:
        """Survey one item of the value. The last survey of the whole value is kept, and serves its other items, too."""
        if self._surveyed is None or self._surveyed[0] is not resolve:
            self._surveyed = resolve, self._survey(resolve)[0]
        item = self._surveyed[1][key]
        return item, not any(isinstance(leaf, Unbuilt) for _, leaf in leaves(item))

    def vet_composed(self, keys: Collection[str], trust: Trust) -> None:
        """Refuse tensors of :attr:`composed` that could not be built; nothing of their classes runs.

        Raises:
            TrustError: They need classes that are not trusted; the message names all of them.
            FormatError: A trusted class cannot be imported.
        """
        picked = self._pick({}, trust)
        picked.vet([leaf for key, leaf in leaves(picked.value, self._prefix) if key in keys])

    def build_composed(self, arrays: Mapping[str, object], trust: Trust) -> dict[str, Any]:
        """Build the tensors of :attr:`composed` all of whose arrays are given, by full key.

        Args:
            arrays: The arrays, by full key, with their elements.
            trust: As for :meth:`load`.

        Raises:
            TrustError, FormatError: As :meth:`vet_composed` does.
        """
        wanted = {key for key, one in self.composed.items() if one.arrays and arrays.keys() >= one.arrays.keys()}
        picked = self._pick(arrays, trust)
        made = {key: leaf for key, leaf in leaves(picked.value, self._prefix) if key in wanted}
        for key, one in made.items():
            picked.vet(one)
            if isinstance(one, Unbuilt):
                raise FormatError(f"{self.path}: {key!r} cannot be built from what is stored of it")
        return made

    def _pick(self, arrays: Mapping[str, object], trust: Trust) -> Picked:
        places = {
            _place(a): arrays[key] for one in self.composed.values() for key, a in one.arrays.items() if key in arrays
        }

        def resolve(stored: StoredArray) -> object:
            array = places.get(_place(self._checked(stored)))
            return Unbuilt() if array is None else memory.with_grad(array, stored.requires_grad)

        with naming(str(self.path)):
            return Picked(self._pickle, resolve, trust)

    def load(self, executor: Callable[[int], Executor], *, trust: Trust, into: Into) -> Any:
        """Read and verify the file, and build its value; arguments as for ``Opened.load``.

        Raises:
            TrustError: An object needs a class that is not trusted. No tensor has been read.
            CorruptError: A tensor does not match its checksum; the message names it.
            FormatError: An object cannot be built.
            StorageError: Reading failed.
        """
        new = NewArrays(into)

        def array(stored: StoredArray) -> Any:
            stored = self._checked(stored)
            ref = ArrayRef(stored.record, "torch", stored.dtype, stored.shape, stored.stride)
            made = new.view(self, self._numbers[stored.record], ref, stored.begin)
            return memory.with_grad(made, stored.requires_grad)

        with naming(str(self.path)):
            value, complete = self._survey(array, trust, with_torch=into.with_torch)
            new.read(executor)
            if complete:
                return value
            return pickle_reader.loads(self._pickle, array, trust=trust, with_torch=into.with_torch)


class TorchCheckpoint(Foreign):
    """A checkpoint that is one file of ``torch.save``."""

    files: Sequence[TorchFile]

    def load(self, executor: Callable[[int], Executor], *, trust: Trust, into: Into) -> Any:
        """Read the value of the file, whatever it is."""
        return self.files[0].load(executor, trust=trust, into=into)


def _place(stored: StoredArray) -> tuple[object, ...]:
    return stored.record, stored.dtype, stored.offset, stored.shape, stored.stride


def _has_other(value: object) -> bool:
    """Whether nested dicts, lists and tuples hold anything beside arrays. An empty one counts as a value."""
    return any(not isinstance(leaf, StoredArray) for _, leaf in leaves(value))
