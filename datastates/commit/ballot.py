"""The commit of one checkpoint: every rank votes, the coordinator (rank 0) commits, all get the same answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from datastates._base.packing import pack, unpack
from datastates.commit import catalog, manifest
from datastates.commit.claims import PRIME, Claims, decode_claims, describe_conflicts, encode_claims
from datastates.commit.names import step_name
from datastates.commit.replicas import ReplicaDigests, refuse_difference
from datastates.commit.run import Run, explain, is_full, refuse_short_memory
from datastates.commit.tier import Uncommitted
from datastates.container.file import open_container
from datastates.container.table import ShardTable
from datastates.errors import (
    CommitError,
    FencedError,
    RanksMissingError,
    SnapshotSkippedError,
    StorageError,
    UncertainError,
    rank_names,
    said,
)
from datastates.ranks.board_world import DONE, FAILED
from datastates.ranks.world import World, is_told
from datastates.storage import store_of
from datastates.storage.location import Location
from datastates.storage.objects import ABSENT


@dataclass(frozen=True, slots=True, eq=False)
class Vote:
    """One rank's message to the coordinator: its container is on stable storage, or the rank has failed.

    Attributes:
        step: The step of the snapshot.
        error: Why the rank has failed; empty if it has not.
        skipped: True if the rank took no part because it had failed at an earlier snapshot: see
            :class:`~datastates.errors.SnapshotSkippedError`.
        file: File name of the container.
        nbytes: Length of the container, in bytes.
        index_crc32: CRC-32 of the container's index.
        claims: The arrays and objects in the container; None in a world of one rank.
        replicas: The digests of the arrays that other ranks hold, too; None if there are none.
    """

    step: int
    error: str = ""
    skipped: bool = False
    file: str = ""
    nbytes: int = 0
    index_crc32: int = 0
    claims: Claims | None = None
    replicas: ReplicaDigests | None = None

    def encode(self) -> bytes:
        """The vote as bytes. The first byte says whether the rank has failed."""
        claims = None if self.claims is None else encode_claims(self.claims)
        replicas = None if self.replicas is None else self.replicas.encode()
        fields = [self.step, self.error, self.skipped, self.file, self.nbytes, self.index_crc32, claims, replicas]
        return (FAILED if self.error else DONE) + pack(fields)

    @classmethod
    def decode(cls, data: bytes) -> Vote:
        """The inverse of :meth:`encode`."""
        step, error, skipped, file, nbytes, crc, claims, replicas = unpack(data[1:])
        return cls(
            *(step, error, skipped, file, nbytes, crc),
            claims=None if claims is None else decode_claims(claims),
            replicas=None if replicas is None else ReplicaDigests.decode(replicas),
        )


COMMITTED, SKIPPED, UNCERTAIN = b"c", b"s", b"u"  # the first byte of an answer


class Ballot:
    """One rank's part in one checkpoint, which all ranks commit together: an :class:`~datastates.commit.ending.Ending`.

    Use it from one thread at a time.

    Attributes:
        step: The step of the checkpoint.
        metric: How good the checkpoint is: a finite number, None without one. It can be given until the commit, and
            that of the coordinator counts.
    """

    def __init__(
        self,
        world: World,
        name: str,
        run: Run,
        *,
        step: int = -1,
        target: Location | None = None,
        number: int = 0,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare a ballot; nothing is made yet, and nobody is told.

        Args:
            world: The ranks.
            name: The name of the ballot: the same on all ranks, and used once in a run.
            run: The run that the checkpoint belongs to.
            step: The step of the checkpoint. It can be given later, before :meth:`open`.
            target: The path of the checkpoint; None: the run's tier has it under its step.
            number: The number of the checkpoint in its run.
            ready: Called before the checkpoint gets its sequence number, on the coordinator.
        """
        self.world = world
        self.step = step
        self.metric: float | None = None
        self.identity: dict[str, int | str] = {}
        self.committed: float | None = None
        self._name = name
        self._run = run
        self._target = target
        self._number = number
        self._ready = ready
        self._attempt = world.token(name) if world.size > 1 else None
        self._pending: Uncommitted | None = None
        self._voted = False
        self.path = self.target

    @property
    def target(self) -> Location:
        """The path that the checkpoint gets, unless it becomes a revision."""
        return self._target or self._run.tier.root / step_name(self.step)

    def open(self, nbytes: int) -> None:
        """Begin the checkpoint. Its container here will have about ``nbytes`` bytes.

        Raises:
            FencedError: A newer run has begun to save in the directory.
            StorageError: Rank 0 cannot write down that this run saves there, or the place of the files is not made. Or
                it is in memory, and too little is free.
        """
        run = self._run
        run.begin()
        refuse_short_memory(run.tier, nbytes)
        mark = None if run.opening is None else run.opening.mark
        self._pending = pending = run.tier.pending(self.target, self._attempt, mark)
        self.path = pending.file(manifest.container_name(self.world.rank))
        world = {"rank": self.world.rank, "world_size": self.world.size}
        self.identity = {"step": self.step, **world, "attempt": pending.attempt}
        pending.begin()

    def commit(self, vote: Vote) -> Location:
        """Vote and wait for the outcome; returns the path of the committed checkpoint.

        Raises:
            CommitError: A rank has failed, or the ranks' parts do not make one state, or a newer run has begun to save
                in the directory. Same text on all ranks.
            SnapshotSkippedError: A rank took no part, and none has failed. Same text on all ranks.
            UncertainError: The store did not tell whether it is committed. Same text on all ranks.
            RanksMissingError: Some ranks did not vote in time.
            StorageError: The only rank could not commit, or the directory where the ranks meet failed.
        """
        pending = self._pending
        assert pending is not None
        pending.seal()
        self._voted = True
        path = self._cast(vote, pending)
        pending.close()
        self._run.committed(path, (self.step, pending.attempt))
        return path

    def _cast(self, vote: Vote, pending: Uncommitted) -> Location:
        committed: list[Location] = []
        """On the coordinator, the path of the committed checkpoint. No later failure undoes the commit."""

        def decide(data: dict[int, bytes]) -> bytes:
            begin = time.monotonic()

            def refuse_late() -> None:
                # once rank 0 has begun to decide, the others wait at least `timeout` for its answer, then give up
                timeout = self.world.timeout
                if (seconds := time.monotonic() - begin) > 0.8 * timeout:
                    raise CommitError(f"rank 0 needed {seconds:.3g} s to commit, and is given {timeout:.3g} s")
                if self._run.opening is not None:
                    self._run.opening.refuse_if_fenced()

            votes = decoded(data)
            if answer := declined(votes):
                return answer
            with self._run.tier.listed_once():
                try:
                    committed.append(self._commit(votes, pending, refuse_late))
                except UncertainError as error:
                    return UNCERTAIN + said(error).encode(errors="replace")
                self.committed = time.monotonic()
                self._run.retain()
            return COMMITTED + committed[0].encode()

        try:
            done = self.world.agree(self._name, vote.encode(), decide)
        except (CommitError, RanksMissingError, StorageError) as error:
            if self.world.rank == 0:
                if committed:
                    return committed[0]
                raise
            if not is_told(error):
                pending.leave()
            # the coordinator may have committed, and then ended, or its answer was lost
            if (path := self._run.tier.of_attempt(pending.target, pending.attempt)) is not None:
                return path
            raise
        if done[:1] == UNCERTAIN:
            pending.leave()
            raise UncertainError(0, "commit", str(pending.target), done[1:].decode())
        if done[:1] == SKIPPED:
            raise SnapshotSkippedError(done[1:].decode())
        return Location.decode(done[1:])

    def abandon(self, *, made: bool) -> None:
        """Remove the files of this process."""
        del made
        if self._pending is not None:
            self._pending.abandon()

    def cause_of(self, error: BaseException, needed: int) -> BaseException:
        """The cause of an error, if it is known. A file of ``needed`` bytes was to be written.

        FencedError where a newer run has begun to save in the directory; StorageError where the directory is not the
        one that was opened; else ``error``.
        """
        if self._run.opening is not None and isinstance(error, CommitError | StorageError):
            try:
                self._run.opening.refuse_if_fenced()
            except FencedError as fenced:
                fenced.__cause__ = error
                return fenced
            except StorageError as elsewhere:
                # no file is found where a mount is lost; else the first error tells more
                if isinstance(error, StorageError) and {error.errno, elsewhere.errno} <= set(ABSENT):
                    elsewhere.__cause__ = error
                    return elsewhere
        if is_full(error):
            explain(error, needed, self._run.tier.root, self._run.make_room())
        return error

    def decline(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed, and wait until they were told. Never raises.

        Does nothing once this rank has voted.
        """
        if self._voted or self.world.size == 1:
            return
        kind, text = type(error).__name__, said(error)
        text = f"{kind}: {text}" if text else kind
        text = text.encode(errors="replace").decode()  # a path in it may have bytes that are no text
        vote = Vote(self.step, error=text, skipped=isinstance(error, SnapshotSkippedError))
        with contextlib.suppress(Exception):  # the caller reports this rank's own error
            self.world.agree(self._name, vote.encode(), lambda data: declined(decoded(data)))

    def _commit(self, votes: dict[int, Vote], pending: Uncommitted, ready: Callable[[], None]) -> Location:
        written = _write_catalog(votes, pending) if self.world.size > 1 else None
        with self._numbered(votes, pending, written) as made:
            return pending.commit(made, ready)

    @contextlib.contextmanager
    def _numbered(
        self, votes: dict[int, Vote], pending: Uncommitted, written: manifest.CatalogEntry | None
    ) -> Iterator[manifest.Manifest]:
        """Yield the manifest of the checkpoint, with its sequence number. It is committed within the block."""
        containers = tuple(
            manifest.ContainerEntry(file=v.file, rank=rank, nbytes=v.nbytes, index_crc32=v.index_crc32)
            for rank, v in votes.items()
        )
        with self._run.order.sequence(self._number, self._ready) as sequence:
            yield manifest.Manifest(
                format=manifest.FORMAT_VERSION,
                step=self.step,
                sequence=sequence,
                attempt=pending.attempt,
                created=manifest.now(),
                metric=self.metric,
                world_size=self.world.size,
                containers=containers,
                catalog=written,
            )


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


def _write_catalog(votes: dict[int, Vote], pending: Uncommitted) -> manifest.CatalogEntry:
    """Check that all containers exist and together make one state; then write the catalog."""
    paths = [pending.path(vote.file) for vote in votes.values()]
    for (rank, vote), path, found in zip(votes.items(), paths, store_of(paths[0]).lengths(paths), strict=True):
        if found != vote.nbytes:
            what = "is missing" if found is None else f"has {found} bytes, not the {vote.nbytes} that it wrote"
            raise CommitError(f"the container of rank {rank} {what}: {path}")
    encoded, head_crc = made_catalog(votes, lambda rank: _table_of(votes[rank], pending))
    made = pending.add(catalog.FILE, encoded)
    return manifest.CatalogEntry(file=made.name, nbytes=len(encoded), head_crc32=head_crc)


def made_catalog(votes: dict[int, Vote], table_of: Callable[[int], ShardTable]) -> tuple[bytes, int]:
    """Check that the containers together make one state; returns the catalog and the CRC-32 of its head.

    ``table_of`` gives the shard table of a rank's container, where they do not.
    """
    claims: list[Any] = [vote.claims for vote in votes.values()]
    nbytes = np.array([vote.nbytes for vote in votes.values()], np.uint64)
    index_crc = np.array([vote.index_crc32 for vote in votes.values()], np.uint32)
    try:
        if sum(c.cover for c in claims) % PRIME:
            raise CommitError("the ranks' parts do not make whole tensors")
        encoded, head_crc = catalog.encode_catalog(claims, nbytes, index_crc)
    except (CommitError, catalog.ConflictError):
        _refuse_conflict({rank: table_of(rank) for rank in votes})
        raise
    replicas = [vote.replicas for vote in votes.values()]
    refuse_difference(list(votes), claims, replicas, table_of)
    return encoded, head_crc


def _refuse_conflict(tables: dict[int, ShardTable]) -> None:
    """Raise CommitError that names tensors held twice or not at all."""
    if (text := describe_conflicts(tables)) is not None:
        raise CommitError(text)


def _table_of(vote: Vote, pending: Uncommitted) -> ShardTable:
    return open_container(pending.path(vote.file)).index.shards
