"""The saves of one run in a tier: earlier runs are fenced, what they left is removed, old checkpoints are deleted.

A call of :func:`datastates.snapshot` is a run without an opening: it fences and deletes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from datastates._base.free_memory import host_memory, local_ranks
from datastates.commit import manifest, retention
from datastates.commit.names import Identity
from datastates.commit.opening import Opening
from datastates.commit.tier import Committed, Tier
from datastates.errors import CommitError, DatastatesError, StorageError
from datastates.kept import Keep
from datastates.storage import Folders, store_of
from datastates.storage.location import Location


def next_sequence(tier: Tier) -> int:
    """A sequence number above the numbers of all committed checkpoints in a tier.

    A manifest that cannot be read may hold a number above all others: it counts for one more.
    """
    every = [one.sequence for one in tier.checkpoints(known=True)]
    return 1 + max((sequence for sequence in every if sequence is not None), default=0) + every.count(None)


def clock() -> int:
    """Milliseconds since 1970: no new sequence number is lower.

    So a checkpoint is newer than earlier ones in places that could not be asked. What is known counts for more.
    """
    return time.time_ns() // 10**6


class Order:
    """Gives the checkpoints of a directory sequence numbers in the order of their snapshots, not of their commits.

    Thread-safe.
    """

    def __init__(self, tier: Tier, above: Callable[[], int] = lambda: 0) -> None:
        """Remember the tier, and a number that all new ones must be above; nothing is read yet."""
        self._tier = tier
        self._above = above
        self._lock = threading.Lock()
        self._holders = 0
        self._held = contextlib.ExitStack()
        self._given = 0
        self._begun = 0
        self._reserved: dict[int, int] = {}

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """As :meth:`Tier.committing`, but commits through this object do not wait for each other."""
        with self._lock:
            if not self._holders:
                self._held.enter_context(self._tier.committing())
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if not self._holders:
                    self._held.close()

    @contextlib.contextmanager
    def sequence(self, number: int, ready: Callable[[], None]) -> Iterator[int]:
        """Yield the sequence number of snapshot ``number`` (from 0). Call once for each; commit it within the block.

        ``ready`` is called before others are kept waiting.
        """
        ready()
        above = self._above()
        with self._alone():
            with self._lock:
                least = max(next_sequence(self._tier), above + 1, clock())
                before = self._begun, self._given
                if number >= self._begun:
                    first = max(self._given + 1, least)
                    # snapshots taken before this one may be committed later
                    self._reserved.update({n: first + n - self._begun for n in range(self._begun, number + 1)})
                    self._begun, self._given = number + 1, self._reserved[number]
                chosen = self._reserved.pop(number)
            try:
                yield chosen
            except BaseException:
                with self._lock:
                    if self._given == chosen:
                        # no checkpoint has this number, so others may take the numbers that were reserved with it
                        self._begun, self._given = before
                raise


_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: BaseException) -> bool:
    """Whether an error means that a disk or a quota is full, on this rank or on another that has told of it."""
    if isinstance(error, StorageError):
        return error.errno in _FULL
    return isinstance(error, CommitError) and any(os.strerror(number) in str(error) for number in _FULL)


def refuse_short_memory(tier: Tier, nbytes: int) -> None:
    """Raise StorageError if a tier is in memory that the file of a rank does not fit into: the kernel would kill it."""
    if tier.in_memory and nbytes > (free := host_memory() // local_ranks()):
        text = f"the file needs {size(nbytes)} of memory, and {size(free)} are free for it"
        raise StorageError(errno.ENOSPC, "write", str(tier.root), text)


def explain(error: BaseException, needed: int, root: Location, more: str) -> None:
    """Add to a StorageError of a full disk how many bytes are needed and free, and ``more``."""
    if isinstance(error, StorageError):
        free, store = None, store_of(root)
        with contextlib.suppress(StorageError):
            free = store.free(root) if isinstance(store, Folders) else None
        has = "" if free is None else f", and {size(free)} are free in {root}"
        error.strerror = f"{error.strerror}; the file needs {size(needed)}{has}{more}"


def taken(paths: Sequence[Location]) -> str:
    """How many checkpoints these are, and how much they take, by their manifests."""
    total = 0
    for path in paths:
        with contextlib.suppress(DatastatesError):
            total += manifest.open(path).nbytes
    return f"{len(paths)} older checkpoint{'s' * (len(paths) != 1)} ({size(total)})"


def size(nbytes: float) -> str:
    """A number of bytes for people."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


class Run:
    """The saves of one rank. Thread-safe."""

    def __init__(
        self,
        tier: Tier,
        opening: Opening | None = None,
        keep: Keep | None = None,
        *,
        is_coordinator: bool = True,
        above: Callable[[], int] = lambda: 0,
        stay: Callable[[Sequence[Committed]], Collection[Location]] | None = None,
        committed: Callable[[Location, Identity], None] = lambda path, identity: None,
    ) -> None:
        """Remember the place; nothing is read or written yet.

        Args:
            tier: The place of the checkpoints.
            opening: The run's opening of it; None for a single checkpoint.
            keep: The checkpoints that are kept; not used without an opening.
            is_coordinator: Whether this rank commits.
            above: Returns a number that the sequence numbers of new checkpoints are above.
            stay: Returns those of the tier's checkpoints that retention must leave, as another tier still needs them.
            committed: Called with the path and the identity of each committed checkpoint, on each rank.
        """
        self.tier = tier
        self.opening = opening
        self.order = Order(tier, above)
        self._stay = stay
        self.committed = committed
        self._keep = keep or Keep()
        self._is_coordinator = is_coordinator
        self.restored: Location | None = None
        """The checkpoint that was restored last, until the next commit: after a roll-back it stays until then."""
        self.is_full = False
        """Whether the disk was full since the last commit: then snapshots in flight must not compete for the room."""
        self._deletion = threading.Lock()

    def begin(self) -> None:
        """Begin to save. On the coordinator the first call fences earlier runs, and removes what they left.

        Raises:
            FencedError: A newer run has begun to save in the tier.
            StorageError: It cannot be written down that this run saves there, or the place is another one now.
        """
        if self.opening is None:
            return
        if self._is_coordinator:
            self.opening.begin_to_save(self._clear)
        else:
            self.opening.refuse_elsewhere()

    def _clear(self) -> None:
        """Not when it was opened: who only reads deletes nothing. Not after the commit: a disk may be full."""
        self.tier.sweep()
        self.delete()

    def retain(self) -> None:
        """Delete the checkpoints that are not kept. Called after each commit."""
        self.restored = None
        self.is_full = False
        if self.opening is not None:
            self.delete()

    def delete(self) -> None:
        """Delete the checkpoints that are not kept, now."""
        with self._deletion:
            but = () if self.restored is None else (self.restored,)
            retention.retain(self.tier, self._keep, but, self._stay)

    def make_room(self) -> str:
        """On the coordinator, where the disk is full: delete what is not kept; says what has gone, or could go."""
        if self.opening is None or not self._is_coordinator:
            return ""
        self.is_full = True
        with contextlib.suppress(DatastatesError):
            before = retention.older(self.tier)
            self.delete()
            left = retention.older(self.tier)
            if gone := len(before) - len(left):
                which = (
                    "checkpoint, which need not be kept, was"
                    if gone == 1
                    else "checkpoints, which need not be kept, were"
                )
                return f". {gone} older {which} deleted"
            if left:
                advice = (
                    "set" if self._keep.last is self._keep.best is None else "keep fewer by keep_best, keep_every and"
                )
                return f". {taken(left)} could go: delete them, or {advice} keep_last"
        return ""
