"""Brings one committed checkpoint into another tier: its containers, each byte compared on the way, then its manifest.

The containers and the catalog keep their bytes. In a store of objects their names have the attempt: two processes that
bring one checkpoint write the same bytes under the same names. What an interrupted one has sent is not sent again. A
container that is damaged at its source does not arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from datastates.commit import catalog, health, manifest
from datastates.commit.carry import adopted, compared, index_crc
from datastates.commit.manifest import ContainerEntry, Manifest, container_name, kept_name, named_in
from datastates.commit.tier import Uncommitted
from datastates.commit.tiers import tier_of
from datastates.container.file import Named
from datastates.errors import CommitError, FencedError, StorageError
from datastates.storage import store_of
from datastates.storage.location import Location
from datastates.storage.objects import ABSENT


class Part(NamedTuple):
    """The part of one process in bringing a checkpoint into a tier.

    Attributes:
        ranks: The ranks whose containers this process copies; None: of all ranks.
        commits: Whether it commits, once the containers of all ranks are there.
        ready: Called when nothing but the name is left to do. What it raises stops the commit.
        pace: Called with the number of bytes before they are sent. It may wait, and what it raises ends the copying.
    """

    ranks: Collection[int] | None = None
    commits: bool = True
    ready: Callable[[], None] = lambda: None
    pace: Callable[[int], object] = lambda nbytes: None


def bring(path: Location, found: Uncommitted, part: Part) -> Location | None:
    """Bring the checkpoint at ``path`` to where :meth:`Tier.arriving` says; returns its path there.

    None: it is not committed, as ``part`` says, or as the containers of other processes are missing yet. It goes on
    where an earlier call of any process has stopped.

    Raises:
        CheckpointNotFoundError: ``path`` is no checkpoint any more.
        CorruptError, FormatError: It is damaged; the message names the file and the tensor, the object or the place.
        StorageError: It cannot be read, or the tier cannot be written.
        CommitError: Another process has given its attempt up there. A later try takes another name.
    """
    with tier_of(path.parent).protect(path):
        made = manifest.open(path)
        try:
            found.begin()
            brought = _bring(path, made, found, part)
        except BaseException as error:
            found.leave()  # what is there already need not be sent again
            found.abandon()
            # another process may have brought it meanwhile: a directory then has another name
            there = tier_of(found.target.parent).of_attempt(found.target, made.attempt) if _may_be(error) else None
            if there is None:
                raise
            return there
        found.close()
        return brought


def _may_be(error: BaseException) -> bool:
    """Whether an error may mean that another process has committed the attempt: it may have taken files along."""
    if isinstance(error, StorageError):
        return error.errno in (0, *ABSENT)
    return isinstance(error, CommitError) and not isinstance(error, FencedError)


def _bring(path: Location, made: Manifest, found: Uncommitted, part: Part) -> Location | None:
    files = [_file_of(one, found) for one in made.containers]
    every = [*zip(named_in(path, made), files, strict=True)]
    own = [(one, file) for one, file in every if part.ranks is None or one.identity["rank"] in part.ranks]
    for (one, file), is_there in zip(own, _are_there(own), strict=True):
        if is_there and index_crc(file, one.nbytes) == one.index_crc:
            continue
        if not adopted(one, file, part.pace):
            store_of(file).upload(file, compared(one, part.pace), one.nbytes)
    if not part.commits:
        return None
    for (one, file), is_there in zip(every, _are_there(every), strict=True):
        if not is_there:
            if (one, file) in own:
                raise StorageError(0, "write", str(file), f"write {file}: it does not have the {one.nbytes} bytes sent")
            return None
    containers = [
        one.model_copy(update=_names_of(file, found)) for one, file in zip(made.containers, files, strict=True)
    ]
    entry = made.catalog
    if entry is not None:
        data = store_of(path).read_all(path / entry.file, entry.nbytes)
        catalog.Catalog(_from(data), len(data), entry.head_crc32, str(path / entry.file)).check()
        entry = entry.model_copy(update={"file": found.add(catalog.FILE, data).name})
    numbered = {"format": max(made.format, manifest.FORMAT_VERSION), "sequence": made.sequence or 1}
    changes = {**numbered, "containers": tuple(containers), "catalog": entry}
    return found.commit(made.model_copy(update=changes), part.ready)


def _file_of(one: ContainerEntry, found: Uncommitted) -> Location:
    """The path that a container gets."""
    if one.step is None or one.attempt is None:
        return found.named(container_name(one.rank))
    return found.kept(kept_name(one.rank), one.step, one.attempt)


def _names_of(file: Location, found: Uncommitted) -> dict[str, Any]:
    """What the manifest says of the path that a container has got."""
    return {"file": file.name, "folder": manifest.folder_of(file, found.directory)}


def _are_there(files: list[tuple[Named, Location]]) -> list[bool]:
    """Whether each container is in the tier, by its length."""
    if not files:
        return []
    lengths = store_of(files[0][1]).lengths([file for _, file in files])
    return [found == one.nbytes for (one, _), found in zip(files, lengths, strict=True)]


def is_damage_of(path: Location, error: BaseException) -> bool:
    """Whether an error of :func:`bring` means that the checkpoint at ``path`` is damaged, not that its target fails."""
    is_elsewhere = isinstance(error, StorageError) and not manifest.is_of(Location(str(error.filename)), path)
    return health.is_damage(error) and not is_elsewhere


def _from(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, nbytes: data[offset : offset + nbytes]
