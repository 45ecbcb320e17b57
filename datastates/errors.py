"""The errors that datastates raises, one class per cause.

Each class inherits from :class:`DatastatesError`, so that one ``except`` catches all, and from the built-in exception
that fits its cause.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from errno import EPERM, ESPIPE
from types import FunctionType
from typing import Any, cast


class DatastatesError(Exception):
    """Base of all errors raised by datastates.

    All of them pickle, because torch.distributed.checkpoint sends errors to other ranks that way.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the finished message and the attributes, because a constructor may take other arguments."""
        if not isinstance(type(self).__init__, FunctionType):  # whoever trusts the class need trust no function
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
    """A provider described its state wrongly: for example duplicate keys, or a shape that does not fit its buffer.

    Also: an object refused the state that a restore gave it.
    """


class StorageError(DatastatesError, OSError):
    """A system call on a checkpoint's files failed.

    Attributes:
        errno: The system's error number; 0 when there is none, as for a file that is shorter than its index says.
        operation: The operation that failed, for example ``"write"`` or ``"sync"``.
        filename: The path that it failed on.
    """

    def __init__(self, errno: int, operation: str, path: str, message: str | None = None) -> None:
        """Take ``message``, or compose it from the operation, the path and the text of ``errno``."""
        text = message or f"{operation} {path}: {os.strerror(errno)} [errno {errno}]"
        if errno == ESPIPE or (operation, errno) == ("close", EPERM):  # such a mount
            text += (
                ". This mount takes the bytes of a file only in order, from one descriptor: mount it with a cache on "
                "disk, as rclone with --vfs-cache-mode full"
            )
        super().__init__(errno, text, path)
        self.operation = operation

    def __str__(self) -> str:
        """The message alone, which names the operation, the path and the errno."""
        return str(self.strerror)


class storage_errors:  # named as a statement, as contextlib.suppress is
    """A block in which an OSError becomes a StorageError with operation and path."""

    __slots__ = ("_operation", "_path")

    def __init__(self, operation: str, path: os.PathLike[str] | str) -> None:
        """Take the operation and the path that the error is to name."""
        self._operation = operation
        self._path = path

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise an OSError of the block as a StorageError."""
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise StorageError(error.errno or 0, self._operation, str(self._path)) from error


class UncertainError(StorageError):
    """A store, or a host, did not tell whether it has done what it was asked, or will yet do it: an answer was lost.

    What the operation was to make may be there, or appear later. Look at it.
    """


class DeviceError(DatastatesError, RuntimeError):
    """A CUDA driver call failed; the message names the call and the driver's error."""


class FormatError(DatastatesError, ValueError):
    """A file is malformed: truncated, of another format, or with fields that contradict each other."""


class CorruptError(FormatError):
    """Stored bytes do not match their checksum.

    Attributes:
        key: Key of the tensor or object that the bytes belong to.
        path: The file that they are in.
    """

    def __init__(self, message: str, *, key: str, path: str) -> None:
        """Store the message, the key and the path."""
        super().__init__(message)
        self.key = key
        self.path = path


class TrustError(FormatError, pickle.UnpicklingError):
    """A stored object needs classes that the caller has not trusted.

    Attributes:
        name: The first class or function as ``module.qualname``, the form that ``trust=[...]`` takes.
        names: All of them.
    """

    def __init__(self, name: str, *names: str) -> None:
        """Compose a message that names the classes and the remedy."""
        every = [name, *names]
        text = (
            f"the checkpoint holds an object of {' and of '.join(every)}, which is not loaded by default because that "
            f"can run code; pass trust={every} if you trust this file"
        )
        others = {one.partition(".")[0] for one in every} - sys.modules.keys()
        if others:
            text += f", or import {', '.join(sorted(others))} if it declares its classes to torch, as torchao does"
        super().__init__(text)
        self.name = name
        self.names = tuple(every)


class CheckpointNotFoundError(DatastatesError, FileNotFoundError):
    """There is no committed checkpoint at that path, or none of that step."""


class RestoreError(DatastatesError, ValueError):
    """The checkpoint does not fit the state to restore into, or a rank could not begin; no state has been changed.

    Attributes:
        missing: Keys that the state has and the checkpoint lacks.
        unexpected: Keys that the checkpoint has and the state lacks.
        mismatched: One sentence for each key whose shape, dtype or container type differs.
        lost: Missing files of the checkpoint, as this rank or another rank reported them.
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
        """Store the message, the keys and the lost files."""
        super().__init__(message)
        self.missing = list(missing)
        self.unexpected = list(unexpected)
        self.mismatched = list(mismatched)
        self.lost = list(lost)


class OutOfMemoryError(MemoryError, DatastatesError):  # in this order, as MemoryError has a __new__ of its own
    """There is less free memory than the call needs. Nothing was read.

    Attributes:
        needed: Bytes that the call needs.
        free: Bytes that are free.
    """

    def __init__(self, message: str, *, needed: int, free: int) -> None:
        """Store the message and the numbers of bytes."""
        super().__init__(message)
        self.needed = needed
        self.free = free


class StaleStateError(DatastatesError, RuntimeError):
    """An optimizer has stepped, and none of its parameters has changed in what was to be saved."""


class TornSnapshotError(DatastatesError, RuntimeError):
    """State changed before it was captured; the snapshot was discarded.

    Attributes:
        keys: Full keys of the tensors that changed.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        """Compose a message that names the tensors and the remedy."""
        shown = ", ".join(repr(k) for k in keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")
        super().__init__(
            f"changed between snapshot() and its capture: {shown}; call Checkpointer.gate(), or "
            "datastates.adapters.gate() where a framework saves, before what changes it (an average or EMA, a key "
            "encoder, a forward pass that renormalizes), or have it copied at once, as by "
            "from_stateful(..., lazy=False) or lazy=lambda key: ... of the provider, with which the key begins"
        )
        self.keys = list(keys)


class SnapshotTimeoutError(DatastatesError, TimeoutError):
    """A wait for a snapshot ran out of time; the snapshot continues."""


class SnapshotRefusedError(DatastatesError, RuntimeError):
    """Too many snapshots are in flight and ``when_busy="refuse"`` was set."""


class SnapshotAbandonedError(DatastatesError, RuntimeError):
    """The snapshot was begun by the parent process before a fork; only the parent can finish it."""


class ClosedError(DatastatesError, RuntimeError):
    """The checkpointer, or another object that was used, is closed."""


class ThreadStartError(DatastatesError, RuntimeError):
    """The system refused a thread. Nothing was begun; the message names the remedy."""

    def __init__(self, message: str) -> None:
        """Compose the message from ``message``, which tells the thread and the system's reason, and the remedy."""
        super().__init__(
            f"a thread could not be started: {message}. Raise the limit of processes and threads (ulimit -u, or "
            "pids.max of the container's cgroup) or that of memory (ulimit -v), or end other threads"
        )


class CommitError(DatastatesError, RuntimeError):
    """The ranks did not reach an agreement. Every rank that learns of it raises this error with the same text."""


class UnreachableError(CommitError):
    """This rank cannot reach the store or directory where the ranks meet, so it does not know their decision."""


class FencedError(CommitError):
    """A newer run has opened the directory and begun to save there. This run neither commits nor deletes there."""


class SnapshotSkippedError(CommitError):
    """A rank took no part in this snapshot, because its ``snapshot()`` call raised the failure of an earlier one."""


class RanksMissingError(DatastatesError, TimeoutError):
    """A wait for other ranks ran out of time.

    Attributes:
        ranks: The ranks that did not answer, ascending.
        undecided: True where it is certain that no decision was made and none will be.
    """

    def __init__(self, message: str, *, ranks: Sequence[int], undecided: bool = False) -> None:
        """Store the message, the ranks, and ``undecided``."""
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.undecided = undecided


def said(error: BaseException) -> str:
    """The text of an error; empty if it has none, or if its class, which may be the program's, fails to give it."""
    try:
        return str(error)
    except Exception:
        return ""


def rank_names(ranks: Sequence[int]) -> str:
    """Write ascending ranks for a message: ``"rank 2"``, ``"ranks 0-5, 7"``; a long list is cut."""
    stretches: list[list[int]] = []
    for rank in ranks:
        if stretches and stretches[-1][1] == rank - 1:
            stretches[-1][1] = rank
        else:
            stretches.append([rank, rank])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in stretches[:16]]
    rest = sum(b - a + 1 for a, b in stretches[16:])
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(shown) + (f" and {rest} more" if rest else "")


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Put ``what`` in front of the message of a FormatError. Its subclasses name the thing themselves."""
    try:
        yield
    except FormatError as error:
        if type(error) is not FormatError:
            raise
        raise FormatError(f"{what}: {error}") from error
