"""The votes of the ranks that save together, and the catalog that their containers make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from datastates._base.packing import pack, unpack
from datastates.commit import catalog
from datastates.commit.claims import (
    NO_CLAIMS,
    Claims,
    decode_claims,
    describe_conflicts,
    encode_claims,
    is_complete,
    joined,
)
from datastates.commit.manifest import ContainerEntry, within
from datastates.commit.replicas import ReplicaDigests, refuse_difference
from datastates.container.table import ShardTable
from datastates.errors import CommitError, rank_names
from datastates.ranks.board_world import DONE, FAILED
from datastates.storage.location import Location

SKIPPED = b"s"
"""The first byte of an answer that some ranks took no part."""


@dataclass(frozen=True, slots=True, eq=False)
class File:
    """A container that a rank has on stable storage.

    Attributes:
        name: Its file name.
        nbytes: Its length, in bytes.
        index_crc32: CRC-32 of its index.
        claims: The arrays and objects in it; None if it is the only one of the checkpoint.
        kept: What the manifest says besides of a kept container: step, attempt and folder. Empty for others.
    """

    name: str
    nbytes: int
    index_crc32: int
    claims: Claims | None
    kept: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> list[Any]:
        """The file as fields for msgpack."""
        claims = None if self.claims is None else encode_claims(self.claims)
        return [self.name, self.nbytes, self.index_crc32, claims, self.kept]

    @classmethod
    def decode(cls, fields: list[Any]) -> File:
        """The inverse of :meth:`encode`."""
        name, nbytes, index_crc32, claims, kept = fields
        return cls(name, nbytes, index_crc32, None if claims is None else decode_claims(claims), kept)

    def entry(self, rank: int) -> ContainerEntry:
        """What the manifest says of it, as a file of a rank."""
        return ContainerEntry(file=self.name, rank=rank, nbytes=self.nbytes, index_crc32=self.index_crc32, **self.kept)

    def within(self, checkpoint: Location) -> Location:
        """Its path, given that of the checkpoint, or of what is to be one."""
        return within(checkpoint, self.name, self.kept.get("folder"))


@dataclass(frozen=True, slots=True, eq=False)
class Vote:
    """One rank's message to the coordinator: its files are on stable storage, or the rank has failed.

    Attributes:
        step: The step of the snapshot.
        error: Why the rank has failed; empty if it has not.
        skipped: True if the rank took no part because it had failed at an earlier snapshot: see
            :class:`~datastates.errors.SnapshotSkippedError`.
        files: Its container, then its kept container if it has one.
        replicas: The digests of the arrays that other ranks hold, too; None if there are none.
    """

    step: int
    error: str = ""
    skipped: bool = False
    files: tuple[File, ...] = ()
    replicas: ReplicaDigests | None = None

    def encode(self) -> bytes:
        """The vote as bytes. The first byte says whether the rank has failed."""
        replicas = None if self.replicas is None else self.replicas.encode()
        fields = [self.step, self.error, self.skipped, [file.encode() for file in self.files], replicas]
        return (FAILED if self.error else DONE) + pack(fields)

    @classmethod
    def decode(cls, data: bytes) -> Vote:
        """The inverse of :meth:`encode`."""
        step, error, skipped, files, replicas = unpack(data[1:])
        replicas = None if replicas is None else ReplicaDigests.decode(replicas)
        return cls(step, error, skipped, tuple(map(File.decode, files)), replicas)


def decoded(data: dict[int, bytes]) -> dict[int, Vote]:
    """Decode the vote of each rank; the dict is in the order of the ranks."""
    return {rank: Vote.decode(vote) for rank, vote in sorted(data.items())}


def declined(votes: dict[int, Vote]) -> bytes:
    """The coordinator's answer if some ranks took no part and none failed; empty if all ranks took part.

    Raises:
        CommitError: A rank has failed, or the ranks took a snapshot of different steps.
    """
    failed = {rank: vote for rank, vote in votes.items() if vote.error}
    reasons = "; ".join(f"rank {rank}: {vote.error}" for rank, vote in failed.items())
    if not all(vote.skipped for vote in failed.values()):
        raise CommitError(reasons)
    if failed:
        return SKIPPED + reasons.encode(errors="replace")
    steps = {vote.step for vote in votes.values()}
    if len(steps) > 1:
        ranks = {step: [r for r, v in votes.items() if v.step == step] for step in sorted(steps)}
        said = ", ".join(f"step {step} on {rank_names(who)}" for step, who in ranks.items())
        raise CommitError(
            f"the ranks took a snapshot of different steps: {said}. Their calls of snapshot() are paired in order: "
            "after one that a rank has left out, make a new Checkpointer on all ranks"
        )
    return b""


def by_number(votes: dict[int, Vote]) -> dict[int, tuple[int, File]]:
    """The files of all ranks by their numbers in the checkpoint, ascending, each with its rank."""
    return {
        which * len(votes) + rank: (rank, vote.files[which])
        for which in range(2)
        for rank, vote in votes.items()
        if which < len(vote.files)
    }


def made_catalog(votes: dict[int, Vote], table_of: Callable[[File], ShardTable]) -> tuple[bytes, int]:
    """Check that the containers together make one state; returns the catalog and the CRC-32 of its head.

    ``table_of`` gives the shard table of a container, where they do not.
    """
    numbered = by_number(votes)
    columns: list[tuple[int, int, Any]] = [(0, 0, NO_CLAIMS)] * len(votes) * (1 + (len(numbered) > len(votes)))
    for number, (_, file) in numbered.items():
        columns[number] = file.nbytes, file.index_crc32, file.claims
    nbytes, index_crc, claims = zip(*columns, strict=True)
    try:
        if not is_complete(claims):
            raise CommitError("the ranks' parts do not make whole tensors")
        encoded, head_crc = catalog.encode_catalog(claims, np.array(nbytes, np.uint64), np.array(index_crc, np.uint32))
    except (CommitError, catalog.ConflictError):
        if (text := describe_conflicts((rank, table_of(file)) for rank, file in numbered.values())) is not None:
            raise CommitError(text) from None  # it names tensors held twice or not at all
        raise
    own, kept = claims[: len(votes)], claims[len(votes) :]
    together = list(map(joined, own, kept)) if kept else own
    replicas = [vote.replicas for vote in votes.values()]
    refuse_difference(list(votes), together, replicas, lambda rank: table_of(votes[rank].files[0]))
    return encoded, head_crc
