"""Finds damaged checkpoints by their manifests and the lengths of their files, and names an older whole one."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from datastates.commit import manifest, newest
from datastates.commit.tier import Listing
from datastates.errors import DatastatesError, FormatError, RestoreError, StorageError, TrustError
from datastates.storage import store_of
from datastates.storage.location import Location


def problem(path: Location, opened: manifest.Manifest | None = None, tier: Listing | None = None) -> str | None:
    """The fault of a checkpoint directory; None if it looks whole. Does not read its data.

    Args:
        path: The directory.
        opened: Its manifest, if that was read just now.
        tier: What it has seen whole is not looked at again.
    """
    if tier is not None and tier.has_seen(path):
        return None
    try:
        files = manifest.files_of(path, opened or manifest.open(path))
        lengths = store_of(path).lengths([file for file, _ in files])
    except (DatastatesError, OSError) as error:
        return str(error)
    named = [
        (file.name if file.parent == path else f"{file.parent.name}/{file.name}", nbytes) for file, nbytes in files
    ]
    wrong = [
        f"{name} is missing" if found is None else f"{name} has {found} bytes, not {nbytes}"
        for (name, nbytes), found in zip(named, lengths, strict=True)
        if found != nbytes
    ]
    return ", ".join(wrong[:4]) + (f" and {len(wrong) - 4} more" if len(wrong) > 4 else "") if wrong else None


def is_damage(error: BaseException) -> bool:
    """Whether an error means that a checkpoint is damaged, not that it does not fit the caller's request."""
    if isinstance(error, StorageError):
        return error.errno in (0, errno.ENOENT, errno.EIO)
    if isinstance(error, RestoreError):
        return bool(error.lost)
    return isinstance(error, FormatError) and not isinstance(error, TrustError)


@contextlib.contextmanager
def advice(tier: Listing, path: Location, how: str | None) -> Iterator[None]:
    """If the block fails because ``path`` is damaged, name the newest older one of the tier that looks whole.

    ``how`` tells the user how to restore the older one; ``{step}`` stands for its step. None leaves the error as it is.
    """
    try:
        yield
    except DatastatesError as error:
        elsewhere = isinstance(error, StorageError) and not manifest.is_of(Location(str(error.filename)), path)
        if how is not None and is_damage(error) and not elsewhere:
            _add(error, f"; {found}" if (found := older(tier, path, how)) else "")
        raise


def older(tier: Listing, path: Location, how: str) -> str:
    """Name the newest checkpoint before ``path`` that looks whole, and how to take it; empty if none can be found."""
    with contextlib.suppress(DatastatesError):  # the damage is to be reported even so
        every = list(newest.by_age(tier).items())
        before = every[: next((i for i, (_, other) in enumerate(every) if other == path), 0)]
        for step, other in reversed(before):
            if problem(other, tier=tier) is None:
                return f"the newest before it that looks whole is that of step {step}: {how.format(step=step)}"
    return ""


def _add(error: DatastatesError, text: str) -> None:
    if isinstance(error, StorageError):
        error.strerror = f"{error.strerror}{text}"
    else:
        error.args = (f"{error}{text}",)
