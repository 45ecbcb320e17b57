"""The container of what several checkpoints have alike: linked to the last one's, or written for the next ones."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import Any

import numpy as np

from datastates._base.columns import U8
from datastates.commit import manifest
from datastates.commit.ballot import Ballot
from datastates.commit.claims import whole_claims
from datastates.commit.ending import Identity
from datastates.commit.votes import File
from datastates.container.partial_records import as_hashes
from datastates.errors import StorageError
from datastates.executor.executor import Columns, Executor
from datastates.executor.jobs import NOTHING, Recorded, WriteJob, recorded
from datastates.saving.bases import Base
from datastates.saving.halves import Half
from datastates.storage import store_of
from datastates.storage.location import Location


class KeptContainer:
    """The kept container of one snapshot. Not thread-safe, but for the waits."""

    def __init__(self, half: Half, ending: Ballot, hashes: U8) -> None:
        """Plan it; nothing is made yet.

        Args:
            half: Its plan.
            ending: The commit of its checkpoint.
            hashes: The hash of each of its chunks, in the order of its file.
        """
        self._half, self._ending, self._hashes = half, ending, hashes
        self._path: Location | None = None
        self._folder: str | None = None
        self._job: WriteJob | None = None
        self._made: Base | None = None

    @property
    def is_linked(self) -> bool:
        """Whether it is the file of another checkpoint."""
        return self._job is None and self._made is not None

    @property
    def nbytes(self) -> int:
        """Its length; 0 until that is known."""
        return 0 if self._made is None else self._made.nbytes

    def link(self, base: Base) -> bool:
        """Link the file of a base that has just the same; False where links are not offered, or are not the file.

        Raises StorageError where this file cannot be linked, or is another one by now. Then there is no file.
        """
        if (path := self._ending.link(base.path)) is None:
            return False
        made = replace(base, path=path)
        if not made.is_there():
            if path != base.path:
                store_of(path).discard([path])
                if base.is_there():  # gocryptfs tells another length for a while
                    return False
            raise StorageError(errno.ENOENT, "link", str(base.path), f"{base.path} is another file by now")
        self._made = made
        return True

    def begin(self, executor: Executor, whole: Columns) -> None:
        """Begin to capture and write it. ``whole`` is the memory of all buffers of the state."""
        columns = self._half.columns(whole)
        unwatched = np.zeros(len(self._half.source), np.uint8)  # they are hashed again
        self._path = self._ending.kept()
        self._job = executor.submit_write(self._path, self._half.prepared, columns, unwatched)

    def wait_captured(self) -> None:
        """Wait until the memory has been read."""
        if self._job is not None:
            self._job.wait_captured()

    def torn(self) -> set[int]:
        """The buffers of the state whose memory was unmapped before it was captured."""
        return set() if self._job is None else set(self._half.source[list(self._job.torn())].tolist())

    def finish(self, identity: Identity) -> File:
        """Wait until it is on stable storage; returns what the vote says of it."""
        if self._job is not None:
            frame = self._half.frame
            encode_tail = frame.encode_objects([])
            self._job.wait_checksummed()
            tail = encode_tail(self._job, identity, as_hashes(self._hashes, len(frame.table)))
            self._job.finish(tail.data)
            assert tail.index is not None
            assert self._path is not None
            self._made = Base(self._path, frame.plan.end + len(tail.data), tail.index, tail.index_crc32)
        made = self._made
        assert made is not None
        assert self._half.frame.claims is not None
        claims = whole_claims(self._half.frame.claims, made.index)
        kept: dict[str, Any] = {name: made.index.identity[name] for name in ("step", "attempt")}
        kept["folder"] = self._folder = manifest.folder_of(made.path, self._ending.path.parent)
        return File(made.path.name, made.nbytes, made.index_crc, claims, kept)

    def base(self, checkpoint: Location) -> Base:
        """What the next save may link, once the checkpoint is committed."""
        made = self._made
        assert made is not None
        return replace(made, path=manifest.within(checkpoint, made.path.name, self._folder))

    def figures(self) -> dict[str, Any]:
        """The statistics of the job that writes it; none if nothing is written."""
        return {} if self._job is None else self._job.stats()

    def recorded(self) -> Recorded:
        """The spans of the native core's work on it so far."""
        return NOTHING if self._job is None else recorded(self._job)

    @property
    def written_nbytes(self) -> int:
        """About how many bytes are written."""
        return 0 if self.is_linked else self._half.frame.plan.end

    def abort(self) -> None:
        """Stop at once. The file may stay."""
        if self._job is not None:
            self._job.abort()
