"""The contract of an opening: one run's right to save in a place. A newer run that has begun to save ends it."""

from __future__ import annotations

import functools
import json
import os
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from datastates.commit import manifest
from datastates.errors import FencedError, StorageError
from datastates.storage import store_of
from datastates.storage.location import Location
from datastates.storage.objects import ABSENT

_MOST = 1 << 16


class Opening(ABC):
    """One run's opening of a place of checkpoints, as all ranks know it. Only rank 0 calls :meth:`begin_to_save`.

    Openings of one process never fence each other. Thread-safe.

    Attributes:
        root: The place.
    """

    root: Location
    _fence: str | None = None  # why it is fenced

    @property
    @abstractmethod
    def mark(self) -> bytes:
        """The argument for :meth:`Tier.pending` by which a newer run knows the checkpoints of this opening."""

    @abstractmethod
    def begin_to_save(self, then: Callable[[], None] = lambda: None) -> None:
        """Fence all openings before this one, then call ``then``. Later calls do this no more.

        Raises:
            FencedError: A newer opening has begun to save.
            StorageError: The place cannot be read or written.
        """

    def refuse_if_known_fenced(self) -> None:
        """Raise FencedError if an earlier call has found a newer opening. Does not look at the place."""
        if self._fence is not None:
            raise FencedError(self._fence)

    @abstractmethod
    def refuse_if_fenced(self) -> None:
        """Raise FencedError if a newer opening, of another process, has begun to save.

        Raises:
            StorageError: As for :meth:`refuse_elsewhere`.
        """

    @abstractmethod
    def refuse_elsewhere(self) -> None:
        """Raise StorageError if the place is no longer the one that was opened, as where a mount was lost."""

    @abstractmethod
    def close(self) -> None:
        """Leave nothing of this opening if no other one needs it. Does nothing in a forked child. Never raises."""

    def _refuse_newer(self, record: Mapping[str, object]) -> None:
        """Raise FencedError, now and later: a newer run has written the ``record``."""
        who = f"process {record.get('pid', 'unknown')} on host {record.get('host', 'unknown')}"
        self._fence = (
            f"a newer run saves in {self.root}: {who}, which opened it at "
            f"{record.get('opened', 'an unknown time')}. This run neither commits nor deletes there any more. "
            "Start it again to go on from the newest checkpoint, or give each run a place of its own. Ranks of "
            "one job that do not know of each other need init_process_group() first, or rank= and world_size="
        )
        raise FencedError(self._fence)


@functools.cache
def owner_of(process: int) -> str:
    """A random name of this process; its number may be given to another process later."""
    del process
    return secrets.token_hex(8)


def record_of(owner: str) -> bytes:
    """The record of an opening of this process, by which others know it."""
    told = {"owner": owner, "host": socket.gethostname(), "pid": os.getpid(), "opened": manifest.now()}
    return json.dumps(told).encode()


def fields_of(data: bytes) -> dict[str, object]:
    """The fields of a record; empty if it was cut short as its machine went down."""
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def told(path: Location, stage: str = "store", *, certain: bool = False) -> dict[str, object]:
    """As :func:`fields_of`, of the record at a path; empty if it is gone.

    With ``certain``, StorageError if it cannot be read.
    """
    try:
        return fields_of(store_of(path, stage).read_all(path, _MOST))
    except StorageError as error:
        if certain and error.errno not in ABSENT:
            raise
        return {}
