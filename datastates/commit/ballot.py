"""The commit of one checkpoint: every rank votes, the coordinator (rank 0) commits, all get the same answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from datastates.commit import catalog, manifest
from datastates.commit.names import step_name
from datastates.commit.run import Run, explain, is_full, refuse_short_memory
from datastates.commit.tier import Uncommitted
from datastates.commit.votes import SKIPPED, Vote, by_number, declined, decoded, made_catalog
from datastates.container.file import open_container
from datastates.errors import (
    CommitError,
    FencedError,
    RanksMissingError,
    SnapshotSkippedError,
    StorageError,
    UncertainError,
    said,
)
from datastates.ranks.world import World, is_told
from datastates.storage import store_of
from datastates.storage.location import Location
from datastates.storage.objects import ABSENT

COMMITTED, UNCERTAIN = b"c", b"u"  # the first byte of an answer


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
        self.needs(nbytes)
        mark = None if run.opening is None else run.opening.mark
        self._pending = pending = run.tier.pending(self.target, self._attempt, mark)
        self.path = pending.file(manifest.container_name(self.world.rank))
        world = {"rank": self.world.rank, "world_size": self.world.size}
        self.identity = {"step": self.step, **world, "attempt": pending.attempt}
        pending.begin()

    def needs(self, nbytes: int) -> None:
        """Raise StorageError if so many bytes are to be written into memory, and too little is free."""
        refuse_short_memory(self._run.tier, nbytes)

    def kept(self) -> Location:
        """The path for a new kept container. Known once it is open."""
        assert self._pending is not None
        return self._pending.kept(manifest.kept_name(self.world.rank), self.step, self._pending.attempt)

    def link(self, kept: Location) -> Location | None:
        """As :meth:`Uncommitted.link`."""
        assert self._pending is not None
        return self._pending.link(kept)

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
        several = sum(len(vote.files) for vote in votes.values()) > 1
        written = _write_catalog(votes, pending) if several else None
        with self._numbered(votes, pending, written) as made:
            return pending.commit(made, ready)

    @contextlib.contextmanager
    def _numbered(
        self, votes: dict[int, Vote], pending: Uncommitted, written: manifest.CatalogEntry | None
    ) -> Iterator[manifest.Manifest]:
        """Yield the manifest of the checkpoint, with its sequence number. It is committed within the block."""
        numbered = by_number(votes)
        with self._run.order.sequence(self._number, self._ready) as sequence:
            yield manifest.Manifest(
                format=manifest.WITH_KEPT if len(numbered) > self.world.size else manifest.FORMAT_VERSION,
                step=self.step,
                sequence=sequence,
                attempt=pending.attempt,
                created=manifest.now(),
                metric=self.metric,
                world_size=self.world.size,
                containers=tuple(file.entry(rank) for rank, file in numbered.values()),
                catalog=written,
            )


def _write_catalog(votes: dict[int, Vote], pending: Uncommitted) -> manifest.CatalogEntry:
    """Check that all containers exist and together make one state; then write the catalog."""
    every = by_number(votes).values()
    paths = [file.within(pending.directory) for _, file in every]
    for (rank, file), path, found in zip(every, paths, store_of(paths[0]).lengths(paths), strict=True):
        if found != file.nbytes:
            what = "is missing" if found is None else f"has {found} bytes, not the {file.nbytes} that it wrote"
            raise CommitError(f"the container of rank {rank} {what}: {path}")
    encoded, head_crc = made_catalog(votes, lambda file: open_container(file.within(pending.directory)).index.shards)
    made = pending.add(catalog.FILE, encoded)
    return manifest.CatalogEntry(file=made.name, nbytes=len(encoded), head_crc32=head_crc)
