"""Keeps a copy of each rank's container on another host, in the background: a lost host then loses nothing.

The ranks copy one checkpoint after the other, in the order of the snapshots, and agree twice for each. Before, rank 0
says whether to copy it: there may be a newer one by now. After, it tells which copies have come. Containers go from
rank to rank.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from datastates._base import log
from datastates._base.packing import pack, unpack
from datastates._base.tasks import Task
from datastates._base.waiting import Bell
from datastates._base.workers import Workers
from datastates.commit import manifest
from datastates.commit.carry import SILENCE, MakeLink, adopted, receive, send
from datastates.commit.manifest import named_of
from datastates.commit.names import Identity
from datastates.commit.newest import in_order
from datastates.commit.partners import partners
from datastates.commit.run import Run, refuse_short_memory
from datastates.commit.spread_tier import SpreadTier
from datastates.commit.tier import Committed
from datastates.draining.pace import Pace
from datastates.errors import ClosedError, ThreadStartError, UnreachableError, rank_names, said
from datastates.ranks.board_world import DONE
from datastates.ranks.link import Link
from datastates.ranks.world import World
from datastates.storage.location import Location

_GO, _SKIP = b"g", b"s"
_LINKS = 2
"""Links that are made at most for one container."""


class Peers:
    """The copies that the ranks of a run keep for each other. Thread-safe."""

    def __init__(self, tier: SpreadTier, run: Run, world: World, link: MakeLink, is_busy: Callable[[], bool]) -> None:
        """Prepare; nothing is sent yet.

        Args:
            tier: The place of the checkpoints.
            run: The saves there.
            world: The ranks.
            link: Makes links between ranks.
            is_busy: Whether a snapshot is in flight.
        """
        self._tier, self._run, self._world, self._link = tier, run, world, link
        self._every = partners(tier.hosts)
        self._senders = [sender for sender, receiver in self._every.items() if receiver == world.rank]
        self._attempts: dict[Location, Identity] = {}  # what is committed and has not come to its turn
        self._copied: dict[Location, Identity] = {}
        self._links: dict[tuple[int, int], Link] = {}  # by sender and receiver
        self._thread = Workers("datastates-peers", 1)
        self._copying = Workers("datastates-copies", 1 + len(self._senders))
        self._bell = Bell()
        self._due: list[str] = []
        self._closing, self._failure = False, ""
        self._pace = Pace(is_busy, self._bell, lambda: self._closing)
        _every.add(self)
        if not self._every and world.rank == 0:
            log.warning("peers: no copies are kept, as all ranks are on one host, %s", tier.hosts.places[0])

    # --- for the run

    def note(self, path: Location, identity: Identity) -> None:
        """Note the identity of a checkpoint that is committed, before :meth:`add`."""
        if self._every:
            self._attempts[path] = identity

    def add(self, path: Location) -> None:
        """Copy a committed checkpoint. Call it in the order of the snapshots, which is the same on all ranks."""
        if (identity := self._attempts.get(path)) is not None:
            self._put(path, identity, f"peers/{identity[1]}", self._run.delete)
            self._attempts.pop(path)
            self._bell.ring()

    def add_restored(self, path: Location, name: str) -> None:
        """Copy a checkpoint that all ranks have restored, unless it has its copies.

        ``name`` is the same on all ranks, and used once in a run.
        """
        if self._every and path.parent == self._tier.root:
            opened = manifest.open(path)
            if not self._tier.is_copied(identity := (opened.step, opened.attempt)):
                self._put(path, identity, f"{name}/peers", lambda: None)  # who only reads deletes nothing

    def _put(self, path: Location, identity: Identity, name: str, free: Callable[[], None]) -> None:
        self._due.append(name)
        try:
            self._thread.do(partial(self._copy, path, identity, name, free))
        except (ThreadStartError, ClosedError) as error:  # the checkpoint is committed all the same
            self._due.remove(name)
            self._failed(identity, said(error))

    def has(self, path: Location) -> bool:
        """Whether each container of a checkpoint of this run has come to another host."""
        return path in self._copied

    def stay(self, every: Sequence[Committed]) -> list[Location]:
        """The newest checkpoint that is copied: it stays until a newer one is."""
        copied = [one for one in every if self._tier.is_copied((one.step, one.attempt))] if self._every else []
        return [one.path for one in in_order(copied)[-1:]]

    def wait(self, timeout: float | None = None) -> str:
        """Wait until nothing is to be copied; after ``timeout`` seconds, or if a copy has failed, says so."""
        if not self._bell.wait_for(lambda: not (self._attempts or self._due), timeout):
            return "peers"
        return f"peers: {self._failure}" if self._failure else ""

    def close(self) -> None:
        """Copy what is due, and end. Can be repeated."""
        self._closing = True
        self._bell.ring()
        self._bell.wait_for(lambda: not self._attempts, self._world.timeout)
        for threads in (self._thread, self._copying):
            threads.stop()
            threads.join()
        while self._links:
            self._links.popitem()[1].close()

    # --- on the thread

    def _copy(self, path: Location, identity: Identity, name: str, free: Callable[[], None]) -> None:
        try:
            if self._world.agree(name, DONE, lambda _: _SKIP if len(self._due) > 1 else _GO) == _GO:
                self._copy_now(path, identity, name, free)
        except BaseException as error:  # the thread has more to do
            self._failed(identity, said(error) or type(error).__name__)
        finally:
            self._due.remove(name)
            self._bell.ring()

    def _copy_now(self, path: Location, identity: Identity, name: str, free: Callable[[], None]) -> None:
        came, failure = self._exchange(path, self._world.token(name))

        def conclude(told: dict[int, bytes]) -> bytes:
            given = {rank: unpack(data[1:]) for rank, data in sorted(told.items())}
            receivers = {sender: rank for rank, (senders, _) in given.items() for sender in senders}
            self._tier.note_copies(identity, receivers)
            if len(receivers) == len(self._every):
                free()
            texts = [f"rank {rank}: {text}" for rank, (_, text) in given.items() if text]
            return pack([[*receivers.items()], texts, self._tier.deleted()])

        told = self._world.agree(f"{name}/copied", DONE + pack([came, failure]), conclude)
        pairs, texts, deleted = unpack(told)
        if self._world.rank:
            self._tier.note_copies(identity, dict(pairs))
            self._tier.forget(deleted)
        lost = sorted(self._every.keys() - dict(pairs).keys())
        self._failure = f"what {rank_names(lost)} wrote of step {identity[0]} is on one host only" if lost else ""
        if not lost:
            self._copied = {p: i for p, i in self._copied.items() if self._tier.is_copied(i)} | {path: identity}
        elif self._world.rank == 0:
            log.warning("%s: %s", self._failure, "; ".join(texts))

    def _failed(self, identity: Identity, text: str) -> None:
        self._failure = f"step {identity[0]} was not copied: {text}"
        log.warning("peers: %s", self._failure)

    def _exchange(self, path: Location, token: str) -> tuple[list[int], str]:
        """Send this rank's container and receive those of others; returns whose have come, and what has failed."""
        pairs = [(self._world.rank, self._every[self._world.rank]), *((one, self._world.rank) for one in self._senders)]
        tasks = [Task(partial(self._carry, path, *pair, token)) for pair in pairs]
        try:
            for task in tasks:
                self._copying.put(task)
        except ThreadStartError:  # then one after the other
            for task in tasks:
                if (make := task.take()) is not None:
                    make()
        errors = {pair: task.exception() for pair, task in zip(pairs, tasks, strict=True)}
        texts = {said(error) or type(error).__name__: None for error in errors.values() if error is not None}
        return [one for one in self._senders if errors[one, self._world.rank] is None], "; ".join(texts)

    def _carry(self, path: Location, sender: int, receiver: int, token: str) -> None:
        """Carry the containers of one rank. Where the link is broken, both make new ones."""
        sends = sender == self._world.rank
        other = receiver if sends else sender
        every = named_of(path, manifest.open(path), sender)
        made = 0
        while True:
            link = self._links.pop((sender, receiver), None)
            try:
                if link is None:
                    made += 1
                    # the other may notice only after the whole time that the last one is broken
                    link = self._link(f"{token}/{sender}-{receiver}/{made}", other, SILENCE * made)
                for named in every:  # what has arrived over an earlier link is not sent again
                    if sends:
                        send(link, named, self._pace)
                    else:
                        if not adopted(named, named.path, self._pace):
                            refuse_short_memory(self._tier, named.nbytes)
                        receive(link, named)
            except BaseException as error:
                if link is not None:
                    link.close()
                if made == _LINKS or not isinstance(error, UnreachableError):
                    raise
            else:
                self._links[sender, receiver] = link
                return


_every: weakref.WeakSet[Peers] = weakref.WeakSet()
_parents: list[Link] = []
"""In a forked child, the links of its parent: their threads are there, and to end them here would wait for these."""


def _after_fork() -> None:
    for one in list(_every):
        one._attempts.clear()
        one._due.clear()
        _parents.extend(one._links.values())
        one._links.clear()


os.register_at_fork(after_in_child=_after_fork)
