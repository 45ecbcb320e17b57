"""The bytes of a file besides the arrays. A frame knows one format of files; the steps of a snapshot know none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from datastates._base.columns import U32
from datastates.commit.claims import Claims
from datastates.commit.ending import Identity
from datastates.container.index import Hashes, Index
from datastates.executor.executor import PreparedWrite
from datastates.planning.plans import WritePlan
from datastates.saving.structure import Structure
from datastates.state.provider import Encoder
from datastates.state.shards import Shard

Objects: TypeAlias = "Sequence[tuple[int, Shard, bytes | Encoder | None]]"
"""Object shards: for each, its provider's number, the shard, and its serialized form."""


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a file, behind the arrays, and the description of the file in this rank's vote.

    Attributes:
        data: The bytes of the end.
        index_crc32: CRC-32 of the index in ``data``; 0 for a format without an index.
        claims: The parts of logical tensors that the file holds; None in a world of one rank.
        index: The index in ``data``; None for a format without one.
    """

    data: bytes
    index_crc32: int = 0
    claims: Claims | None = None
    index: Index | None = None


class Checksums(Protocol):
    """The checksums of the arrays' bytes, as a :class:`~datastates.executor.jobs.WriteJob` gives them."""

    def checksums(self) -> tuple[U32, U32]:
        """The CRC-32 of each source of the plan, and of each chunk of these, sources end to end."""

    def digests(self) -> U32:
        """The digests of the plan's runs."""


class Frame(Protocol):
    """The frame of a file, planned for one structure. It serves every snapshot of that structure."""

    @property
    def plan(self) -> WritePlan:
        """The plan that says where the arrays lie in the file."""

    def encode_objects(self, objects: Objects) -> Callable[[Checksums, Identity, Hashes | None], Tail]:
        """Encode the objects while the arrays are being written.

        Args:
            objects: The serialized objects of the providers.

        Returns:
            A function that encodes the tail, given the checksums, the container's identity, and the hashes of its
            chunks, if they were taken. It needs no live state.
        """


class Framing(Protocol):
    """A format of files, which plans the frame of each structure."""

    def plan(self, structure: Structure, block: int) -> tuple[Frame, PreparedWrite]:
        """Plan a file for the arrays of a structure.

        Args:
            structure: The arrays to write, without contents.
            block: Longest extent in bytes.

        Returns:
            The frame, and its plan in the form that the executor takes.

        Raises:
            ProviderError: A shard is described wrongly, or the format cannot hold it.
        """
