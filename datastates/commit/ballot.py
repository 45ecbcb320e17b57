"""One checkpoint's commit: every rank votes, the coordinator makes the manifest, and all get the same answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from datastates._base import files
from datastates.commit import catalog, directories, manifest
from datastates.commit.claims import Claims, decode_claims, encode_claims
from datastates.commit.conflicts import describe_conflicts
from datastates.commit.tiling import PRIME
from datastates.container.file import open_container
from datastates.errors import (
    CommitError,
    RanksMissingError,
    SnapshotSkippedError,
    StorageError,
    rank_names,
)
from datastates.ranks.together import DONE, FAILED, is_told
from datastates.ranks.world import World


@dataclass(frozen=True, slots=True, eq=False)
class Vote:
    """What a rank says when its container is on stable storage, or when it has failed.

    Attributes:
        step: The step of its snapshot.
        error: Why it has failed; empty when it has not.
        skipped: Whether that is no failure of this snapshot's: see :class:`~datastates.errors.SnapshotSkippedError`.
        file: Its container's name.
        nbytes: Its container's length.
        index_crc32: CRC-32 of its container's index.
        claims: What the container holds; None where there is one rank only.
    """

    step: int
    error: str = ""
    skipped: bool = False
    file: str = ""
    nbytes: int = 0
    index_crc32: int = 0
    claims: Claims | None = None

    def encode(self) -> bytes:
        """The vote as bytes; the first of them tells a failure."""
        claims = None if self.claims is None else encode_claims(self.claims)
        fields = [self.step, self.error, self.skipped, self.file, self.nbytes, self.index_crc32, claims]
        return (FAILED if self.error else DONE) + msgpack.packb(fields)

    @classmethod
    def decode(cls, data: bytes) -> Vote:
        """The mirror of :meth:`encode`."""
        step, error, skipped, file, nbytes, crc, claims = msgpack.unpackb(data[1:])
        return cls(step, error, skipped, file, nbytes, crc, None if claims is None else decode_claims(claims))


_COMMITTED, _SKIPPED = b"c", b"s"  # what an answer begins with


class Ballot:
    """The agreement of all ranks about one checkpoint. Used by one thread at a time."""

    def __init__(self, world: World, name: str, sequence: Callable[[], int], *, step: int = -1, timeout: float) -> None:
        """Name it as all ranks name it, and no other ballot of this run.

        Args:
            world: The ranks.
            name: Its name.
            sequence: Gives the checkpoint's; called on the coordinator when it is committed.
            step: The checkpoint's.
            timeout: Seconds to wait for the others.
        """
        self._world = world
        self._name = name
        self._timeout = timeout
        self._sequence = sequence
        self.step = step
        self.attempt = world.token(name) if world.size > 1 else None
        """What all ranks call the directory that they write into; None where there is one only."""

    @property
    def rank(self) -> int:
        """This process's number."""
        return self._world.rank

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self._world.size

    def cast(
        self, vote: Vote, pending: manifest.Pending, target: Callable[[], Path], retain: Callable[[], None]
    ) -> Path:
        """Vote, and wait for the outcome; returns where the checkpoint stands.

        Args:
            vote: This rank's.
            pending: The directory that all wrote into.
            target: Says where the checkpoint is to stand.
            retain: Called there once it is committed, before anybody is told.

        Raises:
            CommitError: A rank has failed, or the ranks do not hold one state; the same on all of them.
            SnapshotSkippedError: A rank took no part; likewise.
            RanksMissingError: Some did not vote in time.
            StorageError: There is one rank only, and it could not commit.
        """
        committed: list[Path] = []
        """On the coordinator, where the checkpoint stands: whatever fails after that does not take it back."""

        def decide(data: dict[int, bytes]) -> bytes:
            begin = time.monotonic()

            def target_in_time() -> Path:
                path = target()
                # the others wait for so long from where rank 0 began, and then believe that it has failed
                if self.ranks > 1 and (seconds := time.monotonic() - begin) > 0.8 * self._timeout:
                    raise CommitError(f"rank 0 needed {seconds:.3g} s to commit, and is given {self._timeout:.3g} s")
                return path

            votes = {rank: Vote.decode(vote) for rank, vote in data.items()}
            if text := _skipped(votes):
                return _SKIPPED + text.encode(errors="replace")
            committed.append(self._commit(votes, pending, target_in_time))
            retain()
            return _COMMITTED + str(committed[0]).encode("utf-8", "surrogateescape")

        try:
            done = self._world.agree(
                self._name, vote.encode(), decide, timeout=self._timeout, enough=lambda data: data[:1] == FAILED
            )
        except (CommitError, RanksMissingError, StorageError) as error:
            if self.rank == 0:
                if committed:
                    return committed[0]
                raise
            if not is_told(error):
                pending.files.clear()  # not this rank's to remove: the coordinator may yet commit them
            # it may also have gone, or its answer been lost, after it had committed
            if (path := directories.of_attempt(pending.target, pending.attempt)) is not None:
                return path
            raise
        if done[:1] == _SKIPPED:
            raise SnapshotSkippedError(done[1:].decode())
        return Path(done[1:].decode("utf-8", "surrogateescape"))

    def decline(self, error: BaseException) -> None:
        """Tell the others that this rank has failed; waits until they know. Never raises."""
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        text = text.encode(errors="replace").decode()  # a path in it need not be text
        vote = Vote(self.step, error=text, skipped=isinstance(error, SnapshotSkippedError))
        if self.ranks > 1:
            try:
                self._world.agree(
                    self._name, vote.encode(), _refuse, timeout=self._timeout, enough=lambda data: data[:1] == FAILED
                )
            except Exception:  # this rank's own error is what is told here
                return

    def _commit(self, votes: dict[int, Vote], pending: manifest.Pending, target: Callable[[], Path]) -> Path:
        _refuse_failed(votes)
        containers = tuple(
            manifest.ContainerEntry(file=v.file, rank=rank, nbytes=v.nbytes, index_crc32=v.index_crc32)
            for rank, v in sorted(votes.items())
        )
        made = manifest.Manifest(
            format=manifest.FORMAT_VERSION,
            step=self.step,
            sequence=self._sequence(),
            attempt=pending.attempt,
            created=manifest.now(),
            world_size=self.ranks,
            containers=containers,
            catalog=_write_catalog(votes, pending) if self.ranks > 1 else None,
        )
        return manifest.commit(pending, made, target)


def _refuse(data: dict[int, bytes]) -> bytes:
    votes = {rank: Vote.decode(vote) for rank, vote in data.items()}
    if text := _skipped(votes):
        return _SKIPPED + text.encode(errors="replace")
    _refuse_failed(votes)
    raise AssertionError("a rank that has failed says so")


def _skipped(votes: dict[int, Vote]) -> str:
    """Why ranks took no part, where none has failed; otherwise nothing."""
    failed = {rank: vote for rank, vote in votes.items() if vote.error}
    return _reasons(failed) if all(vote.skipped for vote in failed.values()) else ""


def _reasons(failed: dict[int, Vote]) -> str:
    return "; ".join(f"rank {rank}: {vote.error}" for rank, vote in sorted(failed.items()))


def _refuse_failed(votes: dict[int, Vote]) -> None:
    failed = {rank: vote for rank, vote in votes.items() if vote.error}
    if failed:
        raise CommitError(_reasons(failed))
    steps = {vote.step for vote in votes.values()}
    if len(steps) > 1:
        ranks = {step: [r for r, v in sorted(votes.items()) if v.step == step] for step in sorted(steps)}
        said = ", ".join(f"step {step} on {rank_names(who)}" for step, who in ranks.items())
        raise CommitError(f"the ranks took a snapshot of different steps: {said}")


def _write_catalog(votes: dict[int, Vote], pending: manifest.Pending) -> manifest.CatalogEntry:
    """Check that the ranks' containers are there and make one state, and write down which of them holds what."""
    paths = [pending.directory / vote.file for _, vote in sorted(votes.items())]
    for (rank, vote), path, found in zip(sorted(votes.items()), paths, directories.lengths(paths), strict=True):
        if found != vote.nbytes:
            what = "is missing" if found is None else f"has {found} bytes, not the {vote.nbytes} that it wrote"
            raise CommitError(f"the container of rank {rank} {what}: {path}")
    claims: list[Any] = [vote.claims for _, vote in sorted(votes.items())]
    nbytes = np.array([v.nbytes for _, v in sorted(votes.items())], np.uint64)
    index_crc = np.array([v.index_crc32 for _, v in sorted(votes.items())], np.uint32)
    try:
        if sum(c.cover for c in claims) % PRIME:
            raise CommitError("the ranks' parts do not make whole tensors")
        encoded, head_crc = catalog.encode_catalog(claims, nbytes, index_crc)
    except (CommitError, catalog.ConflictError):
        _refuse_conflict(votes, pending)
        raise
    files.write_file(pending.file(catalog.FILE), encoded)
    return manifest.CatalogEntry(file=catalog.FILE, nbytes=len(encoded), head_crc32=head_crc)


def _refuse_conflict(votes: dict[int, Vote], pending: manifest.Pending) -> None:
    """Name what is held twice or not at all; only then are all containers opened."""
    tables = {rank: open_container(pending.directory / v.file).index.shards for rank, v in votes.items()}
    if (text := describe_conflicts(tables)) is not None:
        raise CommitError(text)
