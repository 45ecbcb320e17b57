"""One checkpoint of DeepSpeed under way: its files get their names together, then ``latest`` is written."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from datastates._base import log
from datastates.files import hidden, in_flight, looks
from datastates.files.hidden import HiddenFile
from datastates.files.transaction import Transaction
from datastates.ranks.world import World, settle
from datastates.saving.report import Report
from datastates.saving.snapshot import Snapshot
from datastates.storage import Location, folders_of


def every() -> list[Save]:
    """The last checkpoints of all engines of this process: one engine may load a checkpoint that another one saves."""
    return [save for files in in_flight.every() for save in files.saves if isinstance(save, Save)]


def wait_for_every() -> None:
    """Wait for the checkpoints under way of every engine.

    Raises:
        DatastatesError: With ``on_error="raise"``, a checkpoint has failed and this was not raised yet.
        SnapshotAbandonedError: The process that this one was forked from was still saving.
    """
    for files in in_flight.every():
        if any(isinstance(save, Save) for save in files.saves):
            files.finish()


def sweep(root: Path) -> None:
    """Remove debris of killed runs from a folder and its subfolders; leave files that a live run is writing."""
    try:
        folders = [root, *(Path(entry.path) for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False))]
    except OSError as error:
        log.warning("debris of interrupted runs could not be looked for: %s", error)
        return
    for folder in folders:
        try:
            hidden.sweep(folder)
        except OSError as error:  # this rank must not fail for that, as the others go on
            if error.errno not in (errno.EACCES, errno.EPERM):  # another user's folder
                log.warning("debris of an interrupted run could not be removed: %s", error)


class Save(Transaction):
    """One ``save_checkpoint()``: files are captured and written, and get their names once all ranks have written.

    The properties and :meth:`wait` are thread-safe. The checkpoint engine calls the other methods, from one thread at a
    time.
    """

    def __init__(
        self, name: str, tag: str, world: World, root: Path | None = None, *, latest: bool = False, raises: bool = True
    ) -> None:
        """Begin without files.

        Args:
            name: A name that all ranks give to this save and to no other.
            tag: DeepSpeed's tag.
            world: The ranks.
            root: The folder that DeepSpeed saves in; None if the files lie anywhere.
            latest: Whether the file ``latest`` in that folder will name the tag in the end.
            raises: Whether its failure will be raised.
        """
        super().__init__(f"the checkpoint {tag}", self._publish, raises=raises)
        self.tag = tag
        """DeepSpeed's tag."""
        self.root = root
        """The folder that DeepSpeed saves in, absolute; None for files that lie anywhere."""
        self.attempt = world.token(name)
        self._vote = name
        self._latest = root / "latest" if root is not None and latest else None
        self.made = root / tag if root is not None and world.rank == 0 else None
        self._world = world
        self._files: dict[HiddenFile, Snapshot] = {}
        self._old_are_gone = False

    # --- for users

    @property
    def snapshots(self) -> dict[Path, Snapshot]:
        """The snapshots of this rank's files. *Committed* means that the file is on stable storage."""
        return {Path(file.final): snapshot for file, snapshot in self._files.items()}

    @property
    def reports(self) -> dict[Path, Report]:
        """The reports of this rank's files so far."""
        return {path: snapshot.report for path, snapshot in self.snapshots.items()}

    @property
    def stall_seconds(self) -> float:
        """Seconds that training on this rank waited so far: for copies in ``save_checkpoint()``, and at the gate."""
        return sum(report.stall_seconds for report in self.reports.values())

    # --- for the checkpoint engine

    def add(self, snapshot: Snapshot, file: HiddenFile) -> None:
        """Add a file, which is being written."""
        self._files[file] = snapshot
        self.written.append(snapshot)

    def has(self, file: HiddenFile) -> bool:
        """Whether a file was added."""
        return file in self._files

    def hide(self) -> None:
        """Once the checkpoint is under way, let code of this process that looks at it wait for its end."""
        if self.root is None or self.shown is not None:
            return
        root, folder = (os.path.realpath(path) for path in (self.root, self.root / self.tag))
        known = [os.path.join(os.path.realpath(file.final.parent), file.final.name) for file in self._files]
        named = [] if self._latest is None else [os.path.join(root, self._latest.name)]
        self.shown = looks.UnderWay(self.tag, root, folder, frozenset(known + named), self.see)

    def _publish(self, failure: BaseException | None) -> None:
        """Give the files their names, together with the other ranks."""
        try:
            self._name_together(failure)
        except BaseException:
            for file in self._files:
                if self._old_are_gone and folders_of(file.written).exists(file.written):
                    log.warning("%s is kept: what it was to replace has been removed", file.written)
                    file.close()
                else:
                    file.abandon()
            raise

    def _name_together(self, failure: BaseException | None) -> None:
        replaced: list[HiddenFile] = []
        looked = self._attempt(lambda: replaced.extend(f for f in self._files if folders_of(f.final).exists(f.final)))
        folders = {file.final.parent for file in self._files}
        if self._agree("written", failure or looked, bool(replaced)):
            # otherwise a crash between two renames would leave a mixture of two checkpoints
            self._agree("cleared", self._attempt(lambda: self._remove_old(folders)))
            self._old_are_gone = True
        self._agree("named", self._attempt(lambda: self._rename(folders)), publish=True)

    def _attempt(self, change: Callable[[], None]) -> BaseException | None:
        try:
            change()
        except OSError as error:
            return error
        return None

    def _remove_old(self, folders: Iterable[Location]) -> None:
        for file in self._files:
            folders_of(file.final).remove(file.final, missing_ok=True, operation="unlink")
        for folder in folders:
            folders_of(folder).sync_folder(folder)

    def _rename(self, folders: Iterable[Location]) -> None:
        hidden.publish(self._files)
        for folder in {folder.parent for folder in folders}:  # some of the folders are new
            folders_of(folder).sync_folder(folder)
        for file in self._files:
            file.abandon()

    def _agree(self, stage: str, error: BaseException | None, flag: bool = False, *, publish: bool = False) -> bool:
        """Agree with all ranks that none has failed; returns whether any of them raised its flag.

        ``publish``: write ``latest`` before any rank hears of success. Raises this rank's own error, or CommitError if
        another rank has failed.
        """

        def decide(votes: dict[int, bytes]) -> bytes:
            if publish and self._latest is not None:
                _write_latest(self._latest, self.tag)
            return max(votes.values())

        return settle(self._world, f"{self._vote}/{stage}", error, b"1" if flag else b"0", decide) == b"1"


def _write_latest(latest: Path, tag: str) -> None:
    """Let ``latest`` name a tag, atomically: whatever happens, it names the old tag or the new one."""
    # who counts the folders beside ``latest`` counts checkpoints
    file = HiddenFile(latest, room=latest.parent / tag, name=f".{latest.name}")
    try:
        file.begin()
        folders_of(file.written).create(file.written, tag.encode())
        hidden.publish([file])
    finally:
        file.abandon()
