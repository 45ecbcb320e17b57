"""The bytes of a file besides the arrays. A frame knows one format of files; the steps of a snapshot know none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from datastates.commit.claims import Claims
from datastates.commit.ending import Identity
from datastates.executor.executor import PreparedWrite
from datastates.executor.jobs import WriteJob
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
    """

    data: bytes
    index_crc32: int = 0
    claims: Claims | None = None


class Frame(Protocol):
    """The frame of a file, planned for one structure. It serves every snapshot of that structure."""

    @property
    def plan(self) -> WritePlan:
        """The plan that says where the arrays lie in the file."""

    def encode_objects(self, objects: Objects) -> Callable[[WriteJob, Identity], Tail]:
        """Encode the objects while the arrays are being written.

        Args:
            objects: The serialized objects of the providers.

        Returns:
            A function that encodes the tail, given the write job and the container's identity. It is called once all
            checksums are known, and needs no live state.
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
