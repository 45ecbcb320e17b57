"""The checkpoints under way: how many, in which order they end, and to whom a failure is told."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import partial

from datastates._base import log
from datastates._base.workers import Workers
from datastates.draining.folder_drain import FolderDrains
from datastates.errors import ClosedError, ThreadStartError
from datastates.files import looks
from datastates.files.settings import FileSettings
from datastates.files.transaction import Publish, Transaction, refuse_child_of
from datastates.storage import Location, folders_of
from datastates.storage.location import PathLike


class InFlight:
    """The checkpoints that one object of a framework saves. They end in the order in which they began.

    Used on one thread at a time. The thread for the ends is started by the first checkpoint.
    """

    def __init__(self, settings: FileSettings) -> None:
        """Begin without checkpoints."""
        self.settings = settings
        self.failures = 0
        """The number of checkpoints that have failed so far."""
        self.saves: list[Transaction] = []
        """The last checkpoints that were put here, the oldest first; at most ``max_in_flight`` of them."""
        saves = self.saves
        self.drains = FolderDrains(settings.tiers, lambda: any(not save.ended for save in saves), looks.unwatched)
        """Bring complete checkpoints to further places."""
        self._last_failed = False  # whether the checkpoint that ended last has failed
        self._last: Transaction | None = None
        self._ends: Workers | None = None
        self._process = os.getpid()
        self._shown: set[str] = set()
        _every.add(self)

    def _start(self) -> Workers:
        if self._ends is None:
            # one thread: checkpoints end in the order in which they began
            self._ends, self._process = Workers("datastates-files", 1), os.getpid()
        self.refuse_children()
        return self._ends

    def begin(self) -> None:
        """Begin a checkpoint: wait until fewer than ``max_in_flight`` are under way.

        Raises:
            DatastatesError: With ``on_error="raise"``, a checkpoint that the call waited for has failed; nothing is
                begun. Where several ranks save together, all of them raise at the same call.
            SnapshotAbandonedError: This process was forked from the one that saves.
        """
        self._start()
        while len(self.saves) >= self.settings.max_in_flight:
            oldest = self.saves[0]
            oldest.wait()
            del self.saves[0]
            self.tell(oldest)

    def tell(self, save: Transaction) -> None:
        """With ``on_error="raise"``, raise the failure of a checkpoint that has ended, once."""
        failure = save.undelivered()
        if failure is not None and self.settings.on_error == "raise":
            raise failure

    def transaction(self, name: str, publish: Publish) -> Transaction:
        """A new checkpoint; see :class:`~datastates.files.transaction.Transaction`."""
        return Transaction(name, publish, raises=self.settings.on_error == "raise")

    def put(self, save: Transaction) -> None:
        """Let a checkpoint end in the background, also if this call is interrupted. A second call does nothing."""
        self._put(save, partial(save.end, partial(self._count, save)), self.saves)

    def _put(self, save: Transaction, end: Callable[[], None], among: list[Transaction]) -> None:
        ends = self._start()
        try:
            if save not in among:
                among.append(save)
            if save.shown is not None and not save.ended:
                looks.begin(save.shown)
            self._last = save
            ends.do(end)
        except (ThreadStartError, ClosedError):
            end()
        except BaseException:
            ends.do(end)  # who looks waits for it, and the files are under way
            raise

    def _count(self, save: Transaction, failure: BaseException | None) -> None:
        self.failures += failure is not None
        self._last_failed = failure is not None
        if failure is None and save.made is not None:
            self.drains.add(Location(save.made))

    def fail(self, name: str, error: BaseException) -> None:
        """Let a checkpoint that could not be begun count as failed; raises ``error`` with ``on_error="raise"``."""
        if self.settings.on_error == "raise":
            raise error
        save = self.transaction(name, _raise)
        save.give_up(error)
        self.put(save)

    def remove(self, path: PathLike) -> None:
        """Delete a checkpoint, once all begun before have ended; keep it if the last of them failed.

        Args:
            path: The file or folder.
        """
        place = Location(path)

        def remove(_: BaseException | None) -> None:
            folders = folders_of(place)
            if self._last_failed:
                log.warning("%s is kept: what was saved after it has failed", path)
            elif folders.is_folder(place) and not folders.is_link(place):
                folders.remove_tree(place)
            else:
                folders.remove(place, missing_ok=True)

        removal = self.transaction(f"removing {path}", remove)
        removal.shown = looks.whole(place, removal.see)
        if self._ends is None:  # nothing is under way
            removal.end()
            if removal.exception is not None:
                raise removal.exception
            return
        is_idle = self._last is None or self._last.ended
        self._put(removal, removal.end, [])
        if is_idle:
            self.wait()

    def show(self, name: str, to: str) -> None:
        """Wait until everything begun has ended, because ``to`` looks at a checkpoint now. The log names it once.

        Raises as :meth:`finish` does.
        """
        if to not in self._shown:
            self._shown.add(to)
            log.warning("waiting for %s, and for later ones: %s", name, to)
        self.finish()

    def wait(self) -> None:
        """Wait until everything begun has ended; :meth:`begin` and :meth:`finish` raise the failures.

        Raises:
            SnapshotAbandonedError: The process that this one was forked from was still saving.
        """
        if self._last is None or self._last.ended:  # everything before has ended by then
            return
        self.refuse_children()
        self._last.wait()

    def refuse_children(self) -> None:
        """Raise SnapshotAbandonedError in a process that was forked from the one that saves."""
        refuse_child_of(self._process)

    def finish(self) -> None:
        """Wait until everything begun has ended.

        Raises:
            DatastatesError: With ``on_error="raise"``, a checkpoint has failed and this was not raised yet.
            SnapshotAbandonedError: The process that this one was forked from was still saving.
        """
        self.wait()
        for save in self.saves:
            self.tell(save)


_every: weakref.WeakSet[InFlight] = weakref.WeakSet()


def every() -> list[InFlight]:
    """Those of all objects of this process, and of the process that it was forked from."""
    return list(_every)


def wait_for_all() -> None:
    """As :meth:`InFlight.wait`, for all objects of this process: another one may be saving the file that is read."""
    for one in every():
        one.wait()


def _raise(failure: BaseException | None) -> None:
    assert failure is not None
    raise failure
