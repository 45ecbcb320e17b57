"""One checkpoint that is files of a framework. It is begun, written, published and told of, each once."""

from __future__ import annotations

import os
from collections.abc import Callable

from datastates._base import log
from datastates._base.waiting import Flag
from datastates.errors import CommitError, SnapshotAbandonedError
from datastates.files import looks
from datastates.saving.snapshot import Snapshot, wait_ended
from datastates.storage.location import PathLike

Publish = Callable[[BaseException | None], None]
"""Gives the files of a checkpoint their names, in agreement with the other ranks.

Called in the background once the files are written, with the error of a file, or why the checkpoint was given up, or
None. It must raise that error. What it raises is the failure of the checkpoint.
"""


def refuse_child_of(process: int) -> None:
    """Raise SnapshotAbandonedError in another process than the one that saves, which this one was forked from."""
    if os.getpid() != process:
        raise SnapshotAbandonedError("this process was forked from one that saves: it cannot save, nor wait for it")


class Transaction:
    """A checkpoint under way. The properties, :meth:`wait` and :meth:`see` are thread-safe.

    Attributes:
        name: Its name in the log.
        written: The snapshots of this rank's files.
        shown: The paths at which code of this process may look for it, and then waits. None: nobody waits.
        made: The folder or the file that it is once it has ended, on the rank that brings it to further places.
    """

    def __init__(self, name: str, publish: Publish, *, raises: bool) -> None:
        """Begin without files.

        Args:
            name: Its name in the log.
            publish: The framework's publishing step.
            raises: Whether its failure will be raised: then nothing older may be deleted because of it.
        """
        self.name = name
        self.written: list[Snapshot] = []
        self.shown: looks.UnderWay | None = None
        self.made: PathLike | None = None
        self._to_publish = [publish]  # who takes it ends the checkpoint
        self._raises = raises
        self._given_up: Exception | None = None
        self._failure: BaseException | None = None
        self._is_told = False
        self._process = os.getpid()
        self._seen, self._ended = Flag(), Flag()

    @property
    def ended(self) -> bool:
        """Whether the checkpoint is complete, or has failed."""
        return self._ended.is_set()

    @property
    def exception(self) -> BaseException | None:
        """Why the checkpoint has failed; None if it has not."""
        return self._failure

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the checkpoint has ended; False if ``timeout`` seconds pass first.

        Raises:
            SnapshotAbandonedError: The process that this one was forked from was still saving.
        """
        if not self.ended:
            refuse_child_of(self._process)
        return self._ended.wait(timeout)

    def see(self) -> BaseException | None:
        """Wait for the end, as code that looks at the checkpoint; returns why nothing may be deleted now, or None."""
        self._seen.wait()
        return self._failure if self._raises else None

    def undelivered(self) -> BaseException | None:
        """The checkpoint's failure at the first call that finds one; else None."""
        failure, was_told = self._failure, self._is_told  # read once: the checkpoint may be failing now
        self._is_told = failure is not None
        return None if was_told else failure

    def give_up(self, error: BaseException) -> None:
        """Let the checkpoint fail, on all ranks, as this rank has not begun all of its files because of an error."""
        if not isinstance(error, Exception):  # it must not be raised again later, and its frames hold the state
            error = CommitError(f"{self.name} was interrupted: {error!r}")
        self._given_up = error

    def end(self, count: Publish = lambda failure: None) -> None:
        """Wait until the files are written, and publish them. Never raises. A second call does nothing.

        ``count`` is called with the failure or None, before the checkpoint counts as ended.
        """
        try:
            publish = self._to_publish.pop()
        except IndexError:
            self._ended.set()  # withdrawn: in its turn, as those who wait for it wait for all before it
            return
        try:
            with looks.unwatched():
                wait_ended(self.written)
                errors = [self._given_up, *(snapshot.exception() for snapshot in self.written)]
                publish(next(filter(None, errors), None))
        except BaseException as error:
            self._failure = error
        try:
            self._let_go()
            if self._failure is not None:  # after that: who looks may hold the lock of a handler
                log.warning("%s has failed: %s", self.name, self._failure)
            count(self._failure)
        finally:
            self._ended.set()

    def withdraw(self) -> bool:
        """Let it end unpublished, in its turn if it has one; returns False if it is being published, or has been."""
        try:
            self._to_publish.pop()
        except IndexError:
            return False
        self._let_go()
        return True

    def _let_go(self) -> None:
        """Let those go on that look at the checkpoint."""
        self._seen.set()
        if self.shown is not None:
            looks.end(self.shown)
