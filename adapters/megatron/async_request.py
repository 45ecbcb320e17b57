"""The request for Megatron's asynchronous queue: a function that only waits, and finalization that raises failures."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

from datastates._base import log
from datastates._base.workers import start
from datastates.saving.snapshot import Snapshot, wait_ended
from datastates.storage.local import opened


def wait_for(token: str) -> None:
    """Wait until the save of a :func:`token`, or its process, has ended, which frees the lock. Never raises.

    Megatron calls this in a process that it forked or spawned. An error would stop a persistent worker, for which all
    ranks would then wait forever. Megatron does not notice an error in a forked process.
    """
    with contextlib.suppress(OSError), opened(token, os.O_RDONLY) as fd:
        fcntl.flock(fd, fcntl.LOCK_SH)


def token(snapshot: Snapshot) -> str:
    """The file name of a lock that this process, but no forked child, holds until a snapshot has ended.

    If no lock file can be made, the name is empty: then only Megatron's finalization waits.
    """
    try:
        made, name = tempfile.mkstemp(prefix="datastates-save-")
        os.close(made)
        lock = opened(name, os.O_RDWR)  # which forked children close
    except OSError as error:
        log.warning("Megatron will wait for this checkpoint in its finalization: %s", error)
        return ""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)

    def free() -> None:
        wait_ended([snapshot])
        with contextlib.suppress(OSError):
            Path(name).unlink()
        with contextlib.suppress(OSError):
            fcntl.flock(lock.fileno(), fcntl.LOCK_UN)  # a child that is just being forked may hold it, too
        lock.close()

    start(threading.Thread(target=free, name="datastates-token"))
    return name


def request(snapshot: Snapshot, async_strategy: str) -> Any:
    """Make the installed Megatron's ``AsyncRequest`` for a snapshot.

    Its finalization waits until the snapshot is committed, and raises its failure. Then the finalization functions that
    Megatron adds afterwards, such as the one that writes ``metadata.json``, do not run. They run on no rank, as the
    snapshots of all ranks end the same way.
    """
    strategies = importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")
    if hasattr(strategies, "get_async_strategy"):
        kind = strategies.get_async_strategy(async_strategy, "AsyncRequest")[1]
    else:  # before 0.17 there is only one class
        kind = strategies.AsyncRequest
    return kind(wait_for, (token(snapshot),), [snapshot.wait_committed], async_fn_kwargs={}, preload_fn=None)
