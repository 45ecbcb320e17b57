"""One checkpoint of DeepSpeed on its way: files that appear together, then ``latest``."""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgpack

from datastates._base import files
from datastates.commit import directories, manifest
from datastates.errors import CommitError
from datastates.ranks.together import settle
from datastates.ranks.world import World
from datastates.saving.report import Report
from datastates.saving.snapshot import Snapshot

_log = logging.getLogger("datastates")
_PENDING = re.compile(r"\.")


def begin_file(final: Path) -> manifest.Pending:
    """Make and lock a folder beside a file, to write it in: ``file`` of it is what to write; raises StorageError."""
    pending = manifest.begin(final.with_name(f".{final.name}"))
    pending.file(f".{final.name}")  # DeepSpeed's patterns do not match it
    return pending


def sweep(root: Path) -> None:
    """Remove what killed runs were writing in a folder and in those in it; not what any run is writing."""
    try:
        folders = [root, *(Path(entry.path) for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False))]
    except OSError as error:
        _log.warning("what an interrupted run left could not be looked for: %s", error)
        return
    for folder in folders:
        try:
            directories.sweep(folder, _PENDING)
        except OSError as error:  # no reason for this rank to fail where the others go on
            if error.errno not in (errno.EACCES, errno.EPERM):  # somebody else's
                _log.warning("what an interrupted run left could not be removed: %s", error)


@dataclass(frozen=True, slots=True, eq=False)
class _File:
    snapshot: Snapshot
    pending: manifest.Pending
    final: Path

    @property
    def partial(self) -> Path:
        """Where it is written."""
        return self.pending.files[0]


class Save:
    """One ``save_checkpoint()``: its files are captured, written, and named together once all ranks have written.

    Thread-safe for its users; what is for the checkpoint engine is called by one thread at a time.
    """

    def __init__(self, name: str, tag: str, latest: Path | None, world: World, timeout: float) -> None:
        """Begin with no file.

        Args:
            name: What all ranks call this save, and no other.
            tag: DeepSpeed's tag.
            latest: The file that is to name the tag in the end; None: none.
            world: The ranks.
            timeout: Seconds to wait for them.
        """
        self.tag = tag
        """DeepSpeed's tag."""
        self.attempt = world.token(name)
        self._name = name
        self._latest = latest
        self._world = world
        self._timeout = timeout
        self._files: list[_File] = []
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        self._delivered = False
        self._old_are_gone = False

    # --- for users

    @property
    def snapshots(self) -> dict[Path, Snapshot]:
        """This rank's files, each with its snapshot: *committed* there means that the file is on stable storage."""
        return {file.final: file.snapshot for file in self._files}

    @property
    def reports(self) -> dict[Path, Report]:
        """What each of this rank's files cost so far."""
        return {path: snapshot.report for path, snapshot in self.snapshots.items()}

    @property
    def stall_seconds(self) -> float:
        """What training waited for on this rank so far: for copies inside ``save_checkpoint()``, and at the gate."""
        return sum(report.stall_seconds for report in self.reports.values())

    @property
    def ended(self) -> bool:
        """Whether the checkpoint is complete, ``latest`` written, or has failed."""
        return self._ended.is_set()

    @property
    def exception(self) -> BaseException | None:
        """Why it has failed; None as long as it has not."""
        return self._failure

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended; False when ``timeout`` seconds pass first."""
        return self._ended.wait(timeout)

    # --- for the checkpoint engine

    def add(self, snapshot: Snapshot, pending: manifest.Pending, final: Path) -> None:
        """Take one file along, which is written in what :func:`begin_file` made for it."""
        self._files.append(_File(snapshot, pending, final))

    def undelivered(self) -> BaseException | None:
        """Its failure, once."""
        if self._delivered:
            return None
        self._delivered = self._failure is not None
        return self._failure

    def finish(self, given_up: BaseException | None = None) -> None:
        """Wait until this rank's files are written, and name them with the other ranks; a failure lands on this.

        ``given_up``: what kept this rank from giving all of its files.
        """
        try:
            self._finish(given_up)
        except BaseException as error:
            self._failure = error
            for file in self._files:
                if self._old_are_gone and file.partial.exists():
                    _log.warning("%s is kept: what it was to replace has been removed", file.partial)
                    file.pending.close()
                else:
                    manifest.abandon(file.pending)
            _log.warning("the checkpoint %s has failed: %s", self.tag, error)
        finally:
            self._ended.set()

    def _finish(self, given_up: BaseException | None) -> None:
        errors = [given_up]
        for file in self._files:
            file.snapshot.wait_ended()
            errors.append(file.snapshot.exception())
        replaced: list[_File] = []
        errors.append(self._attempt(lambda: replaced.extend(f for f in self._files if f.final.exists())))
        folders = {file.final.parent for file in self._files}
        if self._agree("written", next(filter(None, errors), None), bool(replaced)):
            # else a crash between two renames would leave files of two checkpoints beside each other
            self._agree("cleared", self._attempt(lambda: self._remove_old(folders)))
            self._old_are_gone = True
        self._agree("named", self._attempt(lambda: self._rename(folders)), publish=True)

    def _attempt(self, change: Callable[[], None]) -> BaseException | None:
        try:
            change()
        except OSError as error:
            return error
        return None

    def _remove_old(self, folders: Iterable[Path]) -> None:
        for file in self._files:
            with files.syscall("unlink", file.final):
                file.final.unlink(missing_ok=True)
        for folder in folders:
            files.sync_directory(folder)

    def _rename(self, folders: Iterable[Path]) -> None:
        for file in self._files:
            with files.syscall("rename", file.final):
                os.rename(file.partial, file.final)
        for folder in {*folders, *(folder.parent for folder in folders)}:  # those of new tags, too
            files.sync_directory(folder)
        for file in self._files:
            manifest.abandon(file.pending)

    def _agree(self, stage: str, error: BaseException | None, flag: bool = False, *, publish: bool = False) -> bool:
        """Hear all ranks; whether any of them raised its flag.

        ``publish``: write ``latest`` before anybody hears that all is well. Raises this rank's own error, or
        CommitError where another rank has failed.
        """

        def decide(votes: dict[int, bytes]) -> bytes:
            heard = {rank: msgpack.unpackb(vote) for rank, vote in sorted(votes.items())}
            if other := [f"rank {rank} {tag!r}" for rank, (_, tag) in heard.items() if tag != self.tag]:
                raise CommitError(f"rank 0 saves the tag {self.tag!r}, {', '.join(other[:8])}")
            if publish and self._latest is not None:
                _publish(self._latest, self.tag)
            return b"1" if any(flagged for flagged, _ in heard.values()) else b"0"

        vote, name = msgpack.packb([flag, self.tag]), f"{self._name}/{stage}"
        return settle(self._world, name, error, vote, decide, timeout=self._timeout) == b"1"


def _publish(latest: Path, tag: str) -> None:
    """Let ``latest`` name a tag: the old one or the new one, whatever happens."""
    pending = begin_file(latest)
    try:
        (new,) = pending.files
        files.write_file(new, tag.encode())
        with files.syscall("rename", latest):
            os.rename(new, latest)
    finally:
        manifest.abandon(pending)
    files.sync_directory(latest.parent)
