"""Every error that datastates raises on purpose, one class per cause.

Each inherits twice: from :class:`DatastatesError`, so that one ``except`` catches all, and from the built-in
exception that a caller without knowledge of datastates would expect.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from types import FunctionType
from typing import Any, cast


class DatastatesError(Exception):
    """Base of all errors raised by datastates. They pickle: torch.distributed.checkpoint tells other ranks so."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Message and attributes as they are, where a constructor makes the message of other arguments."""
        if not isinstance(type(self).__init__, FunctionType):
            return cast("tuple[Any, ...]", super().__reduce__())
        given = (self.errno, self.strerror, self.filename) if isinstance(self, OSError) and self.filename else self.args
        return _again, (type(self), given, vars(self))


def _again(cls: type[DatastatesError], args: tuple[Any, ...], attributes: dict[str, Any]) -> DatastatesError:
    error = cls.__new__(cls, *args)
    (OSError if issubclass(cls, OSError) else Exception).__init__(error, *args)
    vars(error).update(attributes)
    return error


class SettingsError(DatastatesError, ValueError):
    """A setting is unknown or impossible; the message names the field."""


class ProviderError(DatastatesError, ValueError):
    """A provider describes its state wrongly (duplicate keys, shapes that do not fit their buffer)."""


class StorageError(DatastatesError, OSError):
    """A system call on a checkpoint's files failed.

    Attributes:
        errno: The system's error number, 0 when the failure has none (a file shorter than its index says).
        operation: The operation that failed, for example ``"write"`` or ``"sync"``.
        filename: The path it failed on.
    """

    def __init__(self, errno: int, operation: str, path: str, message: str | None = None) -> None:
        """Compose the message from the operation, the path and the errno's text."""
        text = message or f"{operation} {path}: {os.strerror(errno)} [errno {errno}]"
        super().__init__(errno, text, path)
        self.operation = operation

    def __str__(self) -> str:
        """The message alone: it already names operation, path and errno."""
        return str(self.strerror)


class DeviceError(DatastatesError, RuntimeError):
    """A CUDA driver call failed; the message names the call and the driver's error."""


class FormatError(DatastatesError, ValueError):
    """A file is not what it should be: truncated, foreign, or with fields that contradict each other."""


class CorruptError(FormatError):
    """Stored bytes do not match their checksum.

    Attributes:
        key: The tensor or object they belong to.
        path: The file they are in.
    """

    def __init__(self, message: str, *, key: str, path: str) -> None:
        """Keep the key and the path beside the message."""
        super().__init__(message)
        self.key = key
        self.path = path


class TrustError(FormatError, pickle.UnpicklingError):
    """A stored object needs a class that the caller has not trusted.

    Attributes:
        name: The class or function, as ``module.qualname``: what to add to ``trust=[...]``.
    """

    def __init__(self, name: str) -> None:
        """Name the class and what to do."""
        super().__init__(
            f"the checkpoint holds an object of {name}, which is not loaded by default because that can run code; "
            f"pass trust=[{name!r}] if you trust this file"
        )
        self.name = name


class CheckpointNotFoundError(DatastatesError, FileNotFoundError):
    """There is no committed checkpoint at that path, or not of that step."""


class RestoreError(DatastatesError, ValueError):
    """The checkpoint and the state to restore into do not fit; nothing has been changed.

    Attributes:
        missing: Keys that the state has and the checkpoint lacks.
        unexpected: Keys that the checkpoint has and the state lacks.
        mismatched: One sentence for each key whose shape, dtype or container type differs.
        lost: Files of the checkpoint that are missing, to this rank or to another that said so.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Sequence[str] = (),
        lost: Sequence[str] = (),
    ) -> None:
        """Keep the keys beside the message."""
        super().__init__(message)
        self.missing = list(missing)
        self.unexpected = list(unexpected)
        self.mismatched = list(mismatched)
        self.lost = list(lost)


class TornSnapshotError(DatastatesError, RuntimeError):
    """State changed while it was being captured; the snapshot was discarded.

    Attributes:
        keys: The tensors that changed.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        """Name the tensors and the remedy."""
        shown = ", ".join(repr(k) for k in keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")
        super().__init__(
            f"changed between snapshot() and its capture: {shown}; guard the update with Checkpointer.gate(), "
            "or mark what changes at any time as not lazy, as by from_stateful(..., lazy=False)"
        )
        self.keys = list(keys)


class SnapshotTimeoutError(DatastatesError, TimeoutError):
    """A wait ran out of time; the snapshot goes on."""


class SnapshotRefusedError(DatastatesError, RuntimeError):
    """Too many snapshots are in flight and ``when_busy="refuse"`` was set."""


class SnapshotAbandonedError(DatastatesError, RuntimeError):
    """The snapshot was begun in another process (before a fork), which alone can finish it."""


class ClosedError(DatastatesError, RuntimeError):
    """The checkpointer is closed."""


class CommitError(DatastatesError, RuntimeError):
    """The ranks did not come to an agreement; all that could be told raise it with the same text."""


class UnreachableError(CommitError):
    """This rank cannot reach what the ranks meet in; what the others have agreed on, it does not know."""


class SnapshotSkippedError(CommitError):
    """A rank took no part in a snapshot, because its call raised an earlier one's failure: no failure of its own."""


class RanksMissingError(DatastatesError, TimeoutError):
    """A wait for other ranks ran out of time.

    Attributes:
        ranks: Those that did not answer, ascending.
        undecided: Whether it is certain that nothing was decided, nor will be.
    """

    def __init__(self, message: str, *, ranks: Sequence[int], undecided: bool = False) -> None:
        """Keep the ranks beside the message, which names them, too."""
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.undecided = undecided


def rank_names(ranks: Sequence[int]) -> str:
    """Ascending ranks for a message: ``"rank 2"``, ``"ranks 0-5, 7"``; long lists are cut."""
    stretches: list[list[int]] = []
    for rank in ranks:
        if stretches and stretches[-1][1] == rank - 1:
            stretches[-1][1] = rank
        else:
            stretches.append([rank, rank])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in stretches[:16]]
    rest = sum(b - a + 1 for a, b in stretches[16:])
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(shown) + (f" and {rest} more" if rest else "")
