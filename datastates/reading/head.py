"""The head of a checkpoint: the facts by which a rank opens it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from datastates._base.packing import pack, unpack
from datastates.commit.catalog import Catalog
from datastates.commit.manifest import (
    CatalogEntry,
    ContainerEntry,
    Manifest,
    attempt_in,
    file_name,
    identity_of,
    within,
)
from datastates.container.file import Named
from datastates.errors import FormatError
from datastates.storage import store_of
from datastates.storage.location import Location
from datastates.storage.stores import reader


@dataclass(frozen=True, slots=True)
class Head:
    """The facts that a rank needs to open a checkpoint. Unlike the manifest, they do not grow with the number of ranks.

    Attributes:
        path: The checkpoint directory, or a single container file.
        step: The training step that it was saved at; None for a single file outside of a checkpoint directory.
        attempt: The random name that all containers of the checkpoint share, but kept ones.
        ranks: The number of ranks that wrote the checkpoint.
        containers: The number of containers: that of the ranks, or twice that if some have a kept container.
        folders: The folders beside the checkpoint that some containers lie in, by the containers' numbers.
        catalog: The manifest's entry of the catalog; None if there is one container.
        container: The manifest's entry of the only container; None if there are several, or for a single file.
    """

    path: Location
    step: int | None
    attempt: str
    ranks: int
    containers: int
    folders: Mapping[int, str]
    catalog: CatalogEntry | None
    container: ContainerEntry | None

    @classmethod
    def of(cls, path: Location, opened: Manifest) -> Head:
        """Take the head of the checkpoint at ``path`` from its manifest."""
        ranks, several = opened.world_size, len(opened.containers)
        only = opened.containers[0] if several == 1 else None
        containers, folders = ranks, {}
        if several > ranks:
            every = zip(opened.numbers, opened.containers, strict=True)
            containers, folders = 2 * ranks, {number: one.folder for number, one in every if one.folder is not None}
        return cls(path, opened.step, opened.attempt, ranks, containers, folders, opened.catalog, only)

    @property
    def is_file(self) -> bool:
        """Whether it is a single container file."""
        return self.containers == 1 and self.container is None

    def named(self, number: int, file: str, nbytes: int, index_crc: int) -> Named:
        """A container, from its facts in the manifest or the catalog."""
        path = within(self.path, file, self.folders.get(number))
        return Named(path, nbytes, index_crc, identity_of(number, self.ranks, self.step, self.attempt))

    def file_name(self, number: int) -> str:
        """The name of a container, where there are several."""
        assert self.catalog is not None
        return file_name(number, self.ranks, attempt_in(self.catalog.file, self.attempt))

    def open_catalog(self) -> Catalog:
        """Open the catalog of a checkpoint of several containers.

        Raises:
            FormatError: The catalog is damaged, or is not the catalog that the manifest describes.
            StorageError: The catalog cannot be read.
        """
        entry = self.catalog
        assert entry is not None
        path = self.path / entry.file
        nbytes = store_of(path).length(path)
        if nbytes != entry.nbytes:
            raise FormatError(f"{path} is not the catalog that the manifest names: {nbytes} bytes, not {entry.nbytes}")
        opened = Catalog(reader(path), nbytes, entry.head_crc32, str(path))
        if opened.containers != self.containers:
            raise FormatError(f"{path}: a catalog of {opened.containers} containers, not of {self.containers}")
        return opened

    def encode(self) -> bytes:
        """Encode the head as bytes, to send it to other ranks."""
        catalog, container = (e and e.model_dump() for e in (self.catalog, self.container))
        fields = {**asdict(self), "path": self.path.encode(), "folders": _runs(self.folders)}
        return pack({**fields, "catalog": catalog, "container": container})

    @classmethod
    def decode(cls, data: bytes) -> Head:
        """Decode the bytes of :meth:`encode`."""
        fields = unpack(data)
        catalog, container = fields["catalog"], fields["container"]
        fields["catalog"] = catalog and CatalogEntry(**catalog)
        fields["container"] = container and ContainerEntry(**container)
        folders = {first + i: folder for first, count, folder in fields["folders"] for i in range(count)}
        return cls(**{**fields, "path": Location.decode(fields["path"]), "folders": folders})


def _runs(folders: Mapping[int, str]) -> list[tuple[int, int, str]]:
    """Runs of containers in one folder: the first number, how many, the folder. Mostly there is one run."""
    found: list[tuple[int, int, str]] = []
    for number, folder in sorted(folders.items()):
        first, count, last = found[-1] if found else (-1, 0, "")
        if (first + count, last) == (number, folder):
            found[-1] = first, count + 1, folder
        else:
            found.append((number, 1, folder))
    return found
