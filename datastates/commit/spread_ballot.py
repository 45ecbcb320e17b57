"""The commit of one checkpoint whose parts lie on several hosts, in two phases.

1. Every rank votes once its container is on stable storage, and rank 0 answers with manifest and catalog.
2. In each directory one rank writes both and renames the folder. Rank 0 reports the commit once all have done so.

A directory that fails in the second phase removes its part first, so that nobody can complete the checkpoint; then the
others undo theirs. Where a rank does not answer, nobody can tell: the part there may be completed when it is opened.
"""

from __future__ import annotations

import time
from typing import NoReturn

from typing_extensions import override

from datastates._base import log
from datastates._base.packing import pack, unpack
from datastates.commit import catalog, manifest
from datastates.commit.ballot import COMMITTED, UNCERTAIN, Ballot
from datastates.commit.pending import Pending
from datastates.commit.spread_tier import SpreadTier
from datastates.commit.tier import Uncommitted
from datastates.commit.votes import SKIPPED, File, Vote, declined, decoded, made_catalog
from datastates.container.table import ShardTable
from datastates.errors import CommitError, RanksMissingError, SnapshotSkippedError, StorageError, UncertainError
from datastates.ranks.board_world import DONE, FAILED, text_of
from datastates.ranks.world import is_told
from datastates.storage.location import Location

_PREPARED, _UNDONE = b"p", b"f"
"""As the first bytes of other answers."""


class SpreadBallot(Ballot):
    """One rank's part in a checkpoint of a :class:`SpreadTier`."""

    @override
    def _cast(self, vote: Vote, pending: Uncommitted) -> Location:
        tier = self._run.tier
        assert isinstance(tier, SpreadTier)
        assert isinstance(pending, Pending)

        def prepare(data: dict[int, bytes]) -> bytes:
            votes = decoded(data)
            if answer := declined(votes):
                return answer
            if self._number == 0 and not tier.has_links and _is_shared(votes, tier.hosts.leaders):
                log.warning(
                    "per_host: ranks of several hosts hold some arrays alike, and one of them writes each. The other "
                    "hosts restore them from tiers= only"
                )
            encoded, head_crc = made_catalog(votes, _refuse_to_look)
            entry = manifest.CatalogEntry(file=catalog.FILE, nbytes=len(encoded), head_crc32=head_crc)
            with self._numbered(votes, pending, entry) as made:
                return _PREPARED + pack([manifest.encode(made), encoded])

        try:
            told = self.world.agree(self._name, vote.encode(), prepare)
        except (CommitError, RanksMissingError, StorageError) as error:
            if self.world.rank and not is_told(error):
                pending.leave()  # others may have committed theirs
            raise
        if told[:1] == SKIPPED:
            raise SnapshotSkippedError(told[1:].decode())
        return self._publish(tier, pending, *unpack(told[1:]))

    def _publish(self, tier: SpreadTier, pending: Pending, made: bytes, encoded: bytes) -> Location:
        """The second phase."""
        ready = (lambda: None) if self._run.opening is None else self._run.opening.refuse_if_fenced
        said, path, failure = DONE, None, None
        if self.world.rank == tier.leader:
            try:
                path = tier.publish(pending, made, encoded, tier.hosts.group, ready)
            except Exception as error:
                failure = error
                said = FAILED + pack([tier.spoil(pending), text_of(error)])

        def conclude(data: dict[int, bytes]) -> bytes:
            failed = {rank: unpack(one[1:]) for rank, one in sorted(data.items()) if one[:1] == FAILED}
            if failed:
                # without one part, all others are worth nothing
                kind = _UNDONE if any(is_undone for is_undone, _ in failed.values()) else UNCERTAIN
                return kind + "; ".join(f"rank {rank}: {text}" for rank, (_, text) in failed.items()).encode()
            self.committed = time.monotonic()
            tier.note(made)
            self._run.retain()
            return COMMITTED + pack(tier.deleted())

        try:
            told = self.world.agree(f"{self._name}/renamed", said, conclude)
        except (CommitError, RanksMissingError, StorageError) as error:
            if self.committed is None:
                self._raise_uncertain(pending, str(error), error)
            told = COMMITTED + pack([])
        if told[:1] == UNCERTAIN:
            self._raise_uncertain(pending, told[1:].decode(), failure)
        if told[:1] == _UNDONE:
            if path is not None:
                tier.spoil(pending)
            raise failure or CommitError(told[1:].decode())
        if self.world.rank:
            tier.note(made)
            tier.forget(unpack(told[1:]))
            self._run.is_full = False
        return path or tier.of_attempt(pending.target, pending.attempt) or pending.target

    def _raise_uncertain(self, pending: Pending, why: str, cause: Exception | None) -> NoReturn:
        pending.leave()
        text = f"it is not known whether every host has committed its part, and the next run may complete it: {why}"
        raise UncertainError(0, "commit", str(pending.target), text) from cause


def _is_shared(votes: dict[int, Vote], leaders: list[int]) -> bool:
    """Whether ranks of several groups hold a part of an array alike, so that only one group has it in its files."""
    held: dict[int, set[tuple[int, int]]] = {}
    for rank, vote in votes.items():
        if vote.replicas is not None and (claims := vote.files[0].claims) is not None:
            keys = claims.key[vote.replicas.row].tolist()
            held.setdefault(leaders[rank], set()).update(zip(keys, vote.replicas.begin.tolist(), strict=True))
    return len(set().union(*held.values())) < sum(map(len, held.values()))


def _refuse_to_look(file: File) -> ShardTable:
    del file
    raise CommitError(
        "the ranks' parts do not make one state. Their files are on several hosts: Checkpointer.check() names the keys"
    )
