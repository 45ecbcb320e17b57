"""The head of a checkpoint: the facts by which a rank opens it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from datastates._base.packing import pack, unpack
from datastates.commit.catalog import Catalog
from datastates.commit.manifest import CatalogEntry, ContainerEntry, Manifest, attempt_in, container_name
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
        attempt: The random name that all containers of the checkpoint share.
        ranks: The number of ranks that wrote the checkpoint.
        catalog: The manifest's entry of the catalog; None if one rank wrote the checkpoint.
        container: The manifest's entry of the only container; None if several ranks wrote the checkpoint, or for a
            single file.
    """

    path: Location
    step: int | None
    attempt: str
    ranks: int
    catalog: CatalogEntry | None
    container: ContainerEntry | None

    @classmethod
    def of(cls, path: Location, opened: Manifest) -> Head:
        """Take the head of the checkpoint at ``path`` from its manifest."""
        only = opened.containers[0] if opened.world_size == 1 else None
        return cls(path, opened.step, opened.attempt, opened.world_size, opened.catalog, only)

    @property
    def is_file(self) -> bool:
        """Whether it is a single container file."""
        return self.ranks == 1 and self.container is None

    def named(self, rank: int, file: str, nbytes: int, index_crc: int) -> Named:
        """The container of one rank, from its facts in the manifest or the catalog."""
        identity = {"step": self.step, "rank": rank, "world_size": self.ranks, "attempt": self.attempt}
        return Named(self.path / file, nbytes, index_crc, identity)

    def container_name(self, rank: int) -> str:
        """The name of a rank's container, where several ranks wrote the checkpoint."""
        assert self.catalog is not None
        return container_name(rank, attempt_in(self.catalog.file, self.attempt))

    def open_catalog(self) -> Catalog:
        """Open the catalog of a checkpoint that several ranks wrote.

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
        if opened.ranks != self.ranks:
            raise FormatError(f"{path}: a catalog of {opened.ranks} ranks, not of {self.ranks}")
        return opened

    def encode(self) -> bytes:
        """Encode the head as bytes, to send it to other ranks."""
        catalog, container = (e and e.model_dump() for e in (self.catalog, self.container))
        return pack({**asdict(self), "path": self.path.encode(), "catalog": catalog, "container": container})

    @classmethod
    def decode(cls, data: bytes) -> Head:
        """Decode the bytes of :meth:`encode`."""
        fields = unpack(data)
        catalog, container = fields["catalog"], fields["container"]
        fields["catalog"] = catalog and CatalogEntry(**catalog)
        fields["container"] = container and ContainerEntry(**container)
        return cls(**{**fields, "path": Location.decode(fields["path"])})
