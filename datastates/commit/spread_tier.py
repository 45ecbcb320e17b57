"""The tier of directories that each host has for itself: a checkpoint is there if each part of it is in one of them.

Each directory has the whole manifest and catalog of a checkpoint, and the containers of its own ranks. What the
directories hold is told when the tier is opened, and kept up by what is committed and deleted since.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from typing_extensions import override

from datastates._base import log
from datastates._base.packing import pack
from datastates.commit import catalog, manifest
from datastates.commit.carry import MakeLink
from datastates.commit.directory_tier import DirectoryTier
from datastates.commit.gathering import Gathering, elsewhere
from datastates.commit.hosts import Hosts
from datastates.commit.names import STEP, Identity, as_debris, final_of, nowhere, step_name
from datastates.commit.pending import Pending
from datastates.commit.retention import warning
from datastates.commit.stock import Known
from datastates.commit.tier import Committed
from datastates.errors import (
    CheckpointNotFoundError,
    CommitError,
    DatastatesError,
    FormatError,
    rank_names,
    said,
)
from datastates.storage import folders_of, store_of
from datastates.storage.location import Location


class SpreadTier(DirectoryTier):
    """The checkpoints that several directories hold together, as the ranks of one of these see them.

    Attributes:
        hosts: The ranks of each directory.
        highest: The highest sequence number that any directory had when the tier was opened.
    """

    def __init__(self, root: Location, hosts: Hosts, link: MakeLink | None = None) -> None:
        """Take this rank's directory; nothing is read yet. ``link`` makes links between ranks, where that can be."""
        super().__init__(root)
        self.hosts, self.leader = hosts, hosts.leader
        self.whole: set[Location] = set()
        self._link = link
        self._known: dict[Identity, Known] = {}
        self._deleted: deque[Identity] = deque()

    # --- reading

    @override
    def checkpoints(self, *, certain: bool = False, known: bool = False) -> list[Committed]:
        """As :meth:`Tier.checkpoints`: what all directories have together.

        Who deletes asks for ``certain``, and gets what is not whole, too.
        """
        every = self._known.copy()
        here = super().checkpoints(certain=certain, known=known)
        whole = {i for i, one in every.items() if one.is_whole}
        self.whole = {one.path for one in here if _identity(one) in whole}
        listed = [one for one in here if certain or one.path in self.whole]
        absent = every.keys() - {_identity(one) for one in here}
        listed += [
            Committed(every[i].sequence, i[0], 0, i[1], self.root / f"{step_name(i[0])}.{i[1]}", 0, every[i].metric)
            for i in (absent if certain else absent & whole)
        ]
        return sorted(listed, key=lambda one: one.path)

    @override
    def holds(self, path: Location) -> list[int]:
        opened, there = manifest.open(path), store_of(path).entries(path)
        nbytes = {name: entry.nbytes for name, entry in there.items()}
        if opened.catalog is not None and nbytes.get(opened.catalog.file) != opened.catalog.nbytes:
            return []
        lacking = {one.rank for one in opened.containers if nbytes.get(one.file) != one.nbytes}
        return [rank for rank in range(opened.world_size) if rank not in lacking]

    @override
    def sends(self, path: Location) -> list[int]:
        opened = manifest.open(path)
        known = self._known.get((opened.step, opened.attempt))
        holders = {} if known is None else known.holders
        return [rank for rank in super().sends(path) if self._sender(rank, holders.get(rank, ())) == self.leader]

    def _sender(self, rank: int, holders: Sequence[int]) -> int:
        """The leader of the directory that a container is brought on from: that of its rank, if it is there."""
        own = self.hosts.leaders[rank] if rank < len(self.hosts.leaders) else -1
        return own if own in holders else holders[0] if holders else self.leader

    @override
    def lies_here(self, path: Location) -> bool:
        return nowhere(path) is None

    @override
    def here(self, path: Location, step: int, attempt: str) -> Location:
        return next((one.path for one in self.checkpoints() if _identity(one) == (step, attempt)), path)

    @override
    @contextlib.contextmanager
    def protect(self, path: Location) -> Iterator[None]:
        if identity := nowhere(path):
            leaders = {leader for leaders in self._known[identity].holders.values() for leader in leaders}
            raise CheckpointNotFoundError(elsewhere(f"step {identity[0]}", self.hosts, leaders))
        with super().protect(path):
            yield

    @property
    def has_links(self) -> bool:
        """Whether containers can be brought from other hosts."""
        return self._link is not None

    @override
    def gathering(self) -> Gathering:
        return Gathering(self.root, self.hosts, self._known, self._link)

    # --- opening

    def inventory(self) -> bytes:
        """What this directory holds: the parts of committed checkpoints, and interrupted attempts."""
        held = []
        for one in super().checkpoints(certain=True):
            try:
                ranks = manifest.open(one.path).world_size
                held.append([*_identity(one), one.sequence, one.metric, ranks, self.holds(one.path)])
            except (CheckpointNotFoundError, FormatError) as error:
                log.warning("%s is passed over: %s", one.path, error)
        return pack([held, [_attempt(path) for path in self.debris()]])

    def take_stock(self, every: Mapping[Identity, Known]) -> None:
        """Take over what all directories hold."""
        for (step, attempt), known in sorted(every.items(), key=lambda one: -one[1].sequence):
            self.highest = max(self.highest, known.sequence)
            self._known[step, attempt] = known
            if self.hosts.rank == 0 and not any(one.is_whole for one in self._known.values()):
                lost = rank_names([rank for rank in range(known.ranks) if rank not in known.holders])
                places = self.hosts.named(set(self.hosts.leaders))
                log.warning("step %d is passed over: what %s wrote of it is in none of %s", step, lost, places)

    def files_of(self, wanted: Iterable[Identity]) -> list[tuple[Identity, bytes, bytes]]:
        """Manifest and catalog of checkpoints that are committed here."""
        own = {_identity(one): one.path for one in super().checkpoints()}
        found = []
        for identity in wanted:
            path, store = own[identity], store_of(own[identity])
            found.append((identity, store.read_all(path / manifest.FILE), store.read_all(path / catalog.FILE)))
        return found

    def roll_forward(self, files: Iterable[tuple[Identity, bytes, bytes]], mark: bytes) -> None:
        """Commit here what is committed in another directory, by its manifest and catalog, with what is here of it.

        A directory that has nothing gets a place for what a restore needs.
        """
        committed, begun = {*map(_identity, super().checkpoints())}, {*map(_attempt, self.debris())}
        for identity, made, encoded in files:
            if identity in committed:
                continue
            pending = self.pending(self.root / step_name(identity[0]), identity[1], mark)
            if identity in begun:
                log.warning("%s was committed on another host, and is completed", pending.directory)
            try:
                pending.begin()
                for name in (manifest.FILE, catalog.FILE):
                    folders_of(self.root).remove(pending.path(name), missing_ok=True)  # it may be cut short
                self.publish(pending, made, encoded)
            except DatastatesError as error:  # it stays as it is, and the checkpoint is passed over
                log.warning("%s could not be completed: %s", pending.directory, said(error))
            finally:
                pending.close()

    # --- writing

    def publish(
        self,
        pending: Pending,
        made: bytes,
        encoded: bytes,
        ranks: Iterable[int] = (),
        ready: Callable[[], None] = lambda: None,
    ) -> Location:
        """Commit this directory's part of a checkpoint; returns its path. Errors are as for :meth:`Uncommitted.commit`.

        Args:
            pending: The attempt. The containers in it are synced.
            made: The manifest.
            encoded: The catalog.
            ranks: The ranks whose containers must be in it.
            ready: Called when nothing but the name is left to do. What it raises stops the commit.
        """
        opened = manifest.decode(made, str(pending.path(manifest.FILE)))
        there = store_of(pending.directory).entries(pending.directory)
        own = [one for one in opened.containers if one.file in there or one.rank in ranks]
        if lost := {one.rank for one in own if one.file not in there or there[one.file].nbytes != one.nbytes}:
            raise CommitError(f"the container of rank {min(lost)} in {pending.directory} is not as it was written")
        pending.add(catalog.FILE, encoded)
        pending.add(manifest.FILE, made)
        return pending.publish([one.file for one in own], ready)

    def note(self, made: bytes) -> None:
        """Take note of a checkpoint that every directory has committed, by its manifest."""
        one = manifest.decode(made, manifest.FILE)
        assert one.sequence is not None
        holders = {rank: [leader] for rank, leader in enumerate(self.hosts.leaders)}
        self._known[one.step, one.attempt] = Known(one.sequence, one.metric, one.world_size, holders)

    def note_copies(self, identity: Identity, receivers: Mapping[int, int]) -> None:
        """Take note of copies on other hosts: by the rank that wrote a container, a rank that has received it."""
        if (known := self._known.get(identity)) is not None:
            for rank, receiver in receivers.items():
                known.add(rank, self.hosts.leaders[rank])
                known.add(rank, self.hosts.leaders[receiver])

    def is_copied(self, identity: Identity) -> bool:
        """Whether each container of a checkpoint is on two machines at least."""
        return (known := self._known.get(identity)) is not None and known.is_copied(self.hosts)

    def spoil(self, pending: Pending) -> bool:
        """See to it that nobody can complete an attempt: its part here goes. Returns whether that is certain."""
        store = folders_of(self.root)
        try:
            if (path := self.of_attempt(pending.target, pending.attempt)) is not None:
                return super().remove(path)
            if store.exists(pending.directory):
                store.rename(pending.directory, left := as_debris(pending.target))
                store.sync_folder(self.root)
                store.remove_tree(left, tolerant=True)
        except DatastatesError as error:
            log.warning("an attempt to save %s could not be undone: %s", pending.target, said(error))
            return False
        return True

    # --- deleting

    @override
    def remove(self, path: Location) -> bool:
        """As :meth:`Tier.remove`, on rank 0: it decides, and the others are told by :meth:`deleted`."""
        if self.hosts.rank:
            return False
        identity = nowhere(path)
        if identity is None:
            with contextlib.suppress(CheckpointNotFoundError, FormatError):
                identity = (opened := manifest.open(path)).step, opened.attempt
            if not super().remove(path):
                return False
        if identity is not None:
            self._known.pop(identity, None)
            self._deleted.append(identity)
        return True

    def deleted(self) -> list[Identity]:
        """On rank 0, what :meth:`remove` has deleted since the last call."""
        return [self._deleted.popleft() for _ in range(len(self._deleted))]

    def forget(self, deleted: Iterable[Identity]) -> None:
        """Delete what rank 0 has deleted. What cannot be deleted counts as damaged from the next opening on."""
        gone = {(step, attempt) for step, attempt in deleted}
        for identity in gone:
            self._known.pop(identity, None)
        for one in super().checkpoints(known=True) if gone and self.hosts.rank == self.leader else ():
            if _identity(one) in gone:
                with warning():
                    super().remove(one.path)


def _identity(one: Committed) -> Identity:
    return one.step, one.attempt


def _attempt(partial: Location) -> Identity:
    match = STEP.match(final_of(partial.name))
    assert match is not None
    return int(match[1]), partial.name[-8:]
