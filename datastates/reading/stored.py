"""An opened checkpoint: tells which containers hold which parts, and opens each container when it is first needed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from datastates._base import log
from datastates._base.cached import cached_property
from datastates._base.columns import I64, U64
from datastates.commit import health, manifest
from datastates.commit.catalog import Catalog, Holders
from datastates.commit.claims import key_hash, object_hash
from datastates.commit.gathering import Gathering
from datastates.container.file import Container, Named, lost_container, open_container, open_each
from datastates.container.logical import contributed
from datastates.container.object_entry import ObjectEntry, by_key
from datastates.container.table import Row
from datastates.errors import DatastatesError, FormatError
from datastates.reading.head import Head
from datastates.reading.tensors import Found, FoundRow, Held, Metadata
from datastates.state.parts import Part, uncovered
from datastates.state.shards import full_key
from datastates.storage.location import Location


class Stored:
    """The containers of one checkpoint, and the parts of logical tensors that each holds. Not thread-safe.

    Each rank's container has the rank's number. Its kept container has that and the number of ranks.

    Attributes:
        head: The head of the checkpoint.
        lost: The paths of containers that were needed and are missing, by number.
    """

    def __init__(
        self,
        head: Head,
        others: Sequence[Head] = (),
        without: Collection[Location] = (),
        gathering: Gathering | None = None,
    ) -> None:
        """Take the head; nothing is opened yet.

        Args:
            head: The head of the checkpoint, in the nearest place.
            others: The heads of its copies in other places: a file that is missing or damaged is taken from there.
            without: Files that are known to be damaged: they are taken from the next place, if there is one.
            gathering: Brings containers from other hosts to the nearest place.
        """
        self.head = head
        self._gathering = gathering
        self.lost: dict[int, Location] = {}
        self._heads, self._without = (head, *others), without
        self._opened: dict[int, Container] = {}

    @classmethod
    def open(cls, path: Location) -> Stored:
        """Open a checkpoint directory by its manifest.

        Raises:
            CheckpointNotFoundError: There is no manifest.
            FormatError: The manifest is damaged.
            StorageError: The manifest cannot be read.
        """
        return cls(Head.of(path, manifest.open(path)))

    @classmethod
    def of_file(cls, path: Location) -> Stored:
        """Open a single container file, as a checkpoint with only its contents.

        Raises:
            FormatError: The file is no container, or a damaged one.
            StorageError: The file cannot be read.
        """
        one = open_container(path)
        identity: dict[str, Any] = one.index.identity
        step = identity["step"] if manifest.has_step(path, identity) else None
        stored = cls(Head(path, step, identity["attempt"], 1, 1, {}, None, None))
        stored._opened[0] = one
        return stored

    @property
    def path(self) -> Location:
        """The checkpoint directory, or the single container file."""
        return self.head.path

    @property
    def step(self) -> int | None:
        """The training step that it was saved at; None for a single file outside of a checkpoint directory."""
        return self.head.step

    @cached_property
    def catalog(self) -> Catalog:
        """The catalog of a checkpoint of several containers.

        Raises:
            FormatError: The catalog is damaged, or is not the catalog that the manifest describes.
            StorageError: The catalog cannot be read.
        """
        *nearer, last = self._heads
        for head in nearer:
            if head.catalog is not None and head.path / head.catalog.file in self._without:
                continue
            try:
                return head.open_catalog()
            except DatastatesError as error:
                if not health.is_damage(error):
                    raise
        return last.open_catalog()

    @property
    def has_copies(self) -> bool:
        """Whether it lies in several places."""
        return len(self._heads) > 1

    def is_elsewhere(self, path: Location) -> bool:
        """Whether a damaged file can be taken from another place, where it was not tried yet."""
        is_known = any(manifest.is_of(path, head.path) for head in self._heads)
        return self.has_copies and path not in self._without and is_known

    @property
    def holding(self) -> Holders:
        """Which containers hold what, where there are several; raises as :attr:`catalog` does."""
        return self.catalog

    def container(self, number: int, *, needed: bool = False) -> Container | None:
        """A container; None if the file is missing. ``needed``: no other container will do.

        Raises:
            FormatError: The file is damaged, or is not the container that the manifest or the catalog describes.
            StorageError: The file cannot be read.
        """
        self.open_containers([number], needed=needed)
        return self._opened.get(number)

    def open_containers(self, numbers: Collection[int], *, needed: bool = False) -> None:
        """Open several containers at once, which is faster than one after the other.

        Raises:
            FormatError, StorageError: As :meth:`container` does, of the first container that cannot be opened.
            ElsewhereError: Needed containers may be on other hosts. Those come before the places after the nearest.
        """
        new = [number for number in dict.fromkeys(numbers) if number not in self._opened and number not in self.lost]
        *nearer, last = self._heads
        for head in nearer or ([last] if self._gathering is not None else []):
            for number in new:
                self._open_there(number, self._named(number, head))
            new = [number for number in new if number not in self._opened]
            if needed and head is self.head and self._gathering is not None:
                self._gathering.refuse(self.path, self._writers(new))
        for number, one in zip(new, open_each([self._named(number, last) for number in new]), strict=True):
            if one is None:
                self.lost[number] = self._named(number, self.head).path
            else:
                self._opened[number] = one
        if needed and self._gathering is not None:
            self._gathering.refuse(self.path, self._writers(self.lost.keys() & set(numbers)), lost=True)

    def _writers(self, numbers: Collection[int]) -> list[int]:
        """The ranks that wrote some containers."""
        return sorted({number % self.head.ranks for number in numbers})

    def origin(self, file: Location) -> str:
        """The place that a container was taken from: a directory, an address, or one of another host."""
        brought = None if self._gathering is None else self._gathering.origin(file)
        return brought or str(file.parent.parent)

    def _open_there(self, number: int, named: Named) -> None:
        """Open a container in a place that is not the last one, if it is there and whole."""
        if named.path in self._without:
            return
        try:
            (found,) = open_each([named])
        except DatastatesError as error:
            if not health.is_damage(error):
                raise
            log.warning("it is read from another place, as it is damaged here: %s", error)
            return
        if found is not None:
            self._opened[number] = found

    def _named(self, number: int, head: Head) -> Named:
        """A container as the manifest or the catalog describes it: path, size and checksum of its index."""
        if (only := head.container) is not None:
            return head.named(number, only.file, only.nbytes, only.index_crc32)
        return head.named(number, head.file_name(number), *self.catalog.container(number))

    def base(self, provider: str, rank: int) -> Container | None:
        """The container from which a rank takes a provider's objects; None if no container has the provider.

        It is the container with the rank's own number if that has the provider, else another rank's.
        """
        own = self.container(rank, needed=True) if rank < self.head.ranks else None
        if own is not None and provider in own.index.shards.providers:
            return own
        if self.head.containers > 1 and (found := self.holding.find(object_hash(full_key(provider, "")))) is not None:
            holder = self.holding.any_holder(found)
            if holder is not None and (one := self.container(holder, needed=True)) is not None:
                return one
        every = map(self.container, range(self.head.ranks))
        return next((c for c in every if c is not None and provider in c.index.shards.providers), None)

    def providers(self) -> list[str]:
        """The names of the providers in the containers that have been opened."""
        return sorted({name for one in self._opened.values() for name in one.index.shards.providers})

    def holds(self, full: str) -> bool:
        """Whether any rank saved an array with the full key. Of several containers, that with it may be missing.

        Raises:
            StorageError: There is one container, and it is missing.
        """
        if self.head.containers == 1:
            return full in self.keys
        return self.holding.find(key_hash(full)) is not None

    def find(self, full: str) -> Row | None:
        """A row with any part of the logical tensor with the full key; None if there is none."""
        if self.head.containers == 1:
            return self._row(0, full)
        tensor = self.holding.find(key_hash(full))
        if tensor is None:
            return None
        first = self.holding.any_holder(tensor)
        if first is not None and (row := self._row(first, full)) is not None:
            return row
        holders = self.holding.holders(tensor, 0, 2**62)
        found = next((row for rank in holders if (row := self._row(rank, full)) is not None), None)
        if found is None and first is not None:
            self.container(first, needed=True)
        return found

    def whole(self, fulls: Sequence[str]) -> list[tuple[Row, Sequence[FoundRow]]]:
        """The rows of whole tensors; see :meth:`datastates.reading.tensors.Tensors.whole`.

        A tensor is there only in part if this is one of several containers, or if a container is missing.
        """
        rows = []
        known = self.rows(0, fulls) if self.head.containers == 1 else {}  # faster than one key after the other
        for full in fulls:
            if (row := known[full][0] if full in known else self.find(full)) is None:
                raise self._absent(full)
            rows.append(row)
        wanted = [(row, Part.whole(row.global_shape)) for row in rows]
        found = list(zip(rows, self.sources(wanted), strict=True))
        for (_, part), (row, sources) in zip(wanted, found, strict=True):
            if uncovered(part, [one.part for _, one in sources]):
                raise self._partial(row.key, f"it holds only a part of that tensor of shape {row.global_shape}")
        return found

    def _absent(self, full: str) -> Exception:
        """The error for a full key under which no row was found."""
        if self.holds(full):
            return self._partial(full, "")
        if "keys" in vars(self) and full in self.keys:  # keys have been read from the containers
            return FormatError(f"{self.path}: the catalog lacks {full!r}, which a container holds")
        return KeyError(full)

    def _partial(self, full: str, what: str) -> DatastatesError:
        lost = ", ".join(path.name for _, path in sorted(self.lost.items()))
        return DatastatesError(
            f"{full!r} cannot be read from {self.head.path}: {f'{lost} is missing' if lost else what}"
        )

    def sources(self, wanted: Sequence[tuple[Row, Part]]) -> Sequence[Sequence[FoundRow]]:
        """The rows that parts of tensors may come from; see :meth:`datastates.reading.tensors.Tensors.sources`."""
        asked: dict[int, list[int]] = {}
        for number, (like, part) in enumerate(wanted):
            for holder in self.holders(like.key, part):
                asked.setdefault(holder, []).append(number)
        self.open_containers(asked, needed=True)
        held: list[Held] = []
        for holder in sorted(asked.keys() - self.lost.keys()):
            source, numbers = self._opened[holder], asked[holder]
            which, row = source.shards.find([wanted[number][0].key for number in numbers])
            held += self.placed(source, np.array(numbers)[which], row)
        return Found([like for like, _ in wanted], held)

    def placed(self, container: Container, part: I64, row: I64) -> list[Held]:
        """Where the bytes of a container's rows lie: the rows' numbers in the files, which are the container itself.

        Args:
            container: The container.
            part: For each row, the number of the wanted part that it may share elements with.
            row: The number of each row in the container's table.
        """
        return [Held(container, part, row)]

    def holders(self, full: str, part: Part) -> list[int]:
        """The containers that may have elements of a part of a logical tensor."""
        if self.head.containers == 1:
            return [0]
        tensor = self.holding.find(key_hash(full))
        return [] if tensor is None else self.holding.holders(tensor, *part.bounds)

    def rows(self, number: int, fulls: Sequence[str]) -> dict[str, list[Row]]:
        """The rows of a container by full key: its parts of each tensor. Keys that it lacks are left out."""
        if (source := self.container(number)) is None:
            return {}
        fulls = list(dict.fromkeys(fulls))
        which, numbers = source.index.shards.find(fulls)
        found: dict[str, list[Row]] = {}
        for i, row in zip(which.tolist(), source.index.shards.rows(numbers.tolist()), strict=True):
            found.setdefault(fulls[i], []).append(row)
        return found

    def _row(self, number: int, full: str) -> Row | None:
        return next(iter(self.rows(number, [full]).get(full, ())), None)

    def every(self) -> list[Container]:
        """The ranks' own containers that are not missing: they list all arrays, and have all objects."""
        self.open_containers(range(self.head.ranks))
        return [self._opened[rank] for rank in range(self.head.ranks) if rank in self._opened]

    @cached_property
    def keys(self) -> Mapping[str, object]:
        """The full keys of all arrays, in the order of the ranks. This opens the containers of all ranks.

        Raises:
            StorageError: A container is missing.
            ElsewhereError: Some are on other hosts.
        """
        self.open_containers(range(self.head.ranks), needed=True)
        tables = [source.index.shards for source in self.every()]
        if len(tables) < self.head.ranks:
            rank, path = min(self.lost.items())
            raise lost_container(path, rank, self.head.ranks)
        return tables[0].by_key if len(tables) == 1 else dict.fromkeys(key for table in tables for key in table.by_key)

    @property
    def metadata(self) -> Metadata:
        """Nothing: its files hold state only."""
        return Metadata()

    @property
    def composed(self) -> None:
        """None: objects hold such tensors."""

    @property
    def is_listed(self) -> bool:
        """Whether reading :attr:`keys` opens no containers, except that of a checkpoint's only rank."""
        return "keys" in self.__dict__ or self.head.ranks == 1

    def has_lost(self, full: str, rank: int) -> bool:
        """Whether a rank saved an object with the full key in a container that is known to be missing."""
        if rank not in self.lost or self.head.containers == 1:
            return False
        found = self.holding.find(object_hash(full))
        return found is not None and rank in self.holding.holders(found, 0, 1)

    def every_key(self, provider: str) -> list[str]:
        """The keys of all arrays of a provider, on all ranks. This opens all containers."""
        tables = [source.index.shards for source in self.every()]
        return list(dict.fromkeys(table.keys[i] for table in tables for i in table.of_provider(provider)))

    def strangers(self, wanted: U64, providers: Collection[str]) -> list[str]:
        """Full keys of arrays of these providers that were saved and that no rank wants, sorted.

        The catalog has only hashes of keys. So containers are opened until each unwanted hash has been found in one.

        Args:
            wanted: Hashes of all full keys that any rank wants.
            providers: The names under which the providers are stored.
        """
        taken = set(wanted.tolist())
        left = set(self.holding.keys().tolist()) - taken if self.head.containers > 1 else None
        found: list[str] = []
        for number in range(self.head.ranks):  # each kept array is in its rank's container, too, without elements
            if left is not None and not left:
                break
            if (source := self.container(number)) is None:
                continue
            table = source.index.shards
            arrays = [(n, table.keys[i]) for n in table.providers for i in table.of_provider(n)]
            objects = [(table.providers[o.provider], o.key) for o in source.index.objects]
            keys = {key_hash(full_key(*key)): key for key in arrays}
            keys |= {object_hash(full_key(*key)): key for key in objects}
            found += [full_key(*key) for n, key in keys.items() if n not in taken and key[0] in providers]
            if left is not None:
                left.difference_update(keys)  # keys of other providers, too: they need not be looked for
        return sorted(set(found))

    def objects(self) -> dict[str, ObjectEntry]:
        """All objects by full key, in the order of the ranks. This opens all containers."""
        return by_key(entry for source in self.every() for entry in source.objects)

    def digest(self, full: str) -> int | None:
        """The sum of all parts' contributions to the digest of a tensor; None if a contribution is unknown."""
        if self.head.containers == 1:
            return contributed(self.rows(0, [full]).get(full, []))
        tensor = self.holding.find(key_hash(full))
        return None if tensor is None else self.holding.digest(tensor)
