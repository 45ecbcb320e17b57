"""Errors survive pickling: torch.distributed.checkpoint sends them pickled from rank to rank."""

from __future__ import annotations

import copy
import errno
import inspect
import pickle

import pytest

from datastates import errors

MADE: list[errors.DatastatesError] = [
    errors.StorageError(28, "write", "/somewhere"),
    errors.StorageError(0, "read", "/somewhere", "/somewhere is shorter than its index says"),
    errors.UncertainError(110, "create", "mem://somewhere"),
    errors.CorruptError("'w' of /somewhere is damaged", key="w", path="/somewhere"),
    errors.TrustError("pathlib.Path"),
    errors.RestoreError("it does not fit", missing=["a"], unexpected=["b"], mismatched=["c: shape"]),
    errors.OutOfMemoryError("'c' needs 31 GB, 22 GB are free", needed=31, free=22),
    errors.TornSnapshotError([f"key {i}" for i in range(10)]),
    errors.RanksMissingError("rank 3 did not come", ranks=[3], undecided=True),
]
CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, errors.DatastatesError) and cls not in {type(error) for error in MADE}
]


@pytest.mark.parametrize("error", [*MADE, *(cls("a message") for cls in CLASSES)], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("way", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy], ids=["pickle", "copy"])
def test_an_error_pickles_with_its_message_and_attributes(error: errors.DatastatesError, way: object) -> None:
    assert callable(way)
    found = way(error)
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert found.args == error.args
    assert vars(found) == vars(error)
    if isinstance(error, OSError):
        assert (found.errno, found.filename) == (error.errno, error.filename)


def test_a_mount_that_writes_in_order_only_is_told_how_to_be_mounted() -> None:
    for told in (
        errors.StorageError(errno.ESPIPE, "write", "/mnt/a"),
        errors.StorageError(errno.ESPIPE, "write", "/mnt/a", "write failed on /mnt/a: Illegal seek (errno 29)"),
        errors.StorageError(errno.EPERM, "close", "/mnt/a"),
    ):
        assert "/mnt/a: " in str(told)
        assert "--vfs-cache-mode full" in str(told)
    assert "rclone" not in str(errors.StorageError(errno.EPERM, "write", "/mnt/a"))
